"""The options of commands that may talk to nodes: whom to reach, and what to show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rt.cli.options import option

if TYPE_CHECKING:
    from rt.net.tls import TLS

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False)


def endpoint_options(command: _Command) -> _Command:
    """`--endpoint`, repeatable, as `endpoints`; `--ca`, `--cert` and `--key`."""
    for add in (
        option("--key", type=_FILE, help="PEM file of its private key."),
        option("--cert", type=_FILE, help="PEM file of our certificate."),
        option("--ca", type=_FILE, help="PEM file of the CA that the nodes' certificates chain to."),
        option(
            "--endpoint",
            "endpoints",
            multiple=True,
            metavar="HOST:PORT",
            help="A node of the stream's cluster; repeatable. Without any, all stays on this machine.",
        ),
    ):
        command = add(command)
    return command


def endpoints_tls(
    endpoints: tuple[str, ...], ca: str | None, cert: str | None, key: str | None
) -> TLS | None:
    """What the options say; misuse unless there are endpoints and all three files, or none of it.

    `rt.CertificateError` for files that cannot be used.
    """
    if not endpoints:
        if ca or cert or key:
            raise click.UsageError("--ca, --cert and --key go with --endpoint.")
        return None
    if not (ca and cert and key):
        raise click.UsageError("--endpoint wants --ca, --cert and --key.")
    from rt.net.tls import TLS

    return TLS(ca=ca, cert=cert, key=key)

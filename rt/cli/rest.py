"""`rt rest`: what the nodes' REST answers, asked through their gRPC port."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rt.cli.options import option

if TYPE_CHECKING:
    from rt.net.tls import TLS

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False)


def node_options(command: _Command) -> _Command:
    """`--endpoints`, `--ca`, `--cert`, `--key` and `--insecure`, for `nodes_of`."""
    for add in (
        option("--insecure", is_flag=True, help="No TLS; to nodes on this machine only."),
        option("--key", type=_FILE, help="PEM file of its private key."),
        option("--cert", type=_FILE, help="PEM file of our certificate."),
        option("--ca", type=_FILE, help="PEM file of the CA that the nodes' certificates chain to."),
        option(
            "--endpoints",
            required=True,
            metavar="HOST:PORT,...",
            help="The nodes' gRPC ports; they are asked in turn until one answers.",
        ),
    ):
        command = add(command)
    return command


def nodes_of(
    endpoints: str, ca: str | None, cert: str | None, key: str | None, *, insecure: bool
) -> tuple[list[str], TLS | None]:
    """The endpoints and the TLS that the options name; misuse unless they go together.

    `rt.CertificateError` for files that cannot be used.
    """
    nodes = [endpoint.strip() for endpoint in endpoints.split(",") if endpoint.strip()]
    if not nodes:
        raise click.UsageError("--endpoints names no node.")
    if insecure:
        if ca or cert or key:
            raise click.UsageError("--insecure goes without --ca, --cert and --key.")
        return nodes, None
    if not (ca and cert and key):
        raise click.UsageError("Give --ca, --cert and --key (or --insecure, on this machine).")
    from rt.net.tls import TLS

    return nodes, TLS(ca=ca, cert=cert, key=key)


@click.command()
@click.argument("target", metavar="TARGET")
@option("--data", metavar="JSON", help="What is sent: a POST then, else a GET.")
@node_options
def rest(
    target: str,
    data: str | None,
    endpoints: str,
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
) -> None:
    """Write what REST answers at TARGET, a path with its query (/status).

    It is asked through the gRPC port, with the rights that the certificate has on the REST port; /docs says
    what there is. A POST is asked of the next node only if the one before could not be reached.
    """
    from rt.net.rest import ask, check, error_in

    nodes, tls = nodes_of(endpoints, ca, cert, key, insecure=insecure)
    path = target if target.startswith("/") else f"/{target}"
    method, body = ("GET", None) if data is None else ("POST", _checked_json(data))
    answer = asyncio.run(ask(nodes, tls, method, path, body))
    if error_in(answer) is None:  # Of some answers the status says as much as the body.
        sys.stdout.buffer.write(answer.body)
        sys.stdout.buffer.flush()
    check(answer)


def _checked_json(data: str) -> bytes:
    try:
        json.loads(data)
    except ValueError as error:
        raise click.UsageError(f"--data is no JSON: {error}") from None
    return data.encode()

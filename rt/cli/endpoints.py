"""The options of the commands that talk to nodes: `--endpoints`, `--ca`, `--cert`, `--key`, `--insecure`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from rt.cli.options import option
from rt.errors import InvalidOption

if TYPE_CHECKING:
    from rt.net.tls import TLS

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE: Final = click.Path(exists=True, dir_okay=False)
_FORM: Final = "HOST:PORT, separated by commas"


def endpoint_options(
    endpoints_help: str,
    *,
    is_required: bool = False,
    can_be_insecure: bool = False,
    cert_help: str = "PEM file of the client certificate.",
) -> Callable[[_Command], _Command]:
    """Add `--endpoints`, `--ca`, `--cert` and `--key` to a command, and `--insecure` on request.

    `endpoints` is the text that was given: `parse_endpoints` reads it.
    """

    def decorate(command: _Command) -> _Command:
        if can_be_insecure:
            command = option(
                "--insecure",
                is_flag=True,
                help="Connect without TLS. Allowed only for nodes on this machine.",
            )(command)
        command = option("--key", type=_FILE, help="PEM file of the client's private key.")(command)
        command = option("--cert", type=_FILE, help=cert_help)(command)
        command = option("--ca", type=_FILE, help="PEM file of the CA that signed the nodes' certificates.")(
            command
        )
        return option("--endpoints", metavar="HOST:PORT,...", required=is_required, help=endpoints_help)(
            command
        )

    return decorate


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split "host:port,[::1]:port"; `rt.InvalidOption` if none is named or one is malformed."""
    endpoints = tuple(filter(None, map(str.strip, text.split(","))))
    if not endpoints:
        raise InvalidOption("no endpoint is named", where="--endpoints", got=repr(text), expected=_FORM)
    for endpoint in endpoints:
        if (problem := _problem(endpoint)) is not None:
            raise InvalidOption(problem, where="--endpoints", got=repr(endpoint)[:200], expected=_FORM)
    return endpoints


def _problem(endpoint: str) -> str | None:
    """What is wrong with an endpoint; None if it is well-formed."""
    if "://" in endpoint:
        return "an endpoint has no scheme"
    host, colon, port = endpoint.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not is_bracketed):
        return "the port is missing"
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535):
        return "the port is not a number from 1 to 65535"
    if not host.strip("[]") or not host.isprintable() or set(host) & set(" /@;="):
        return "the host is not a name or an address"
    return None


def parse_tls(ca: str | None, cert: str | None, key: str | None, *, insecure: bool = False) -> TLS | None:
    """Read the TLS options; None with `--insecure`. `click.UsageError` if the options do not go together.

    `rt.CertificateError` if the files cannot be used.
    """
    if insecure:
        if ca or cert or key:
            raise click.UsageError("--insecure excludes --ca, --cert and --key.")
        return None
    if not (ca and cert and key):
        raise click.UsageError("Give --ca, --cert and --key (or --insecure for nodes on this machine).")
    from rt.net.tls import TLS

    return TLS(ca=ca, cert=cert, key=key)


def parse_optional_endpoints(
    endpoints: str | None, ca: str | None, cert: str | None, key: str | None
) -> tuple[tuple[str, ...], TLS | None]:
    """Read endpoints and TLS of a command that also works without nodes; `((), None)` if neither is given."""
    if not endpoints:
        if ca or cert or key:
            raise click.UsageError("--ca, --cert and --key need --endpoints.")
        return (), None
    if not (ca and cert and key):
        raise click.UsageError("--endpoints needs --ca, --cert and --key.")
    return parse_endpoints(endpoints), parse_tls(ca, cert, key)

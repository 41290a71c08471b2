"""The options of the commands that talk to nodes: `--endpoints`, `--ca`, `--cert`, `--key`, `--insecure`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from rt.cli.options import option
from rt.endpoints import split_endpoints

if TYPE_CHECKING:
    from rt.net.tls import TLS

T = TypeVar("T")

_NAMES: Final = ("endpoints", "ca", "cert", "key", "insecure")
_FILE: Final = click.Path(exists=True, dir_okay=False)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options as they were given."""

    endpoints: str | None
    ca: str | None
    cert: str | None
    key: str | None
    insecure: bool = False
    is_required: bool = False

    @property
    def files(self) -> dict[str, str | None]:
        return {"ca": self.ca, "cert": self.cert, "key": self.key}

    def parse(self) -> tuple[tuple[str, ...], TLS | None]:
        """Endpoints, and TLS or None with `--insecure`; `((), None)` if a command may work without nodes.

        Raises `click.UsageError` if the options do not go together, `rt.InvalidOption` if an endpoint is
        malformed or named twice, `rt.CertificateError` if the files cannot be used.
        """
        has_files = any(self.files.values())
        if not self.endpoints and not self.is_required:
            if has_files:
                raise click.UsageError("--ca, --cert and --key need --endpoints.")
            return (), None
        endpoints = split_endpoints(self.endpoints or "", where="--endpoints")
        if self.insecure:
            if has_files:
                raise click.UsageError("--insecure excludes --ca, --cert and --key.")
            return endpoints, None
        if not (self.ca and self.cert and self.key):
            raise click.UsageError(
                "--endpoints needs --ca, --cert and --key"
                f"{' (or --insecure for nodes on this machine)' if self.is_required else ''}."
            )
        from rt.net.tls import TLS

        return endpoints, TLS(ca=self.ca, cert=self.cert, key=self.key)


def endpoint_options(
    endpoints_help: str, *, is_required: bool = False, cert_help: str = "PEM file of the client certificate."
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add `--endpoints`, `--ca`, `--cert` and `--key` to a command, which gets them as `nodes`.

    A command with `is_required` has `--insecure` too.
    """

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def run(*arguments: Any, **given: Any) -> T:
            own = {name: given.pop(name) for name in _NAMES if name in given}
            return command(*arguments, nodes=NodeOptions(**own, is_required=is_required), **given)

        options = [
            option("--endpoints", metavar="HOST:PORT,...", required=is_required, help=endpoints_help),
            option("--ca", type=_FILE, help="PEM file of the CA that signed the nodes' certificates."),
            option("--cert", type=_FILE, help=cert_help),
            option("--key", type=_FILE, help="PEM file of the client's private key."),
        ]
        if is_required:
            help_text = "Connect without TLS. Allowed only for nodes on this machine."
            options.append(option("--insecure", is_flag=True, help=help_text))
        return functools.reduce(lambda function, add: add(function), reversed(options), run)

    return decorate

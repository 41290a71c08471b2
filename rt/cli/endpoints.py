"""The options of the commands that talk to nodes: `--endpoints`, `--ca`, `--cert`, `--key`, `--profile`, ...

Settings that no option gives are taken from the sources of `rt.connect`: `RT_*` variables, `RT_URL`, a
profile.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass  # noqa: TID251
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from rt.cli.options import ExistingPath, connect_timeout_option, option
from rt.client.connection import certificate_source, default_path, merge_sources
from rt.endpoints import split_endpoints
from rt.names import check_name

if TYPE_CHECKING:
    from rt.net.identity import Role
    from rt.net.tls import TLS

T = TypeVar("T")

_NAMES: Final = ("endpoints", "ca", "cert", "key", "profile", "insecure")
_CERT_HELP: Final = "PEM file of the client certificate; its role must be {role}."
_FILE: Final = ExistingPath(dir_okay=False)


@dataclass(frozen=True)
class NodeOptions:
    """The options as they were given to a command for clients of `role`."""

    role: Role
    endpoints: str | None = None
    """No nodes if it is "", even if other sources name nodes."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    profile: str | None = None
    insecure: bool = False
    is_required: bool = False

    @property
    def is_given(self) -> bool:
        """Whether options of the command give nodes or certificates."""
        return any((self.endpoints, self.ca, self.cert, self.key, self.insecure))

    @functools.cached_property
    def merged(self) -> dict[str, str]:
        """The settings of options and other sources, merged by `merge_sources`. The sources are read once."""
        if self.endpoints:
            split_endpoints(self.endpoints, where="--endpoints")
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        given = {"endpoints": self.endpoints or None, **files}
        merged = merge_sources(os.environ, None, self.profile, given)
        if self.endpoints == "":
            merged.pop("endpoints", None)
        return merged

    def path(self, given: str | None) -> str:
        """The directory of this host's logs. `click.UsageError` if no source says it."""
        found = given or self.merged.get("path")
        if found is None and "endpoints" not in self.merged:
            raise click.UsageError("Missing option '--path'. Without nodes it has no default.")
        return found or default_path(os.environ)

    def stream(self, given: str | None) -> str:
        """The name of the stream. `click.UsageError` if no source says it."""
        found = given or self.merged.get("stream")
        if found is None:
            raise click.UsageError("Missing option '--stream'. RT_URL or a profile can name it too.")
        return check_name(found, kind="stream")

    def parse(self, name: str | None = None) -> tuple[tuple[str, ...], TLS | None]:
        """Return the endpoints, and TLS, or None with `--insecure`.

        Return `((), None)` if there are no nodes and the command may work without them. `name` selects the
        certificate if there are several.

        Raises `click.UsageError` if the options do not go together, `rt.InvalidOption` if an endpoint is
        malformed or named twice, `rt.CertificateError` if the files cannot be used.
        """
        merged = self.merged
        has_files = any((self.ca, self.cert, self.key))
        if "endpoints" not in merged:
            if self.is_required:
                raise click.UsageError("Missing option '--endpoints'. RT_URL or a profile may name nodes.")
            if has_files:
                raise click.UsageError("--ca, --cert and --key need --endpoints.")
            return (), None
        endpoints = split_endpoints(merged["endpoints"])
        if self.insecure:
            if has_files:
                raise click.UsageError("--insecure excludes --ca, --cert and --key.")
            return endpoints, None
        certificates = certificate_source(merged)
        if certificates.missing:
            raise click.UsageError(
                "--endpoints needs --ca, --cert and --key"
                f"{' (or --insecure for nodes on this machine)' if self.is_required else ''}."
            )
        return endpoints, certificates.find(self.role, name)

    def ask(self, connect_s: float, target: str, body: object = None) -> Any:
        """See `ask_nodes`."""
        return asyncio.run(ask_nodes(*self.parse(), connect_s, target, body))


def endpoint_options(
    role: Role, endpoints_help: str, *, is_required: bool = False, cert_help: str | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add `--endpoints`, `--ca`, `--cert`, `--key` and `--profile` to a command, which gets them as `nodes`.

    A command with `is_required` has `--insecure` too.
    """

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def run(*arguments: Any, **given: Any) -> T:
            own = {name: given.pop(name) for name in _NAMES if name in given}
            return command(*arguments, nodes=NodeOptions(role, **own, is_required=is_required), **given)

        options = [
            option("--endpoints", metavar="HOST:PORT,...", help=endpoints_help),
            option("--ca", type=_FILE, help="PEM file of the CA that signed the nodes' certificates."),
            option("--cert", type=_FILE, help=cert_help or _CERT_HELP.format(role=role)),
            option("--key", type=_FILE, help="PEM file of the client's private key."),
            option(
                "--profile",
                metavar="NAME",
                help="Profile in ~/.config/rt/config.toml that says what is not given. Default: default.",
            ),
        ]
        if is_required:
            help_text = "Connect without TLS. Allowed only for nodes on this machine."
            options.append(option("--insecure", is_flag=True, help=help_text))
        return functools.reduce(lambda function, add: add(function), reversed(options), run)

    return decorate


_NODES_TO_ASK: Final = endpoint_options(
    "operator",
    "gRPC endpoints of the nodes, separated by commas. They are asked in turn until one answers.",
    is_required=True,
)
_TIME_TO_CONNECT: Final = connect_timeout_option(
    "A node that cannot be connected to in this time is left for the next one."
)


def operator_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options of a command that asks nodes as an operator: `nodes` and `connect_timeout`."""
    return _TIME_TO_CONNECT(_NODES_TO_ASK(command))


async def ask_nodes(
    endpoints: Sequence[str],
    tls: TLS | None,
    connect_s: float,
    target: str,
    body: object = None,
    *,
    where: str | None = None,
    empty: Any = None,
    timeout_s: float | None = None,
) -> Any:
    """Send a request, and return the decoded answer of the first node that answers. `rt.RtError` if it fails.

    The request is a POST if there is a `body`, otherwise a GET. `where` names the node in errors. `empty`, if
    given, is returned if the node is not ready, or too old to know the target. `timeout_s` is the timeout of
    the answer.
    """
    from rt.net.rest_client import TIMEOUT_S, ask, check

    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    answer = await ask(
        endpoints, tls, method, target, data, connect_timeout_s=connect_s, timeout_s=timeout_s or TIMEOUT_S
    )
    if answer.status in {404, 503} and empty is not None:
        return empty
    return json.loads(check(answer, where=where).body)

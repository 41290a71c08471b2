"""The protocol between a process with publishers and its push processes: see `rt.line_protocol`.

The end of the stream finishes all sessions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import Struct

from rt.errors import RtError
from rt.sidecar.error_report import ErrorReported

SERVING_FILE: Final = "push.lock"
"""A file in a session's directory: the push client that serves the session has locked it."""
PUSH_LOG: Final = "push.log"
"""The log records of the push processes that concern a session: a file in its directory."""


class PushRequested(Struct, frozen=True, tag="push"):
    """Push the session in `directory` to the nodes at `endpoints`; `ca`, `cert`, `key` are PEM files.

    `number` identifies this request.
    """

    number: int
    directory: str
    stream: str
    endpoints: tuple[str, ...]
    ca: str
    cert: str
    key: str


class FinishRequested(Struct, frozen=True, tag="finish"):
    """The publisher of this session was closed: push the rest, then end."""

    number: int


class PushEnded(Struct, frozen=True, tag="ended"):
    """From the push process: do not request this session again.

    All is replicated, another client serves the directory, or the nodes reject further data.
    """

    number: int


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """A publisher's connection to one node.

    `endpoint` is "host:port". `is_connected`: the node accepts the session now. `error`: why the last attempt
    failed or the node refuses the session; None if nothing failed.
    """

    endpoint: str
    is_connected: bool
    error: RtError | None = None

    @property
    def reason(self) -> str:
        """The endpoint and why it failed, in one short line; empty if it is connected, or nothing failed."""
        if self.is_connected or self.error is None:
            return ""
        return f"{self.endpoint}: {self.error.reason}"


class PushReported(Struct, frozen=True, tag="reported"):
    """From the push process: the state of a push. Made by `of`."""

    number: int
    failed: ErrorReported | None
    connections: tuple[tuple[str, bool, ErrorReported | None], ...]
    """Endpoint, whether it is connected, and why it failed."""
    members: int = 0
    """How many nodes the cluster has, as a node said when they changed; 0: as many as endpoints."""

    @classmethod
    def of(
        cls, number: int, error: RtError | None, endpoints: Iterable[EndpointStatus], members: int = 0
    ) -> PushReported:
        """`error` blocks the push until somebody mends it; None: nothing does."""
        connections = ((one.endpoint, one.is_connected, _failed(one.error)) for one in endpoints)
        return cls(number, _failed(error), tuple(connections), members)

    @property
    def error(self) -> RtError | None:
        return None if self.failed is None else self.failed.error

    @property
    def endpoints(self) -> tuple[EndpointStatus, ...]:
        return tuple(
            EndpointStatus(endpoint, is_connected, None if failed is None else failed.error)
            for endpoint, is_connected, failed in self.connections
        )


def _failed(error: RtError | None) -> ErrorReported | None:
    return None if error is None else ErrorReported.of(error)


PushLine: TypeAlias = PushRequested | FinishRequested | PushEnded | PushReported

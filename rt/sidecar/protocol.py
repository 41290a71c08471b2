"""The messages between a client and its push and pull processes, one per line: see `rt.line_protocol`.

Pure. `rt pull --attached` reports to the subscriber that started it, on stdout. A process with publishers and
its push processes send in both directions. The end of the stream finishes all sessions. An error is rebuilt
from its line only if it is one of `rt.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from rt import errors
from rt.errors import Corrupt, RtError

_Position: TypeAlias = Annotated[int, Meta(ge=0)]

_TEXTS: Final = ("what", "where", "got", "expected", "hint")
_TEXT_CHARACTERS_MAX: Final = 2000
_WITH_MORE: Final = (Corrupt, errors.Gap)
"""Classes with fields that are not texts."""

SERVING_FILE: Final = "push.lock"
"""A file in a session's directory: the push client that serves the session has locked it."""
PUSH_LOG: Final = "push.log"
"""The log records of the push processes that concern a session: a file in its directory."""


class ErrorReported(Struct, frozen=True, tag="failed"):
    """An error of a child process, reported to its parent."""

    kind: str
    texts: dict[str, str]
    path: str = ""
    offset: int = 0

    @classmethod
    def of(cls, error: RtError) -> ErrorReported:
        """The report of an error. Long texts are cut."""
        said = {name: getattr(error, name) for name in _TEXTS}
        texts = {name: str(text)[:_TEXT_CHARACTERS_MAX] for name, text in said.items() if text is not None}
        place: tuple[Any, ...] = (error.path, error.offset) if isinstance(error, Corrupt) else ()
        return cls(type(error).__name__, texts, *place)

    @property
    def error(self) -> RtError:
        """The error; an `rt.RtError` if its class cannot be built from texts."""
        kind = getattr(errors, self.kind, None)
        texts: dict[str, Any] = {"what": ""} | {
            name: self.texts[name] for name in _TEXTS if name in self.texts
        }
        if kind is Corrupt:
            return Corrupt(**texts, path=self.path, offset=self.offset)
        has_texts_only = isinstance(kind, type) and issubclass(kind, RtError) and kind not in _WITH_MORE
        return kind(**texts) if has_texts_only and kind is not None else RtError(**texts)


class TimeResolved(Struct, frozen=True):
    """The position that belongs to the time at which the pull starts.

    All messages before `position` are earlier than that time. If `is_message`, the message at `position` has
    that time or a later time.
    """

    position: _Position
    is_message: bool


class NodeReached(Struct, frozen=True, tag="reached"):
    """A node was reached for the first time. Its log ended at `end`."""

    end: _Position
    found: TimeResolved | None = None


class NodesUnreached(Struct, frozen=True, tag="unreached"):
    """No node was reached yet, although each was tried."""

    why: str


class HoldDenied(Struct, frozen=True, tag="refused"):
    """The nodes retain no data for the subscriber of that name."""

    name: str
    why: str


class NoGoodBytes(Struct, frozen=True, tag="corrupt"):
    """No node has valid bytes for positions `start` to `end` (exclusive); None: the end is not known."""

    start: _Position
    end: int | None
    why: str


PullReport: TypeAlias = NodeReached | NodesUnreached | HoldDenied | NoGoodBytes | ErrorReported


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


class EndpointStatus(Struct, frozen=True):
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
    """Number of nodes of the cluster, as reported by a node when the nodes changed; 0: as many as
    endpoints.
    """

    @classmethod
    def of(
        cls, number: int, error: RtError | None, endpoints: Iterable[EndpointStatus], members: int = 0
    ) -> PushReported:
        """Make a report. `error` blocks the push until it is fixed; None if no error blocks the push."""
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

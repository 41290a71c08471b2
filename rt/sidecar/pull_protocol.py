"""Reports of `rt pull --attached` to the subscriber that started it, on stdout: see `rt.line_protocol`.

`ErrorReported` is the permanent error with which the process ends. Pure.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from rt.sidecar.error_report import ErrorReported

_Position: TypeAlias = Annotated[int, Meta(ge=0)]


class TimeResolved(Struct, frozen=True):
    """Where the time begins at which the pull starts.

    No message before `position` is of that time or later. The one at it is, if `is_message`.
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
    """The nodes hold back no data for the subscriber of that name."""

    name: str
    why: str


class NoGoodBytes(Struct, frozen=True, tag="corrupt"):
    """No node has valid bytes for positions `start` to `end` (exclusive); None: the end is not known."""

    start: _Position
    end: int | None
    why: str


PullReport: TypeAlias = NodeReached | NodesUnreached | HoldDenied | NoGoodBytes | ErrorReported

"""What a reader is told beside its messages, as values.

A reader hands each event to its `on_event` handler. Without a handler an event that means missing messages
is raised as `rt.Gap`: a reader is never left silently behind a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BadTail:
    """The log ends in bytes at `offset` of `path` that are no whole batch: torn, or still being written."""

    path: str
    offset: int
    torn_bytes: int


@dataclass(frozen=True, slots=True)
class BadMessage:
    """Messages at `start` up to, not including, `end` are as they were published but cannot be decoded.

    Their checksums hold; `reason` says what does not (an unknown codec, a size above the limits).
    """

    start: int
    end: int
    path: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class SkipForward:
    """The reader wanted `wanted`, but the log now starts at `resumed`: what lies between was trimmed."""

    wanted: int
    resumed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reset:
    """An operator reset the stream: what comes from `position` on is of another epoch.

    A hard reset let go of what was before: what was merged and not read is told by `SkipForward`, what was
    published and not merged is gone without a position. A forced one went on with what one node knew: before
    `position` all is as it was, but what others had merged behind it is not of this stream any more.
    """

    position: int
    merged_x: int
    """X of the merged segments from there on: the epoch of the cluster that began with the reset."""


@dataclass(frozen=True, slots=True)
class HoldRefused:
    """The nodes hold nothing back for this subscriber, `name`, and `why` not: what it is slow to read may go.

    Told again now and then while it is so. Nothing is missing yet.
    """

    name: str
    why: str


Event: TypeAlias = BadTail | BadMessage | SkipForward | Reset | HoldRefused

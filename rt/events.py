"""What a reader reports besides messages.

A reader passes each event to its `on_event` handler. Without a handler, an event that means missing messages
is raised as `rt.Gap`, so a reader never skips messages silently.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct


class BadTail(Struct, frozen=True):
    """The log ends with an incomplete batch of `torn_bytes` at `offset` of `path`: torn, or being written."""

    path: str
    offset: int
    torn_bytes: int


class BadMessage(Struct, frozen=True):
    """Messages from `start` to `end` (exclusive) are stored as published, but cannot be decoded.

    Their checksums are valid; `reason` says what is wrong, such as an unknown codec.
    """

    start: int
    end: int
    path: str
    offset: int
    reason: str


class SkipForward(Struct, frozen=True):
    """The reader expected position `wanted`; those before `resumed`, the new log start, were trimmed."""

    wanted: int
    resumed: int
    reason: str


class CorruptPositions(Struct, frozen=True):
    """No node has valid bytes for positions `start` to `end` (exclusive).

    `end` is the end of the corrupt segment, or None if no node knows it. `reason` is what the nodes reported.
    The subscriber waits at `start` until a node has valid bytes again, or until an operator trims the log
    past the corrupt part, which it reports as `SkipForward`.
    """

    start: int
    end: int | None
    reason: str


class Reset(Struct, frozen=True):
    """An operator reset the stream: messages from `position` on belong to another epoch.

    After a hard reset, `SkipForward` reports messages that were merged but not read; messages that were
    published but not merged are lost and have no position. A forced reset continues with the data of one
    node: messages before `position` are unchanged, later ones that other nodes had merged are no longer in
    the stream.
    """

    position: int
    merged_run: int
    """X of the merged segments from `position` on: the number of the new epoch."""


class HoldRefused(Struct, frozen=True):
    """The nodes hold back no data for this subscriber, `name`; `why` says the reason. They may trim unread
    data.

    Repeated from time to time while it lasts. Nothing is missing yet.
    """

    name: str
    why: str


Event: TypeAlias = BadTail | BadMessage | SkipForward | CorruptPositions | Reset | HoldRefused

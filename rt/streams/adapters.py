"""What a kind of queue brings: a factory, an adapter, a receiver for each queue that is served.

Laws. Within a queue tokens rise from event to event, and stay with their events: what is received again has
the tokens that it had. A receiver gives everything from where it was opened, or says what is missing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rt.streams.batches import EventBatch
from rt.streams.ids import QueueId, SequenceToken, StreamId
from rt.streams.mapping import QueueMapper


class StreamDirection(enum.Enum):
    """What can be done with the queues of an adapter."""

    READ_ONLY = "read"
    WRITE_ONLY = "write"
    READ_WRITE = "read and write"


@dataclass(frozen=True, slots=True)
class QueueGap:
    """Events from `wanted` up to, not including, `resumed` cannot be had any more."""

    wanted: SequenceToken
    resumed: SequenceToken
    reason: str


@dataclass(frozen=True, slots=True)
class QueueRead:
    """What one read brought: everything up to `end` that was asked for, `gap` apart, which lies before it."""

    batches: Sequence[EventBatch]
    end: SequenceToken
    gap: QueueGap | None = None


class QueueReceiver(Protocol):
    """Reads one queue; used by one task."""

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        """What comes next, at most so many events; None after `timeout` seconds without any.

        Cancelling it loses nothing. What it raises that is retriable is asked for again.
        """

    async def acknowledge(self, low: SequenceToken) -> None:
        """Everything before `low` is with every consumer, durably: the queue may forget it."""

    @property
    def start(self) -> SequenceToken:
        """The first token that it was to give, once it is open."""

    @property
    def known_end(self) -> SequenceToken | None:
        """Where the queue ends as far as that is known without asking; None: not at all."""

    async def close(self) -> None:
        """Let go of it. Twice is allowed."""


class HistoryReader(Protocol):
    """Reads one stream of a queue that can be read again; used by one task."""

    async def read(self, events_max: int) -> QueueRead:
        """The stream's next events, up to the end of what is there now; at that end, none."""

    async def close(self) -> None:
        """Let go of it. Twice is allowed."""


class QueueAdapter(Protocol):
    """The queues of a provider on this host."""

    @property
    def name(self) -> str:
        """For logs."""

    @property
    def is_rewindable(self) -> bool:
        """Whether `history` can be had: an event that left the cache can be read again."""

    @property
    def direction(self) -> StreamDirection:
        """Whether `publish` and `receiver` can be had."""

    async def publish(self, queue: QueueId, stream: StreamId, events: Sequence[Any]) -> None:
        """Append the events, in order. Returns when they will not be lost with this process."""

    async def receiver(self, queue: QueueId, start: SequenceToken | None) -> QueueReceiver:
        """Open the queue at `start`; None: where it was acknowledged, else at its oldest event."""

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> HistoryReader:
        """Read a stream from `start` on; raises `NotRewindable` if `is_rewindable` is not."""

    async def close(self) -> None:
        """Let go of everything. Receivers and readers are closed by then. Twice is allowed."""


class QueueAdapterFactory(Protocol):
    """All that a provider needs to know of its queues, from one object, so that names agree."""

    @property
    def mapper(self) -> QueueMapper:
        """The queues, and which of them carries a stream."""

    async def adapter(self) -> QueueAdapter:
        """Make the adapter of this host."""

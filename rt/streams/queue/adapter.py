"""What a kind of queue implements: a factory, an adapter, and a receiver per served queue.

Invariants:
- Tokens rise within a queue and belong to their events: an event received again has the same token.
- A receiver returns everything from where it was opened, or reports what is missing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.queue.mapper import QueueMapper


class StreamDirection(enum.Enum):
    READ_ONLY = "read"
    WRITE_ONLY = "write"
    READ_WRITE = "read and write"


@dataclass(frozen=True, slots=True)
class QueueGap:
    """Events from `wanted` up to, not including, `resumed` are no longer available."""

    wanted: SequenceToken
    resumed: SequenceToken
    reason: str


@dataclass(frozen=True, slots=True)
class QueueRead:
    """One read: everything that was requested up to `end`, except `gap`, which lies before the batches."""

    batches: Sequence[EventBatch]
    end: SequenceToken
    gap: QueueGap | None = None


class QueueReceiver(Protocol):
    """Reads one queue. One task uses it."""

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        """Return the next events, at most `events_max`; None after `timeout` seconds without any.

        Cancelling must lose nothing. After a retriable error the caller calls again.
        """

    async def acknowledge(self, low: SequenceToken) -> None:
        """Every consumer has everything before `low`, durably: the queue may delete it."""

    @property
    def start(self) -> SequenceToken:
        """The first token it will return. Valid once it is open."""

    @property
    def known_end(self) -> SequenceToken | None:
        """The end of the queue, if known without a request; otherwise None."""

    async def close(self) -> None:
        """Must allow a second call."""


class HistoryReader(Protocol):
    """Reads one stream of a rewindable queue. One task uses it."""

    async def read(self, events_max: int) -> QueueRead:
        """Return the stream's next events, up to the current end of the queue; no batches at that end."""

    async def close(self) -> None:
        """Must allow a second call."""


class QueueAdapter(Protocol):
    """The queues of a provider on this host."""

    @property
    def is_rewindable(self) -> bool:
        """Whether `history` works: events that left the cache can be read again."""

    @property
    def direction(self) -> StreamDirection:
        """Whether `publish` and `receiver` work."""

    async def publish(self, queue: QueueId, stream: StreamId, events: Sequence[Any]) -> None:
        """Append the events, in order. Return only when a crash of this process cannot lose them."""

    async def receiver(self, queue: QueueId, start: SequenceToken | None) -> QueueReceiver:
        """Open the queue at `start`. None: at the acknowledged position, or else at its oldest event."""

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> HistoryReader:
        """Read a stream from `start` on. Must raise `NotRewindable` if `is_rewindable` is false."""

    async def close(self) -> None:
        """Release everything. Receivers and readers are closed before. Must allow a second call."""


class QueueAdapterFactory(Protocol):
    """Makes a provider's mapper and adapter in one object, so that queue names agree."""

    @property
    def mapper(self) -> QueueMapper: ...

    async def adapter(self) -> QueueAdapter:
        """Make the adapter of this host."""

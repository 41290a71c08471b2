"""What a kind of queue implements: a factory, an adapter, and a receiver per served queue.

Invariants:
- Tokens rise within a queue and belong to their events: an event received again has the same token.
- A receiver returns everything from where it was opened, or reports what is missing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from rt.log.format.headers import Headers
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.queue.mapper import QueueMapper
from rt.streams.queue.queue_epoch import QueueEpoch


class StreamDirection(enum.Enum):
    READ_ONLY = "read"
    WRITE_ONLY = "write"
    READ_WRITE = "read and write"


class QueueGap(Struct, frozen=True):
    """Events from `wanted` up to, not including, `resumed` are no longer available."""

    wanted: SequenceToken
    resumed: SequenceToken
    reason: str
    is_reset: bool = False
    """Whether an operator reset the queue there."""


class QueueRead(Struct, frozen=True):
    """One read: everything that was requested up to `end`, except `gaps`, in their order."""

    batches: Sequence[EventBatch]
    end: SequenceToken
    gaps: Sequence[QueueGap] = ()


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

    def reads(self, stream: StreamId) -> bool:
        """Whether receivers return events of the stream. Must be the same on all hosts."""

    async def publish(
        self, queue: QueueId, stream: StreamId, events: Sequence[Any], headers: Headers = ()
    ) -> None:
        """Append the events, in order, each with these headers. Return only when a crash of this process
        cannot lose them.
        """

    async def receiver(
        self,
        queue: QueueId,
        start: SequenceToken | None,
        store_id: str | None,
        needed: SequenceToken | None = None,
        /,
    ) -> QueueReceiver:
        """Open the queue at `start`. None: at the acknowledged position, or else at its oldest event.

        `needed`, if it is given, is before `start`: some subscription still reads from there on, as history.

        `store_id` is the id of the subscription store, if that outlives this process. Owners with different
        stores know nothing of each other: what one has acknowledged, another may still need.
        """

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> HistoryReader:
        """Read a stream from `start` on. Must raise `NotRewindable` if `is_rewindable` is false."""

    async def latest(self, queue: QueueId) -> SequenceToken | None:
        """The end of the queue now: every event published from now on has this token or a later one.

        None: unknown. `rt.RtError` if the queue does not answer.
        """

    async def token_at(self, queue: QueueId, timestamp_ns: int) -> SequenceToken:
        """The first event of the queue with this timestamp (ns since 1970) or a later one; the end of the
        queue if it has none.

        Must raise `NotRewindable` if events have no timestamps. `rt.RtError` if the queue does not answer.
        """

    async def epoch(self, queue: QueueId, /) -> QueueEpoch | None:
        """Which resets the queue has seen. None: unknown, or its positions never get another meaning.

        `rt.RtError` if the queue does not answer.
        """

    async def close(self) -> None:
        """Release everything. Receivers and readers are closed before. Must allow a second call."""


class QueueAdapterFactory(Protocol):
    """Makes a provider's mapper and adapter in one object, so that queue names agree."""

    @property
    def mapper(self) -> QueueMapper: ...

    async def adapter(self) -> QueueAdapter:
        """Make the adapter of this host."""

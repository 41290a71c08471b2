"""Queues in memory, for tests and for streams within a process.

Acknowledged events are deleted. At the end of the process, all events are deleted. Event numbers start above
the numbers of earlier processes: from the clock, or from the subscription store if the clock has moved back.
So a store that outlives a process never treats a new event as an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from rt.errors import Overloaded
from rt.log.format.headers import Headers
from rt.streams.core.errors import NotRewindable
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.queue.adapter import HistoryReader, QueueGap, QueueRead, StreamDirection
from rt.streams.queue.mapper import HashRingQueueMapper, QueueMapper
from rt.streams.queue.queue_epoch import QueueEpoch

EVENTS_MAX: Final = 16_384
"""The capacity of a queue."""


class MemoryQueues:
    """`count` queues. Factory and adapter in one, which hosts within a process may share.

    Event numbers start at `first`. Default: the microseconds since 1970.
    """

    is_rewindable: Final = False
    direction: Final = StreamDirection.READ_WRITE

    def __init__(
        self,
        count: int = 8,
        *,
        prefix: str = "memory",
        events_max: int = EVENTS_MAX,
        first: int | None = None,
    ) -> None:
        self.mapper: QueueMapper = HashRingQueueMapper(count, prefix)
        start = time.time_ns() // 1000 if first is None else first
        self._queues = {queue: _Queue(queue, events_max, start) for queue in self.mapper.queues}

    async def adapter(self) -> MemoryQueues:
        return self

    def reads(self, _: StreamId) -> bool:
        """All streams."""
        return True

    async def publish(
        self, queue: QueueId, stream: StreamId, events: Sequence[Any], headers: Headers = ()
    ) -> None:
        """Append the events. `rt.Overloaded` if the queue has no room for all; then none is appended."""
        self._queues[queue].append(stream, list(events), headers)

    async def receiver(
        self,
        queue: QueueId,
        start: SequenceToken | None,
        _store_id: str | None = None,
        _needed: SequenceToken | None = None,
    ) -> MemoryReceiver:
        return MemoryReceiver(self._queues[queue], start)

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> HistoryReader:
        """Always raises: acknowledged events are deleted."""
        raise NotRewindable("a queue in memory cannot be read again", where=f"{queue}, {stream}", got=start)

    async def latest(self, queue: QueueId) -> SequenceToken | None:
        return SequenceToken(self._queues[queue].end)

    async def token_at(self, queue: QueueId, timestamp_ns: int) -> SequenceToken:
        """Always raises: events in memory have no timestamps."""
        raise NotRewindable("a queue in memory knows no times", where=queue, got=f"{timestamp_ns} ns")

    async def epoch(self, _: QueueId) -> QueueEpoch | None:
        """None: it is never reset."""
        return None

    async def close(self) -> None:
        """Nothing to release."""


class _Queue:
    """The batches that are not acknowledged. Event i of the queue has the number `first` + i."""

    def __init__(self, queue: QueueId, events_max: int, first: int) -> None:
        self.queue = queue
        self.events_max = events_max
        self.batches: deque[EventBatch] = deque()
        self.start = first
        self.end = first
        self.grown = asyncio.Event()
        """Set and replaced when something was appended."""
        self._is_unread = True

    def begin(self, start: SequenceToken | None) -> None:
        """A reader opens the queue; its store has recorded everything up to `start`.

        If an earlier process with a faster clock wrote that store, all events are renumbered after its
        highest possible number. No number has been handed out yet.
        """
        is_unread, self._is_unread = self._is_unread, False
        if is_unread and start is not None and start >= SequenceToken(self.start):
            ahead = start.sequence_number + self.events_max + 1 - self.start
            self.start += ahead
            self.end += ahead
            self.batches = deque(
                replace(batch, sequence_numbers=[number + ahead for number in batch.sequence_numbers])
                for batch in self.batches
            )

    def append(self, stream: StreamId, events: list[Any], headers: Headers) -> None:
        if not events:
            return
        if self.end - self.start + len(events) > self.events_max:
            raise Overloaded(
                "a queue in memory is full",
                where=self.queue,
                got=f"{self.end - self.start:,} events and {len(events):,} more",
                expected=f"at most {self.events_max:,}",
                hint="Wait until consumers have caught up.",
            )
        numbers = range(self.end, self.end + len(events))
        of_each = [headers] * len(events) if headers else None
        self.batches.append(EventBatch(stream, numbers, events, None, 64 * len(events), of_each))
        self.end += len(events)
        self.grown.set()
        self.grown = asyncio.Event()


class MemoryReceiver:
    def __init__(self, queue: _Queue, start: SequenceToken | None) -> None:
        self._queue = queue
        queue.begin(start)
        oldest = SequenceToken(queue.start)
        self._at = oldest if start is None else max(start, oldest)
        self.start = self._at
        self._gap: QueueGap | None = None
        if start is not None and start < oldest:
            self._gap = QueueGap(start, oldest, "what was in memory went with its process")

    @property
    def known_end(self) -> SequenceToken:
        return SequenceToken(self._queue.end)

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        if (read := self._read(events_max)) is not None:
            return read
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._queue.grown.wait()
        return self._read(events_max)

    async def acknowledge(self, low: SequenceToken) -> None:
        queue = self._queue
        while queue.batches and queue.batches[0].last < low:
            queue.start += len(queue.batches.popleft())

    async def close(self) -> None:
        """Nothing to release."""

    def _read(self, events_max: int) -> QueueRead | None:
        if self._gap is not None:
            gap, self._gap = self._gap, None
            return QueueRead([], gap.resumed, [gap])
        taken: list[EventBatch] = []
        for batch in self._queue.batches:
            if events_max <= 0:
                break
            if (new := batch.from_token(self._at)) is not None:
                taken.append(new.slice(0, events_max))
                events_max -= len(taken[-1])
        if not taken:
            return None
        self._at = SequenceToken(taken[-1].last.sequence_number + 1)
        return QueueRead(taken, self._at)

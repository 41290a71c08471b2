"""Queues that generate their events, for tests and load.

Invariant: event `number` of a queue is a function of its number, so everything can be read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from rt.log.format.headers import Headers
from rt.streams.core.errors import NotRewindable, NotWritable
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.queue.adapter import QueueRead, StreamDirection
from rt.streams.queue.mapper import HashRingQueueMapper, QueueMapper
from rt.streams.queue.queue_epoch import QueueEpoch

EventMaker: TypeAlias = Callable[[QueueId, int], tuple[StreamId, Any]]
"""Makes the stream and the event of a number. Numbers start at 0."""

_EVENT_BYTES: Final = 64
_TICK_S: Final = 0.05
"""With a rate, events arrive in groups at this interval, in seconds."""


class GeneratorQueues:
    """`count` queues. Factory and adapter in one.

    A queue has `events` events (None: unlimited). They are available at once, or at `rate_per_s` per second
    from when the queue is first opened. A stream belongs to the queue that makes it, even if the mapper
    returns another queue.
    """

    is_rewindable: Final = True
    direction: Final = StreamDirection.READ_ONLY

    def __init__(
        self,
        make: EventMaker,
        count: int = 1,
        *,
        events: int | None = 100,
        rate_per_s: float | None = None,
        prefix: str = "generator",
    ) -> None:
        self.mapper: QueueMapper = HashRingQueueMapper(count, prefix)
        self.make = make
        self._events = events
        self._rate_per_s = rate_per_s
        self._began: dict[QueueId, float] = {}

    async def adapter(self) -> GeneratorQueues:
        return self

    def reads(self, _: StreamId) -> bool:
        """All streams."""
        return True

    async def publish(
        self, queue: QueueId, stream: StreamId, events: Sequence[Any], _headers: Headers = ()
    ) -> None:
        """Always raises: these queues are read-only."""
        raise NotWritable(
            "the queues of a generator are read-only", where=f"{queue}, {stream}", got=len(events)
        )

    async def receiver(
        self,
        queue: QueueId,
        start: SequenceToken | None,
        _store_id: str | None = None,
        _needed: SequenceToken | None = None,
    ) -> GeneratorReader:
        self._began.setdefault(queue, asyncio.get_running_loop().time())
        return GeneratorReader(self, queue, start or SequenceToken(0), None)

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> GeneratorReader:
        return GeneratorReader(self, queue, start, stream)

    async def latest(self, queue: QueueId) -> SequenceToken | None:
        end = self.end(queue)
        return None if end is None else SequenceToken(end)

    async def token_at(self, queue: QueueId, timestamp_ns: int) -> SequenceToken:
        """Always raises: events of a generator have no timestamps."""
        raise NotRewindable("a generator knows no times", where=queue, got=f"{timestamp_ns} ns")

    async def epoch(self, _: QueueId) -> QueueEpoch | None:
        """None: it is never reset."""
        return None

    async def close(self) -> None:
        """Nothing to release."""

    def end(self, queue: QueueId) -> int | None:
        """One past the last event available now; None: unlimited."""
        if self._rate_per_s is None:
            return self._events
        passed = asyncio.get_running_loop().time() - self._began[queue]
        made = int(passed * self._rate_per_s)
        return made if self._events is None else min(made, self._events)

    def wait_s(self, queue: QueueId, number: int) -> float | None:
        """Seconds until that event is available; None: never."""
        if self._rate_per_s is None or (self._events is not None and number >= self._events):
            return None
        due = self._began[queue] + (number + 1) / self._rate_per_s
        return max(_TICK_S, due - asyncio.get_running_loop().time())


class GeneratorReader:
    """Reads a queue, or one stream of it: receiver and history in one."""

    def __init__(
        self, queues: GeneratorQueues, queue: QueueId, start: SequenceToken, only: StreamId | None
    ) -> None:
        self._queues = queues
        self._queue = queue
        self.start = start
        self._at = start.sequence_number + (start.event_index > 0)
        self._only = only

    @property
    def known_end(self) -> SequenceToken | None:
        end = self._queues.end(self._queue)
        return None if end is None else SequenceToken(end)

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        if (read := self._take(events_max)).batches:
            await asyncio.sleep(0)
            return read
        wait = self._queues.wait_s(self._queue, self._at)
        await asyncio.sleep(timeout if wait is None else min(wait, timeout))
        return read if (read := self._take(events_max)).batches else None

    async def read(self, events_max: int) -> QueueRead:
        """The stream's next events, from the queue's next `events_max` events."""
        await asyncio.sleep(0)
        return self._take(events_max)

    async def acknowledge(self, low: SequenceToken) -> None:
        """Does nothing: events can be generated again."""

    async def close(self) -> None:
        """Nothing to release."""

    def _take(self, events_max: int) -> QueueRead:
        end = self._queues.end(self._queue)
        stop = self._at + events_max if end is None else max(self._at, min(self._at + events_max, end))
        found: dict[StreamId, tuple[list[int], list[Any]]] = {}
        make, queue = self._queues.make, self._queue
        for number in range(self._at, stop):
            stream, event = make(queue, number)
            numbers, events = found.setdefault(stream, ([], []))
            numbers.append(number)
            events.append(event)
        self._at = stop
        batches = [
            EventBatch(stream, numbers, events, None, _EVENT_BYTES * len(events))
            for stream, (numbers, events) in found.items()
            if self._only is None or stream == self._only
        ]
        return QueueRead(batches, SequenceToken(stop))

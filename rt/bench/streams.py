"""The speed of stream agents: one agent, one core, no network.

The queue is a merged log in local files, or generated, so that a figure measures only the agent, its cache
and its consumers.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from rt.bench.measure import Figure, Stopwatch, TimeUsed, wall_and_cpu
from rt.bench.merged_logs import TOPIC, make_log
from rt.bench.processes import peak_memory_mb
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.delivery.options import StreamOptions
from rt.streams.observer import StreamObserver
from rt.streams.provider import StreamProvider
from rt.streams.queue.adapter import QueueAdapterFactory, QueueRead
from rt.streams.queue.generator import GeneratorQueues, GeneratorReader

_VALUE = bytes(128)
_POLL_S = 0.001
_GOAL_HZ = 100_000
_GOAL_MANY_HZ = 60_000
_EVENTS_EACH = 10
"""Events of each stream if there are many streams. At least two."""


class _Counting(StreamObserver):
    def __init__(self) -> None:
        self.events = 0

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        self.events += len(batch)
        return None


class _Laps:
    """The time per event of the first `first` of `events` events, and the time per event of the others."""

    def __init__(self, first: int, events: int) -> None:
        self._first, self._end = first, events
        self.events = 0
        """The number of events that were delivered."""
        self._begun_at = 0
        self._since = Stopwatch()
        self.done = asyncio.Event()
        self.laps: list[TimeUsed] = []

    def count(self, events: int) -> None:
        self.events += events
        if self.events >= self._end or (not self.laps and self.events >= self._first):
            used, counted = self._since.read(), self.events - self._begun_at
            self.laps.append(TimeUsed(*(each_s / counted for each_s in used)))
            self._since, self._begun_at = Stopwatch(), self.events
        if self.events >= self._end:
            self.done.set()


class _CountingTogether(StreamObserver):
    def __init__(self, laps: _Laps) -> None:
        self._laps = laps

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        self._laps.count(len(batch))
        return None


class _OneAtATime(GeneratorQueues):
    """Each stream has its next event when all streams have had theirs."""

    def __init__(self, names: Sequence[StreamId], laps: _Laps) -> None:
        self._laps, self._streams = laps, len(names)
        super().__init__(
            lambda _, number: (names[number % len(names)], _VALUE), events=_EVENTS_EACH * len(names)
        )

    def end(self, queue: QueueId) -> int:
        del queue
        rounds = self._laps.events // self._streams + 1
        return self._streams * min(rounds, _EVENTS_EACH)

    def wait_s(self, queue: QueueId, number: int) -> float:
        del queue
        return 0.0 if number < _EVENTS_EACH * self._streams else _POLL_S


class _OneStream(GeneratorQueues):
    """All events belong to one stream, and arrive in batches of `batch`, as from a log's columns."""

    def __init__(self, events: int, batch: int) -> None:
        self.stream = StreamId("bench", "one")
        self.batch = batch
        super().__init__(lambda _, number: (self.stream, number), events=events)

    async def receiver(
        self,
        queue: QueueId,
        start: SequenceToken | None,
        _store_id: str | None = None,
        _needed: SequenceToken | None = None,
    ) -> GeneratorReader:
        return _OneReader(self, queue, start or SequenceToken(0), None)


class _OneReader(GeneratorReader):
    def _take(self, events_max: int) -> QueueRead:
        assert isinstance(self._queues, _OneStream)
        end = self._queues.end(self._queue) or 0
        stop = min(self._at + min(events_max, self._queues.batch), end)
        numbers = range(self._at, stop)
        self._at = stop
        batch = EventBatch(self._queues.stream, numbers, [_VALUE] * len(numbers), None, 192 * len(numbers))
        return QueueRead([batch] if numbers else [], SequenceToken(stop))


class StreamsBench(Struct, frozen=True):
    """`events` through one agent to ten consumers; `streams` streams with a consumer each; logs."""

    root: str
    rounds: int
    events: int
    streams: int

    def figures(self) -> Generator[Figure, None, None]:
        for batch in (1000, 100):
            what = f"one agent to 10 consumers, batches of {batch:,}"
            yield from self._figures(what, partial(self._deliver_batches, batch), self.events, _GOAL_HZ)
        before_mb = peak_memory_mb()
        names = [StreamId("bench", f"stream-{number}") for number in range(self.streams)]
        events = _EVENTS_EACH * self.streams
        what = f"{self.streams:,} streams, one event at a time"
        yield from self._figures_of_many(what, partial(_OneAtATime, names))
        yield Figure(f"{what}: memory, most", (peak_memory_mb(),), "MB", 1000)
        yield Figure(f"{what}: memory, grown by", (peak_memory_mb() - before_mb,), "MB")
        topics = [name.topic for name in names]
        log = make_log(self.root, "topics", count=events, value_bytes=len(_VALUE), topics=topics)
        what = f"a log with {self.streams:,} topics"
        yield from self._figures_of_many(what, lambda _: ClusterQueues({"topics": Cluster("bench", log)}))
        log = make_log(self.root, "log", count=self.events, value_bytes=len(_VALUE))
        clusters = ClusterQueues({"log": Cluster("bench", log)})
        what = f"a log of {len(_VALUE)} B messages to 10 consumers"
        program = partial(self._deliver, clusters, StreamId("", TOPIC))
        yield from self._figures(what, program, self.events, _GOAL_HZ)

    def _figures(
        self,
        name: str,
        program: Callable[[], Coroutine[Any, Any, TimeUsed]],
        events: int,
        goal: float | None = None,
    ) -> Iterator[Figure]:
        rounds = []
        for _ in range(self.rounds):
            gc.collect()
            rounds.append(asyncio.run(program()))
        yield from wall_and_cpu(name, rounds, "events/s", goal, convert=lambda taken_s: events / taken_s)

    def _figures_of_many(self, name: str, queues: Callable[[_Laps], QueueAdapterFactory]) -> Iterator[Figure]:
        """The first event of each stream makes its consumer, so it is counted apart."""
        rounds: list[list[TimeUsed]] = []
        for _ in range(self.rounds):
            gc.collect()
            rounds.append(asyncio.run(self._deliver_to_many(queues)))
        for suffix, laps, goal in zip(
            (", first event", ", next events"), zip(*rounds, strict=True), (None, _GOAL_MANY_HZ), strict=True
        ):
            yield from wall_and_cpu(
                f"{name}{suffix}", laps, "events/s", goal, convert=lambda event_s: 1 / event_s
            )

    async def _deliver_batches(self, size: int) -> TimeUsed:
        queues = _OneStream(self.events, size)
        return await self._deliver(queues, queues.stream)

    async def _deliver(self, queues: QueueAdapterFactory, name: StreamId) -> TimeUsed:
        """Deliver all events of a stream to ten consumers."""
        consumers = [_Counting() for _ in range(10)]
        async with StreamProvider("bench", queues) as provider:
            stream = provider.stream(name.namespace, name.key)
            stopwatch = Stopwatch()
            for consumer in consumers:
                await stream.subscribe(consumer, start=StartPosition.EARLIEST_AVAILABLE)
            while any(consumer.events < self.events for consumer in consumers):
                await asyncio.sleep(_POLL_S)
            return stopwatch.read()

    async def _deliver_to_many(self, queues: Callable[[_Laps], QueueAdapterFactory]) -> list[TimeUsed]:
        """Deliver the events of many streams, each to a consumer of its own."""
        laps = _Laps(self.streams, _EVENTS_EACH * self.streams)
        provider = StreamProvider("bench", queues(laps), options=StreamOptions())
        provider.implicit("all", "bench/*", lambda _: _CountingTogether(laps))
        async with provider:
            await laps.done.wait()
            assert sum(status.consumers for status in provider.status()) == self.streams
        return laps.laps

"""The speed of stream agents: one agent, one core, no network.

The queue is a merged log in local files, or generated, so that a figure measures only the agent, its cache
and its consumers. CPU time is reported too, as it does not depend on the load of the machine.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from rt.bench.measure import Bench, Figure, peak_memory_mb
from rt.bench.merged_logs import TOPIC, make_log
from rt.streams.agent.options import StreamOptions
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.observer import StreamObserver
from rt.streams.provider import StreamProvider
from rt.streams.queue.adapter import QueueAdapterFactory, QueueRead
from rt.streams.queue.cluster import Cluster, ClusterQueues
from rt.streams.queue.generator import GeneratorQueues, GeneratorReader

_VALUE = bytes(128)
_LOOK_S = 0.001


class _Counting(StreamObserver):
    def __init__(self) -> None:
        self.events = 0

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        self.events += len(batch)
        return None


class _OneStream(GeneratorQueues):
    """All events belong to one stream, and arrive in batches of `batch`, as from a log's columns."""

    def __init__(self, events: int, batch: int) -> None:
        self.stream = StreamId("bench", "one")
        self.batch = batch
        super().__init__(lambda _, number: (self.stream, number), events=events)

    async def receiver(self, queue: QueueId, start: SequenceToken | None) -> GeneratorReader:
        return _OneReader(self, queue, start or SequenceToken(0), None)


class _OneReader(GeneratorReader):
    def _take(self, events_max: int) -> QueueRead:
        assert isinstance(self._queues, _OneStream)
        end = self._queues.end(self._queue) or 0
        stop = min(self._at + min(events_max, self._queues.batch), end)
        numbers = range(self._at, stop)
        self._at = stop
        made = EventBatch(self._queues.stream, numbers, [_VALUE] * len(numbers), None, 192 * len(numbers))
        return QueueRead([made] if numbers else [], SequenceToken(stop))


class StreamsBench(Bench):
    """`events` through one agent to ten consumers; `streams` streams with a consumer each; a log."""

    def __init__(self, directory: str | None, *, rounds: int, events: int, streams: int) -> None:
        super().__init__(directory, rounds)
        self._events = events
        self._streams = streams

    def figures(self) -> Generator[Figure, None, None]:
        for batch in (1000, 100):
            clock, processor = self._rounds_of(lambda batch=batch: self._to_ten(batch))  # type: ignore[misc]
            what = f"one agent to 10 consumers, batches of {batch:,}"
            yield Figure(what, clock, "events/s", 100_000)
            yield Figure(f"{what}, CPU", processor, "events/s", 100_000)
        before = peak_memory_mb()
        clock, processor = self._rounds_of(self._to_many)
        what = f"{self._streams:,} streams with a consumer each"
        yield Figure(what, clock, "events/s")
        yield Figure(f"{what}, CPU", processor, "events/s")
        yield Figure(f"{what}: memory, most", (peak_memory_mb(),), "MB", 1000)
        yield Figure(f"{what}: memory, grown by", (peak_memory_mb() - before,), "MB")
        log = make_log(self._root, "log", count=self._events, value_bytes=len(_VALUE))
        queues = ClusterQueues({"log": Cluster("bench", log)})
        clock, processor = self._rounds_of(lambda: self._to(queues, StreamId("", TOPIC)))
        what = f"a log of {len(_VALUE)} B messages to 10 consumers"
        yield Figure(what, clock, "events/s", 100_000)
        yield Figure(f"{what}, CPU", processor, "events/s", 100_000)

    def _rounds_of(
        self, program: Callable[[], Coroutine[Any, Any, tuple[float, float]]]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        rounds = []
        for _ in range(self._rounds):
            gc.collect()
            rounds.append(asyncio.run(program()))
        clock, processor = zip(*rounds, strict=True)
        return clock, processor

    async def _to_ten(self, batch: int) -> tuple[float, float]:
        queues = _OneStream(self._events, batch)
        return await self._to(queues, queues.stream)

    async def _to(self, queues: QueueAdapterFactory, name: StreamId) -> tuple[float, float]:
        consumers = [_Counting() for _ in range(10)]
        async with StreamProvider("bench", queues) as provider:
            stream = provider.stream(name.namespace, name.key)
            start, processor = time.perf_counter(), time.process_time()
            for consumer in consumers:
                await stream.subscribe(consumer, start=StartPosition.EARLIEST_AVAILABLE)
            while any(consumer.events < self._events for consumer in consumers):
                await asyncio.sleep(_LOOK_S)
            taken, used = time.perf_counter() - start, time.process_time() - processor
        return self._events / taken, self._events / used

    async def _to_many(self) -> tuple[float, float]:
        """Three events for each stream, one after the other."""
        names = [StreamId("bench", f"stream-{number}") for number in range(self._streams)]
        events = 3 * self._streams
        queues = GeneratorQueues(lambda _, number: (names[number % len(names)], _VALUE), events=events)
        consumers: list[_Counting] = []

        def make(_: StreamId) -> StreamObserver:
            consumers.append(_Counting())
            return consumers[-1]

        provider = StreamProvider("bench", queues, options=StreamOptions())
        provider.implicit("all", "bench/*", make)
        start, processor = time.perf_counter(), time.process_time()
        async with provider:
            while sum(consumer.events for consumer in consumers) < events:
                await asyncio.sleep(10 * _LOOK_S)
            taken, used = time.perf_counter() - start, time.process_time() - processor
            assert len(consumers) == self._streams
        return events / taken, events / used

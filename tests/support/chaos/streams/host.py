"""A host of streams, as a process: `python -m chaos.streams.host '<settings as JSON>'`, until SIGTERM.

It has a directory of its own. Subscriptions and leases are in the clusters. Each stream has four
subscriptions:

    keeping   implicit; keeps its token with its results
    plain     implicit
    ledger    by name, from the earliest event on; keeps its token with its results
    tail      by name, from the latest event on
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import rt
from chaos.streams.notes import NO_FENCE, Call, Note, Started, Subscribed, Wrong, encode_note, ranges_of
from chaos.streams.results import NOTHING, Results
from rt.child_process import die_with_stdin
from rt.streams import (
    Cluster,
    ClusterQueues,
    EventBatch,
    LeaseBalancer,
    QueueElsewhere,
    QueueLeases,
    SequenceToken,
    StartPosition,
    StreamGap,
    StreamId,
    StreamObserver,
    StreamOptions,
    StreamProvider,
    cluster_stores,
)
from rt.streams.balancer.lease import LeaseTimes
from rt.streams.core.errors import StreamError
from rt.streams.core.stream_id import stream_of
from rt.streams.observer import ObserverFactory

_AGAIN_S: Final = 0.5
_LOOK_S: Final = 0.5

Write = Callable[[Note], None]
Fences = Callable[[StreamId], int]


class Plain(StreamObserver):
    """Notes its calls."""

    def __init__(self, name: str, write: Write, fence_of: Fences, stream: StreamId) -> None:
        self._name, self._write, self._fence_of, self._stream = name, write, fence_of, stream

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        begun_s, fence = time.monotonic(), self._fence_of(self._stream)
        self._note(begun_s, fence, [event.decode() for event in batch.events])
        return None

    async def on_gap(self, gap: StreamGap) -> None:
        self.wrong(f"was told of a gap: {gap}")

    async def on_error(self, error: StreamError) -> None:
        self.wrong(f"was told of an error: {error}")

    def wrong(self, text: str) -> None:
        self._write(Wrong(time.monotonic(), f"{self._name} of {self._stream} {text}"))

    def _note(self, begun_s: float, fence: int, events: Sequence[str]) -> None:
        numbers = []
        for event in events:
            stream, _, number = event.rpartition(".")
            if stream != str(self._stream):
                self.wrong(f"got the event {event}")
            numbers.append(int(number))
        call = Call(begun_s, time.monotonic(), fence, self._name, str(self._stream), ranges_of(numbers))
        self._write(call)


class Keeper(Plain):
    """Keeps its token with its results."""

    def __init__(self, name: str, write: Write, fence_of: Fences, root: Path, stream: StreamId) -> None:
        super().__init__(name, write, fence_of, stream)
        self._path = root / f"{name}.{stream.key}"
        self._results: Results | None = None

    async def last_token(self) -> SequenceToken | None:
        if self._results is None:
            self._results = Results(self._path)
        self._results.refresh()
        return None if self._results.last == NOTHING else SequenceToken(self._results.last)

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        begun_s, fence, results = time.monotonic(), self._fence_of(self._stream), self._results
        assert results is not None
        rows = [(token.sequence_number, event.decode()) for token, event in batch]
        if rows[0][0] <= results.last:
            self.wrong(f"got {rows[0]}, but has said that it has everything up to {results.last}")
        is_kept = results.append(rows)
        results.rows.clear()
        self._note(begun_s, fence, [event for _, event in rows] if is_kept else [])
        return None if is_kept else SequenceToken(results.last)

    async def on_close(self) -> None:
        if self._results is not None:
            self._results.close()
            self._results = None


async def subscribe(
    provider: StreamProvider,
    streams: Sequence[StreamId],
    make: Mapping[str, ObserverFactory],
    write: Write,
) -> None:
    """Make the subscriptions by name of each stream. Retry until this host serves the stream's queue."""
    starts = {"ledger": StartPosition.EARLIEST_AVAILABLE, "tail": StartPosition.LATEST}
    missing = [(name, stream) for name in starts for stream in streams]
    while missing:
        for name, stream in list(missing):
            try:
                await provider.stream(stream.namespace, stream.key).subscribe(
                    make[name](stream), start=starts[name], consumer=name, name=name
                )
            except QueueElsewhere:
                continue
            except rt.RtError as error:
                logging.warning("not_subscribed name=%s stream=%s error=%r", name, stream, error)
                continue
            write(Subscribed(time.monotonic(), name, str(stream)))
            missing.remove((name, stream))
        await asyncio.sleep(_AGAIN_S)


async def serve(settings: dict[str, Any]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    notes = os.open(settings["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(note: Note) -> None:
        os.write(notes, encode_note(note))

    clusters = {
        name: Cluster(name, settings["directory"], one["endpoints"], rt.TLS(*one["tls"]), name="hosts")
        for name, one in settings["clusters"].items()
    }
    queues = ClusterQueues(clusters, placement={f"load/{name}-*": name for name in clusters})
    leases = QueueLeases.of_clusters(clusters, "streams")
    balancer = LeaseBalancer(leases, times=LeaseTimes(lease_s=settings["lease_s"], look_s=_LOOK_S))
    provider = StreamProvider(
        "load",
        queues,
        balancer=balancer,
        stores=cluster_stores(leases),
        options=StreamOptions(drain_s=5, cache_events=2000, batch_events_max=100),
        host=settings["host"],
    )

    def fence_of(stream: StreamId) -> int:
        return balancer.my_queues().get(queues.mapper.queue_for(stream), NO_FENCE)

    results = Path(settings["results"])
    make: dict[str, ObserverFactory] = {
        "keeping": partial(Keeper, "keeping", write, fence_of, results),
        "ledger": partial(Keeper, "ledger", write, fence_of, results),
        "plain": partial(Plain, "plain", write, fence_of),
        "tail": partial(Plain, "tail", write, fence_of),
    }
    for name in ("keeping", "plain"):
        provider.implicit(name, "load/*", make[name])
    for name in ("ledger", "tail"):
        provider.consumer(name, make[name])
    async with provider:
        write(Started(time.monotonic()))
        streams = [stream_of(topic) for topic in settings["streams"]]
        subscribing = asyncio.create_task(subscribe(provider, streams, make, write))
        await stopped.wait()
        subscribing.cancel()
        await asyncio.wait([subscribing])


def main() -> None:
    die_with_stdin()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(serve(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()

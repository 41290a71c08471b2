"""The same keyed query in an engine and on Spark: events per second, the size of the state, and recovery.

Each key has a group with a sum: `group_by(key)`, `flat_map(… scan …)`. The first round has one event for each
key, in random order, so each makes a group. The second round has events for known keys. The engine keeps its
state in an SQLite file and commits every half second, Spark in RocksDB with one commit a micro-batch.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from rt.bench.measure import Figure, TimeUsed, timed
from rt.bench.processes import CpuUsage, measure_descendants
from rt.bench.spark import SETTINGS
from rt.client.publisher import Publisher
from rt.objects import SqliteStore
from rt.query import RESUME, Factories, Observable, QueryEngine, Source, VirtualScheduler
from rt.query import operators as ops
from rt.query.messages import MessageSource
from rt.query.runner import EngineRunner
from rt.query.spark import SparkJob, results
from rt.testing.merged import MergedLogBuilder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rt.log.scan.message_batch import Message

    Session = Callable[[], AbstractContextManager[SparkSession]]

WORKERS: Final = "local-cluster[2,1,2048]"
"""Two workers with a core and 2 GiB each. Recovery is measured with new workers."""

KNOWN: Final = 100_000
"""The maximum number of events of the second round. Each key has at most ten of them."""

_BATCH: Final = 250_000
_TOGETHER: Final = 10_000


def total(group: Any) -> Observable[Any]:
    """The number of events of a key so far."""
    return group.pipe(  # type: ignore[no-any-return]
        ops.scan(lambda count, _: count + 1, 0), ops.map(lambda count: b"%s %d" % (group.key, count))
    )


QUERY: Final = Source("feed").pipe(ops.group_by(lambda message: message.value), ops.flat_map(total))


def time_of(message: Message) -> int:
    return message.timestamp_ns


class SparkQueriesBench(Struct, frozen=True):
    """Runs the query with `keys` keys. All files are in the directory `root`."""

    root: str
    keys: int
    master: str = WORKERS

    def figures(self) -> Generator[Figure, None, None]:
        yield from self.figures_of(self._session)

    def figures_of(self, session: Session) -> Generator[Figure, None, None]:
        """`session` opens a Spark session: a new one after the query has stopped."""
        name = f"{self.keys:,} keys"
        with closing(_Log(self.root, self.keys)) as log:
            yield from self._in_engine(log, f"{name}, engine")
        with closing(_Log(os.path.join(self.root, "again"), self.keys)) as log:
            yield from self._on_spark(log, f"{name}, Spark", session)

    def _in_engine(self, log: _Log, name: str) -> Iterator[Figure]:
        path = os.path.join(self.root, "engine.db")
        with SqliteStore(path) as store:
            engine, runner, dropped = _engine(store, log.path)
            engine.recover()
            dropped.start()
            engine.start("query", "query", sink="results")
            for what in log.rounds():
                used = timed(partial(runner.run, lambda: engine.watermarks["feed"] + 1 == log.count))
                yield from _speed(f"{name}, {what}", log.last_count, used)
            engine.unload()
        yield Figure(f"{name}: state of a key", (os.path.getsize(path) / self.keys,), "B")
        with SqliteStore(path) as store:
            engine, *_ = _engine(store, log.path)
            yield Figure(f"{name}: recovery", (timed(engine.recover).wall_s,), "s")
            engine.unload()

    def _on_spark(self, log: _Log, name: str, session: Session) -> Iterator[Figure]:
        checkpoint = os.path.join(self.root, "checkpoint")
        source = {"path": log.path, "maxOffsetsPerTrigger": str(_BATCH)}
        job = SparkJob(QUERY, source, time_of=time_of)
        progress: dict[str, Any] = {}

        def run(spark: SparkSession) -> None:
            writer = results(job, spark).writeStream.format("noop").outputMode("append")
            query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
            query.awaitTermination()
            progress.update(query.lastProgress or {})

        with session() as spark:
            for what in log.rounds():
                yield from _speed(f"{name}, {what}", log.last_count, measure_descendants(partial(run, spark)))
        (state,) = progress["stateOperators"]
        assert state["numRowsTotal"] >= self.keys, state
        size = _size(os.path.join(checkpoint, "state"))
        yield Figure(f"{name}: state of a key", (size / self.keys,), "B")
        log.append([b"%d" % 0])
        with session() as spark:
            used = measure_descendants(partial(run, spark))
            yield Figure(f"{name}: recovery", (used.wall_s,), "s")

    @contextmanager
    def _session(self) -> Iterator[SparkSession]:
        from pyspark.sql import SparkSession

        # Set before the JVM starts: otherwise workers use the first python3 in the path.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        builder: Any = SparkSession.builder
        settings = {**SETTINGS, "spark.local.dir": os.path.join(self.root, "local")}
        settings["spark.executor.memory"] = "2g"
        spark = builder.master(self.master).appName("rt bench queries").config(map=settings).getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()


class _Log:
    """A merged log that grows. Keys are numbers; their order is random, but always the same."""

    def __init__(self, root: str, keys: int) -> None:
        self.path: Final = os.path.join(root, "bench", "merged")
        self.count = 0
        self.last_count = 0
        self._keys: Final = [b"%d" % key for key in range(keys)]
        random.Random(1).shuffle(self._keys)
        self._publisher: Final = Publisher(root, "bench", publisher_id="feed", fsync="never")
        self._merged: Final = MergedLogBuilder(self.path, cluster_id=bytes(16), stream="bench")

    def rounds(self) -> Iterator[str]:
        """Append the events of each round, and yield a description of them."""
        known = list(itertools.islice(itertools.cycle(self._keys), min(KNOWN, 10 * len(self._keys))))
        for what, keys in (("new keys", self._keys), ("known keys", known)):
            self.append(keys)
            yield what

    def append(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), _TOGETHER):
            self._publisher.publish_many(keys[start : start + _TOGETHER], topic="event")
        self._publisher.flush()
        self._merged.merge_all([self._publisher.directory])
        self.last_count = len(keys)
        self.count += len(keys)

    def close(self) -> None:
        self._publisher.close()
        self._merged.close()


class _Dropped:
    """Acknowledges each result."""

    def __init__(self, output: Any) -> None:
        self._subscription: Final = output.subscribe(self)
        self._last = -1

    def start(self) -> None:
        self._subscription.start(RESUME)

    def on_next(self, sequence_id: int, value: Any, /) -> None:  # noqa: ARG002
        self._last = sequence_id

    def pump(self) -> None:
        if self._last >= 0:
            self._subscription.acknowledge(self._last)


def _engine(store: SqliteStore, path: str) -> tuple[QueryEngine, EngineRunner, _Dropped]:
    factories = Factories()
    factories.add("query", lambda: QUERY)
    engine = QueryEngine(store, factories, VirtualScheduler())
    source = MessageSource(path, "bench")
    engine.add_source("feed", source, time_of=time_of)
    dropped = _Dropped(engine.add_sink("results"))
    return engine, EngineRunner(engine, [source], [dropped]), dropped


def _speed(name: str, count: int, used: TimeUsed | CpuUsage) -> Iterator[Figure]:
    yield Figure(f"{name}", (count / used.wall_s,), "events/s")
    yield Figure(f"{name}: processor", (used.cpu_s * 1e6 / count,), "us/event")


def _size(directory: str) -> int:
    """The bytes of all files."""
    return sum(
        os.path.getsize(os.path.join(parent, name))
        for parent, _, names in os.walk(directory)
        for name in names
    )

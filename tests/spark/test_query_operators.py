"""Every operator inside a group: same results on Spark as in the engine, with each micro-batch run twice.

One job runs all examples of `operator_examples`. The key of a message is the name of the example. Each
micro-batch is interrupted after it has produced its results and before they count. A new query runs it again.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import operator_examples
import pytest
from operator_examples import EXAMPLES, IN, Example
from operator_table import rows
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import rt
from rt.cli.spark.errors import cause_of
from rt.objects import MemoryStore
from rt.query import Factories, Observable, Operator, QueryEngine, Source, VirtualScheduler, applied
from rt.query import operators as ops
from rt.query.messages import MessageSource
from rt.query.runner import EngineRunner
from rt.query.spark import SparkJob, results
from rt.testing.merged import MergedLogBuilder
from rt.testing.queries import MarbleError, MarbleEvent, cold, hot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECOND = 10**9
START = 1_767_225_600 * SECOND
LIMIT = 420
"""Messages in a micro-batch."""
END_S = 60
"""A time in seconds after all timers of the examples."""
REFUSED = {"map_async"}


class Longest(Operator[Any, Any]):
    """A user's own operator: the values of the last two seconds, with a timer for each."""

    __slots__ = ("_open",)
    NAME = "longest"

    def on_open(self) -> None:
        self._open = self.objects.dictionary("open", keys=str)

    def on_next(self, value: Any, /) -> None:
        self._open[str(value)] = self.now_ns
        self.set_timer(self.now_ns + 2 * SECOND, str(value))
        self.emit(sorted(self._open))

    def on_timer(self, key: str, /) -> None:
        del self._open[key]
        self.emit(sorted(self._open))


LATER = {"concat/1", "delay_subscription/0"}
"""They subscribe to the group after it was emitted, which is rejected everywhere."""
MORE = {
    "own": [(IN.pipe(applied(Longest)), "12-1---3|", "")],
    "delay_subscription": [
        *EXAMPLES["delay_subscription"],
        (IN.pipe(ops.flat_map(lambda x: cold(f"-{x}|").pipe(ops.delay_subscription(1.5)))), "1-2|", ""),
    ],
}
QUERIES = {
    f"{name}/{number}": (query, marbles or "9")  # a group starts with a value
    for name, examples in {**EXAMPLES, **MORE}.items()
    for number, (query, marbles, _) in enumerate(examples)
    if name not in REFUSED and f"{name}/{number}" not in LATER
}


def event_of(value: list[Any]) -> Any:
    kind, mark = value[1:]
    if kind == "error":
        raise MarbleError("#")
    return mark


def example(group: Any) -> Observable[Any]:
    """The example of a group: its events, its end and its time, as values."""
    query, _ = QUERIES[group.key]
    events = group.pipe(ops.take_while(lambda value: value[1] != "completed"), ops.map(event_of))
    whole = Example(query, events).pipe(ops.materialize(), ops.timestamp())
    return whole.pipe(ops.map(lambda each: repr((group.key, *plain(*each)))))


def plain(event: tuple[str, Any], time_ns: int) -> tuple[str, Any, int]:
    """Return an event as plain values. Of an error, keep only the kind: its text contains an address, which
    Spark's runtimes count from 0.
    """
    kind, value = event if len(event) == 2 else (*event, None)
    return kind, value[0] if kind == "error" else value, time_ns


QUERY = Source("in").pipe(
    ops.where(lambda message: message.topic == "examples"),
    ops.map(lambda message: json.loads(message.value)),
    ops.group_by(lambda value: value[0]),
    ops.flat_map(example),
)


def time_of(message: rt.Message) -> int:
    return message.timestamp_ns


def merged_log(root: Path, events: Sequence[tuple[float, str, MarbleEvent]]) -> str:
    """Return a merged log of the events, in the order of their times."""
    log = MergedLogBuilder(root / "merged", cluster_id=bytes(16), stream="s")
    with rt.Publisher(root, "s", publisher_id="a", fsync="never") as publisher:
        for at_s, key, event in events:
            value = json.dumps([key, event.kind, event.value if event.kind == "next" else None])
            time_ns = START + round(at_s * SECOND)
            publisher.publish(value.encode(), topic="examples", timestamp_ns=time_ns, headers={"h": b"1"})
        for second in range(END_S, END_S + 2 * LIMIT):  # They fire the timers of all keys.
            publisher.publish(b"", topic="time", timestamp_ns=START + second * SECOND)
    log.merge_all([publisher.directory])
    log.close()
    return str(root / "merged")


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """Send the examples to Spark's workers by value, because the workers do not have the modules of the
    tests.
    """
    modules = operator_examples, sys.modules[__name__]
    for each in modules:
        cloudpickle.register_pickle_by_value(each)
    yield
    for each in modules:
        cloudpickle.unregister_pickle_by_value(each)


@pytest.fixture(autouse=True)
def other_tests_have_the_source() -> Iterator[None]:
    """Clear the inputs, because groups of other tests in this process have the same ids."""
    yield
    operator_examples.INPUTS.clear()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    events = [(event.at_s, key, event) for key, (query, marbles) in QUERIES.items() for event in hot(marbles)]
    return merged_log(tmp_path_factory.mktemp("log"), sorted(events, key=lambda each: each[0]))


def in_engine(log: str) -> list[str]:
    """The results of the engine."""
    found: list[str] = []

    class Consumer:
        def on_next(self, sequence_id: int, value: Any) -> None:
            found.append(value)

    factories = Factories()
    factories.add("query", lambda: QUERY)
    engine = QueryEngine(MemoryStore(), factories, VirtualScheduler())
    source = MessageSource(log, "s")
    engine.add_source("in", source, time_of=time_of)
    output = engine.add_sink("out").subscribe(Consumer())
    engine.recover()
    output.start(0)
    engine.start("query", "query", sink="out")
    EngineRunner(engine, [source]).run(until=lambda: engine.watermarks["in"] + 1 == source.end)
    engine.unload()
    return found


def by_key(found: list[str]) -> dict[str, list[str]]:
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for each in found:
        keys[each.split("'", 2)[1]].append(each)
    return keys


class Killed(Exception):
    pass


def on_spark(spark: SparkSession, job: SparkJob, checkpoint: str) -> list[str]:
    """Return the results on Spark. Each micro-batch runs again, and must have the same results."""
    attempts: defaultdict[int, list[list[str]]] = defaultdict(list)

    def take(batch: DataFrame, number: int) -> None:
        found = [bytes(row.value).decode() for row in batch.collect()]
        attempts[number].append(found)
        if len(attempts[number]) == 1:
            raise Killed

    for _ in range(100):
        writer = results(job, spark).writeStream.foreachBatch(take).trigger(availableNow=True)
        query = writer.option("checkpointLocation", checkpoint).start()
        try:
            query.awaitTermination()
            break
        except StreamingQueryException as error:
            if "Killed" not in str(error):
                raise
    assert len(attempts) > 5
    assert {len(each) for each in attempts.values()} == {2}
    for first, second in attempts.values():
        assert first == second
    return [each for _, (found, _) in sorted(attempts.items()) for each in found]


def test_every_operator_emits_same_results_at_same_times_on_spark_and_in_engine(
    spark: SparkSession, log: str, tmp_path: Path
) -> None:
    source = {"path": log, "maxOffsetsPerTrigger": str(LIMIT)}
    found = by_key(on_spark(spark, SparkJob(QUERY, source, time_of=time_of), str(tmp_path)))
    expected = by_key(in_engine(log))

    tested = {key.split("/")[0] for key in QUERIES}
    assert tested >= {row.name for row in rows()} - REFUSED
    assert len(expected) > len(QUERIES) * 0.9
    for key, values in expected.items():
        assert found[key] == values, key
    assert found.keys() == expected.keys()


def fed_now(root: Path) -> str:
    """A log of two messages."""
    return merged_log(root, [(0, "a", hot("1")[0]), (0, "b", hot("2")[0])])


def test_processing_time_timers_fire_without_new_messages(spark: SparkSession, tmp_path: Path) -> None:
    delayed = Source("in").pipe(
        ops.where(lambda message: message.topic == "examples"),
        ops.map(lambda message: (*json.loads(message.value), message.headers)),
        ops.group_by(lambda value: value[0]),
        ops.flat_map(lambda group: group.pipe(ops.delay(1), ops.map(repr))),
    )
    found: list[tuple[int, bytes]] = []

    def take(batch: DataFrame, number: int) -> None:
        found.extend((number, bytes(row.value)) for row in batch.collect())

    job = SparkJob(delayed, {"path": fed_now(tmp_path)})
    writer = results(job, spark).writeStream.foreachBatch(take).trigger(processingTime="0 seconds")
    query = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").start()
    deadline = time.monotonic() + 300
    while len(found) < 2:
        assert query.exception() is None
        assert time.monotonic() < deadline
        query.awaitTermination(1)
    query.stop()
    assert sorted(value for _, value in found) == [
        b"('a', 'next', 1, (('h', b'1'),))",
        b"('b', 'next', 2, (('h', b'1'),))",
    ]
    assert min(number for number, _ in found) > 0


def test_query_error_is_reported_with_its_cause_and_key(spark: SparkSession, tmp_path: Path) -> None:
    failing = Source("in").pipe(
        ops.where(lambda message: message.topic == "examples"),
        ops.group_by(lambda message: json.loads(message.value)[0]),
        ops.flat_map(lambda group: group.pipe(ops.map(lambda message: 1 // 0))),
    )
    job = SparkJob(failing, {"path": fed_now(tmp_path)}, time_of=time_of)
    writer = results(job, spark).writeStream.format("noop").trigger(availableNow=True)
    query = writer.option("checkpointLocation", f"{tmp_path}/checkpoint").start()
    with pytest.raises(StreamingQueryException) as failed:
        query.awaitTermination()
    assert cause_of(failed.value).startswith(
        "rt.query.core.errors.QueryFailed: ZeroDivisionError: integer division or modulo by zero (at key str "
    )

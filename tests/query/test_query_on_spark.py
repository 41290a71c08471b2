"""Queries for Spark, tested without Spark: rejected queries, keys, states, and the processing of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from rt import InvalidOption, Message, UnknownVersion
from rt.objects import StateDamaged
from rt.objects.core.typed_json import key_of
from rt.query import (
    BadTime,
    InvalidKey,
    NotOnSpark,
    Observable,
    Operator,
    QueryFailed,
    Source,
    StateMismatch,
    applied,
)
from rt.query import operators as ops
from rt.query.messages import OutgoingMessage, as_message
from rt.query.operators import creation
from rt.query.spark import SparkJob
from rt.query.spark.key_query import KeyQuery
from rt.query.spark.key_rows import add_keys
from rt.query.spark.keyed_plan import keyed_plan, text_of
from rt.query.spark.processor import KeyProcessor
from rt.query.spark.state_row import decode_state, encode_state

SECOND = 10**9
IN = Source("in")


class Own(Operator[Any, Any]):
    """A user's operator: it is unknown whether it has state."""

    __slots__ = ()
    NAME = "own"

    def on_next(self, value: Any, /) -> None:
        self.emit(value)


def grouped(*transforms: Any) -> Observable[Any]:
    return IN.pipe(ops.group_by(str), *transforms)


async def served(value: Any) -> Any:
    return value


REFUSED = {
    "a filter of all keys": (IN.pipe(ops.distinct(), ops.group_by(str), ops.merge_all()), "distinct"),
    "a user's operator before the groups": (IN.pipe(applied(Own), ops.group_by(str)), "own"),
    "a user's operator after the groups": (grouped(ops.merge_all(), applied(Own)), "own"),
    "two sources": (IN.pipe(ops.merge(Source("b")), ops.group_by(str), ops.merge_all()), "merge"),
    "a join of two sources": (
        IN.pipe(ops.interval_join(Source("b"), left_key=str, right_key=str), ops.group_by(str)),
        "interval_join",
    ),
    "a source in a group": (
        grouped(ops.flat_map(lambda group: group.pipe(ops.with_latest_from(Source("rates"))))),
        "'rates'",
    ),
    "a window of the whole stream": (IN.pipe(ops.tumbling_window(5, ops.Fold.count())), "tumbling_window"),
    "a window over all groups": (grouped(ops.merge_all(), ops.window_with_time(5)), "window_with_time"),
    "only the last group": (grouped(ops.switch_latest()), "switch_map"),
    "one group after the other": (grouped(ops.concat_map(lambda group: group)), "flat_map"),
    "the index of a group": (grouped(ops.flat_map_indexed(lambda group, index: group)), "flat_map"),
    "calls of a service": (
        grouped(ops.flat_map(lambda group: group.pipe(ops.map_async(served)))),
        "map_async",
    ),
    "no key": (IN.pipe(ops.map(str)), "no key"),
    "no source": (creation.interval(1), "timer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_query_that_cannot_run_per_key_raises_not_on_spark_with_its_cause(name: str) -> None:
    query, word = REFUSED[name]
    with pytest.raises(NotOnSpark, match=word):
        SparkJob(query, {})


def test_mapper_that_reads_another_source_fails_query_when_its_group_opens() -> None:
    query = IN.pipe(
        ops.group_by(lambda message: message.topic),
        ops.flat_map(lambda group: group.pipe(ops.merge(Source(group.key[1:])))),
    )
    job = SparkJob(query, {})
    with pytest.raises(QueryFailed, match="a group reads the source 'b'") as failed:
        run(job, message(0, topic="ab"))
    assert isinstance(failed.value.__cause__, NotOnSpark)


def test_operators_with_key_mapper_are_accepted_as_groups() -> None:
    by_topic = {"key_mapper": lambda each: each.topic}
    for transform in (
        ops.scan_by(by_topic["key_mapper"], lambda total, _: total + 1, 0),
        ops.session_window(5, ops.Fold.sum(len), **by_topic),
        ops.group_by_until(by_topic["key_mapper"], None, lambda group: group.pipe(ops.skip(1))),
    ):
        assert keyed_plan(IN.pipe(transform)).key_text(message(0, topic="x")) == "str x"


def test_key_is_computed_after_filters_and_maps() -> None:
    plan = keyed_plan(
        IN.pipe(
            ops.where(lambda each: each.topic == "x"),
            ops.map(lambda each: int(each.value)),
            ops.where(lambda value: value > 1),
            ops.group_by(lambda value: [value] if value == 9 else value % 2),
            ops.merge_all(),
        )
    )
    texts = [
        plan.key_text(message(0, value, topic)) for value, topic in ((b"3", "x"), (b"3", "y"), (b"1", "x"))
    ]
    assert texts == ["number 1", None, None]
    with pytest.raises(InvalidKey, match="not hashable"):
        plan.key_text(message(0, b"9", "x"))


KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats()
    | st.text("1 []'", max_size=3)
    | st.binary(max_size=1),
    lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)


@given(KEYS, KEYS)
def test_key_texts_are_equal_exactly_if_keys_are_equal(one: Any, other: Any) -> None:
    one, other = key_of(one), key_of(other)
    assert (text_of(one) == text_of(other)) == (len({one, other}) == 1)


def test_key_of_unsupported_type_raises_invalid_key() -> None:
    with pytest.raises(InvalidKey, match="cannot be grouped on Spark"):
        text_of(1j)


NAMES = st.text(max_size=3)
CONTENT = st.dictionaries(NAMES, st.dictionaries(NAMES, st.binary(max_size=5), max_size=2), max_size=2)


@given(CONTENT)
def test_state_is_restored_and_truncated_state_is_rejected_as_corrupt(
    content: Mapping[str, Mapping[str, bytes]],
) -> None:
    data = encode_state(content)
    assert decode_state(data) == content
    for end in range(1, len(data)):
        with pytest.raises(StateDamaged):
            decode_state(data[:end])
    with pytest.raises(StateDamaged):
        decode_state(data + b"\0")
    with pytest.raises(UnknownVersion):
        decode_state(b"\2" + data[1:])


def message(second: float, value: bytes = b"1", topic: str = "") -> Message:
    return Message(round(second * 10), round(second * SECOND), "s", 0, 0, topic, value)


def time_of(each: Message) -> int:
    return each.timestamp_ns


def run(job: SparkJob, *messages: Message, state: bytes | None = None) -> tuple[list[Any], bytes | None]:
    """The results of a key, and its state."""
    query = KeyQuery(job, job.plan(), "str x", state, messages[0].timestamp_ns)
    for each in messages:
        query.process(each, each.timestamp_ns)
    state = query.save()
    return query.results, state


def test_key_with_expired_group_has_no_state() -> None:
    query = IN.pipe(
        ops.group_by(lambda _: "x", ttl=10),
        ops.flat_map(lambda group: group.pipe(ops.count(), ops.map(str))),
    )
    job = SparkJob(query, {}, time_of=time_of)
    results, state = run(job, message(1), message(2))
    assert results == []
    assert state is not None

    later = KeyQuery(job, job.plan(), "str x", state, 0)
    while later.due_ms is not None:
        later.advance(later.due_ms * 1_000_000)
    assert [value for value, _, _ in later.results] == [b"2"]
    assert later.save() is None


def test_completed_group_stays_completed() -> None:
    query = IN.pipe(
        ops.group_by(lambda _: "x"),
        ops.flat_map(lambda group: group.pipe(ops.take(1), ops.map(lambda each: each.value))),
    )
    job = SparkJob(query, {}, time_of=time_of)
    results, state = run(job, message(1, b"a"))
    assert results == [(b"a", "", SECOND)]
    assert run(job, message(2, b"b"), state=state) == ([], run(job, message(2, b"b"), state=state)[1])


def test_query_error_contains_key_and_original_error() -> None:
    query = IN.pipe(
        ops.group_by(lambda _: "x"), ops.flat_map(lambda group: group.pipe(ops.map(lambda each: 1 // 0)))
    )
    with pytest.raises(QueryFailed, match=r"ZeroDivisionError.* \(at key str x\).*start the job again"):
        run(SparkJob(query, {}, time_of=time_of), message(1))


def test_state_of_other_operators_raises_state_mismatch() -> None:
    def job(*transforms: Any) -> SparkJob:
        groups = ops.flat_map(lambda group: group.pipe(*transforms, ops.ignore_elements()))
        return SparkJob(IN.pipe(ops.group_by(lambda _: "x"), groups), {}, time_of=time_of)

    _, state = run(job(ops.count()), message(1))
    with pytest.raises(StateMismatch, match="saved state of another operator"):
        run(job(ops.last()), message(2), state=state)


def test_result_that_is_not_an_outgoing_message_raises_query_failed() -> None:
    query = IN.pipe(ops.group_by(lambda _: "x"), ops.merge_all())
    with pytest.raises(QueryFailed, match="TypeError"):
        run(SparkJob(query, {}, time_of=time_of), message(1))


def test_late_values_are_sent_to_the_same_sink_as_results() -> None:
    def encode(value: Any) -> tuple[bytes, str, int | None]:
        if isinstance(value, OutgoingMessage):
            return as_message(value)
        return as_message(OutgoingMessage(value["value"].value, "late"))

    window = ops.tumbling_window(10, ops.Fold.count(), key_mapper=lambda _: "x", late="late")
    query = IN.pipe(
        window, ops.map(lambda each: OutgoingMessage(b"%d" % each["value"], "totals", each["end_ns"]))
    )
    job = SparkJob(query, {}, time_of=time_of, encode=encode, late_outputs=("late",))
    results, _ = run(job, message(1), message(2), message(25), message(3, b"l"))
    assert results == [(b"2", "totals", 10 * SECOND), (b"l", "late", 25 * SECOND)]
    with pytest.raises(Exception, match="no sink has this name"):
        SparkJob(query, {}, time_of=time_of)


def test_max_out_of_orderness_without_time_of_raises_invalid_option() -> None:
    with pytest.raises(InvalidOption, match="max_out_of_orderness_s needs time_of"):
        SparkJob(IN.pipe(ops.group_by(str)), {}, max_out_of_orderness_s=5)


def batch_of(*messages: Message) -> pa.RecordBatch:
    columns = zip(*messages, strict=True)
    *plain, headers = ([*each] for each in columns)
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    arrays = [*map(pa.array, plain), pa.array([None for _ in headers], kind)]
    return pa.RecordBatch.from_arrays(arrays, names=list(Message._fields))


def test_only_latest_message_without_key_is_sent_to_advance_the_clock() -> None:
    query = IN.pipe(
        ops.where(lambda each: each.topic == "x"), ops.group_by(lambda each: each.value), ops.merge_all()
    )
    batch = batch_of(
        message(1, b"a", "x"), message(9, b"b", "y"), message(7, b"c", "y"), message(3, b"a", "x")
    )
    (found,) = add_keys(SparkJob(query, {}, time_of=time_of), [batch])
    rows = found.select(["value", "key", "time_ns"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (b"a", "bytes b'a'", SECOND),
        (b"a", "bytes b'a'", 3 * SECOND),
        (b"b", None, 9 * SECOND),
    ]
    (found,) = add_keys(SparkJob(query, {}), [batch])
    assert found["key"].to_pylist() == ["bytes b'a'"] * 2
    assert found["time_ns"].to_pylist() == [None, None]


def test_time_that_is_not_an_integer_raises_bad_time() -> None:
    query = IN.pipe(ops.group_by(lambda each: each.value), ops.merge_all())
    with pytest.raises(BadTime, match="sequence id 10"):
        list(add_keys(SparkJob(query, {}, time_of=lambda _: 1.5), [batch_of(message(1))]))  # type: ignore[arg-type]


class Handle:
    """The state and the timers of one key, as Spark keeps them."""

    def __init__(self) -> None:
        self.state: tuple[bytes] | None = None
        self.timers: set[int] = set()
        self.getValueState = lambda name, schema: self
        self.registerTimer = self.timers.add
        self.deleteTimer = self.timers.remove

    def get(self) -> tuple[bytes] | None:
        return self.state

    def update(self, state: tuple[bytes]) -> None:
        self.state = state

    def clear(self) -> None:
        self.state = None


def test_key_has_one_spark_timer_and_processes_its_messages_in_order() -> None:
    query = IN.pipe(
        ops.group_by(lambda each: each.topic, ttl=160),
        ops.flat_map(lambda group: group.pipe(ops.map(lambda each: each.value), ops.debounce(5))),
    )
    handle, processor = Handle(), KeyProcessor(SparkJob(query, {}, time_of=time_of))
    processor.init(handle)  # type: ignore[arg-type]

    def send(watermark_s: int, *messages: Message) -> list[bytes]:
        """Send messages in reversed order, as after a shuffle."""
        rows = [(*each, "str x", each.timestamp_ns) for each in reversed(messages)]
        found = processor.handleInputRows(("str x",), iter(rows), TimerValues(0, watermark_s * 1000))  # type: ignore[arg-type]
        return [row.value for row in found]

    def fire(watermark_s: int) -> list[bytes]:
        (due_ms,) = [each for each in handle.timers if each <= watermark_s * 1000]
        times = TimerValues(0, watermark_s * 1000)
        found = [
            row.value for row in processor.handleExpiredTimer(("str x",), times, ExpiredTimerInfo(due_ms))
        ]
        handle.timers.remove(due_ms)  # Spark removes the timer after the call
        return found

    assert send(0, message(1, b"a", "x"), message(2, b"b", "x"), message(8, b"c", "x")) == [b"b"]
    assert handle.timers == {13_000}
    assert send(8, message(9, b"d", "x")) == []
    assert handle.timers == {14_000}
    assert fire(20) == [b"d"]
    (last,) = handle.timers
    assert last > 160_000
    assert fire(400) == []
    assert (handle.state, handle.timers) == (None, set())

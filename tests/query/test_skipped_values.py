"""A value for which an operator raises is skipped as if it had never been sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from query_engines import FailingStore, Numbers, Sink

from rt.query import Factories, Observable, QueryEngine, Source, Transform, VirtualScheduler
from rt.query import operators as ops
from rt.query.core.reliable import RESUME
from rt.query.operators import creation

BAD = 3
END = 23
Function = Callable[[Any], Any]


class Opaque:
    """A value or key that cannot be saved."""


OPAQUE = Opaque()


def refuse(value: int) -> int:
    if value % 10 == BAD:
        raise ValueError(f"no {value}")
    return value


def soon(value: Any) -> Observable[Any]:
    """Return an observable that ends after the arrival of the next value. Raise for the bad values."""
    refuse(value)
    return creation.timer(1.5).pipe(ops.map(lambda _: value))


def opaque(value: int) -> Any:
    return OPAQUE if value % 10 == BAD else value


def folded(seen: Any, value: int) -> Any:
    refuse(value)
    return [*seen, value]


def opaque_fold(seen: Any, value: int) -> Any:
    """A fold whose accumulated value cannot be saved."""
    return OPAQUE if value % 10 == BAD else [*seen, value]


def joined(one: list[Any], other: list[Any]) -> list[Any]:
    return [*one, *other]


def refuse_in_a_later_window(seen: list[int], value: int) -> list[int]:
    """A fold that raises in only one of a value's windows."""
    return folded(seen, value) if len(seen) == 1 else [*seen, value]


PAIRS = ops.Fold(list, folded, joined)
OPAQUE_PAIRS = ops.Fold(list, opaque_fold, joined)
REFUSING: dict[str, Transform] = {
    "map": ops.map(refuse),
    "where": ops.where(lambda v: refuse(v) >= 0),
    "distinct": ops.distinct(refuse),
    "distinct ttl": ops.distinct(lambda v: refuse(v) % 4, ttl=2),
    "distinct_until_changed": ops.distinct_until_changed(lambda v: refuse(v) // 2),
    "comparer": ops.distinct_until_changed(comparer=lambda before, v: refuse(v) // 2 == before // 2),
    "scan": ops.scan(lambda total, v: total + refuse(v), 0),
    "reduce": ops.reduce(lambda total, v: total + refuse(v), 0),
    "take_while": ops.take_while(lambda v: refuse(v) < 15),
    "skip_while": ops.skip_while(lambda v: refuse(v) < 20),
    "some": ops.some(lambda v: refuse(v) > 11),
    "all": ops.all(lambda v: refuse(v) < 11),
    "max": ops.max(lambda one, other: refuse(one) - refuse(other)),
    "min_by": ops.min_by(lambda v: refuse(v) % 4),
    "to_dict": ops.to_dict(refuse),
    "to_dict elements": ops.to_dict(lambda v: v % 4, refuse),
    "count_by": ops.count_by(refuse),
    "reduce_by": ops.reduce_by(lambda v: v % 4, lambda total, v: total + refuse(v), 0),
    "scan_by": ops.scan_by(lambda v: v % 4, lambda total, v: total + refuse(v), 0, ttl=2),
    "flat_map": ops.flat_map(soon),
    "concat_map": ops.concat_map(soon),
    "switch_map": ops.switch_map(soon),
    "throttle_with_mapper": ops.throttle_with_mapper(soon),
    "do_action": ops.do_action(refuse),
    "sequence_equal": ops.sequence_equal(
        creation.range(END).pipe(ops.where(lambda v: v % 10 != BAD)), lambda one, other: refuse(one) == other
    ),
}
GROUPS: dict[str, Transform] = {
    "group_by": ops.group_by(lambda v: refuse(v) % 4),
    "group_by elements": ops.group_by(lambda v: v, refuse),
    "group_by elements ttl": ops.group_by(lambda v: v % 4, refuse, ttl=2),
    "group_by_until": ops.group_by_until(lambda v: refuse(v) % 4, None, lambda g: creation.timer(5.5)),
    "group_by_until elements": ops.group_by_until(lambda v: v, refuse, lambda g: creation.timer(2.5)),
    "group_by_until durations": ops.group_by_until(lambda v: v, None, lambda g: soon(g.key)),
}
IN_EVENT_TIME: dict[str, Transform] = {
    "tumbling_window": ops.tumbling_window(4, PAIRS),
    "sliding_window": ops.sliding_window(4, 2, ops.Fold(list, refuse_in_a_later_window)),
    "session_window": ops.session_window(1.5, PAIRS, key_mapper=lambda v: v % 10 == BAD),
}
STORING: dict[str, Transform] = {
    "distinct": ops.distinct(),
    "distinct ttl": ops.distinct(ttl=5),
    "distinct_until_changed": ops.distinct_until_changed(),
    "scan": ops.scan(lambda _, v: v),
    "pairwise": ops.pairwise(),
    "last": ops.last(),
    "to_list": ops.to_list(),
    "to_set": ops.to_set(),
    "max_by": ops.max_by(lambda v: 1),
    "take_last": ops.take_last(5),
    "skip_last": ops.skip_last(2),
    "debounce": ops.debounce(timedelta(seconds=1.5)),
    "delay": ops.delay(1.5),
    "sample": ops.sample(2),
    "throttle_with_mapper": ops.throttle_with_mapper(lambda v: creation.timer(1.5)),
    "flat_map": ops.flat_map(lambda v: creation.timer(1.5)),
    "switch_map": ops.switch_map(lambda v: creation.timer(1.5)),
    "combine_latest": ops.combine_latest(Source("numbers")),
    "zip": ops.zip(creation.range(END)),
    "buffer_with_count": ops.buffer_with_count(3, 2),
    "buffer_with_time": ops.buffer_with_time(2),
    "scan_by": ops.scan_by(lambda v: v, lambda _, v: v),
    "count_by": ops.count_by(lambda v: v),
    "in_time_order": ops.in_time_order(),
    "tumbling_window": ops.tumbling_window(4, ops.Fold.to_list()),
    "tumbling_window keys": ops.tumbling_window(4, ops.Fold.count(), key_mapper=lambda v: v),
    "session_window": ops.session_window(1.5, ops.Fold.to_list()),
}
OPAQUE_KEYS: dict[str, Transform] = {
    "group_by": ops.group_by(opaque),
    "group_by_until": ops.group_by_until(opaque, None, lambda g: creation.timer(1.5)),
}


def listed(group: Any) -> Observable[Any]:
    """The key of a group, also if it sends nothing, then its values."""
    return group.pipe(ops.start_with(["group", group.key]))  # type: ignore[no-any-return]


IN = Source("numbers")
GOOD = IN.pipe(ops.where(lambda v: v % 10 != BAD))
NEAR = ops.interval_join(IN, left_key=opaque, right_key=lambda v: v + 1, before=2, keep="left")


def valid(table: Observable[Any]) -> Transform:
    return ops.temporal_join(table, left_key=lambda v: v - 1, table_key=opaque, keep="left")


QUERIES: dict[str, tuple[Observable[Any], Observable[Any]]] = {
    **{name: (IN.pipe(each), GOOD.pipe(each)) for name, each in (REFUSING | IN_EVENT_TIME).items()},
    **{
        name: (IN.pipe(each, ops.flat_map(listed)), GOOD.pipe(each, ops.flat_map(listed)))
        for name, each in (GROUPS | OPAQUE_KEYS).items()
    },
    **{
        f"stored: {name}": (IN.pipe(ops.map(opaque), each), GOOD.pipe(ops.map(opaque), each))
        for name, each in STORING.items()
    },
    "interval_join": (IN.pipe(NEAR), GOOD.pipe(NEAR)),
    "temporal_join": (IN.pipe(valid(IN)), IN.pipe(valid(GOOD))),
}


class Process:
    """A process with an engine on the content of a store."""

    def __init__(
        self,
        query: Observable[Any],
        content: Any = None,
        sink: Sink | None = None,
        seen: int = -1,
        times: Sequence[float] = range(END),
        *,
        check_values: bool = False,
    ) -> None:
        factories = Factories()
        factories.add("query", lambda: query)
        self.query = query
        self.store = FailingStore(content)
        self.sink = sink or Sink()
        self.source = Numbers(seen)
        self.engine = QueryEngine(self.store, factories, VirtualScheduler(), check_values=check_values)
        self.times = times
        disorder_s = 0 if isinstance(times, range) else 5
        self.engine.add_source(
            "numbers",
            self.source,
            time_of=lambda value: round(times[value] * 10**9),
            max_out_of_orderness_s=disorder_s,
        )
        output = self.engine.add_sink("out")
        self.engine.recover()
        output.subscribe(self.sink).start(RESUME)
        if not self.engine.queries:
            self.engine.start("q", "query", sink="out")

    def crash(self) -> Process:
        return Process(self.query, self.store.content(), self.sink, self.source.acknowledged, self.times)

    def feed(self, end: int) -> None:
        self.source.pump(end)
        self.engine.run_due()
        self.engine.checkpoint()
        self.engine.deliver()

    def end(self, end: int = END) -> list[Any]:
        """Return the results after the source has completed."""
        self.source.observer.on_completed()
        self.feed(end)
        assert self.engine.queries["q"] in (None, "")
        return self.sink.values


@pytest.mark.parametrize("name", QUERIES)
def test_output_with_skipped_value_equals_output_without_that_value(name: str) -> None:
    skipping, without = map(Process, QUERIES[name])
    skipping.feed(END)
    without.feed(END)
    found = skipping.end()
    assert found == without.end()
    assert found
    assert skipping.engine.dead_letters
    assert not without.engine.dead_letters
    for process in (skipping, without):
        process.engine.unload()


@pytest.mark.parametrize("name", QUERIES)
def test_output_with_skipped_value_equals_output_without_it_with_crash_after_every_value(name: str) -> None:
    skipping, without = map(Process, QUERIES[name])
    without.feed(END)
    for end in range(1, END + 1):
        skipping.feed(end)
        skipping = skipping.crash()
    skipping.feed(END)
    assert skipping.end() == without.end()
    for process in (skipping, without):
        process.engine.unload()


@pytest.mark.parametrize("crashes", [False, True])
def test_skipped_value_between_two_sessions_leaves_both_unchanged(crashes: bool) -> None:
    times = [0.0, 3.0, 3.2, 1.5, 4.0, 20.0]  # The bad value is the fourth, between two sessions.
    process = Process(IN.pipe(ops.session_window(2, OPAQUE_PAIRS)), times=times)
    for end in range(1, len(times) + 1):
        process.feed(end)
        if crashes:
            process = process.crash()
    process.feed(len(times))
    found = process.end(len(times))
    assert [each["value"] for each in found] == [[0], [1, 2, 4], [5]]
    assert [each.sequence_id for each in process.engine.dead_letters] == [BAD]
    process.engine.unload()


def test_interval_join_completes_after_skipping_its_last_value() -> None:
    skipping, without = (Process(each) for each in QUERIES["interval_join"])
    for process in (skipping, without):
        process.feed(BAD + 1)
        process.end(BAD + 1)
        assert process.engine.queries == {"q": ""}
        process.engine.unload()
    assert skipping.sink.values == without.sink.values


def extended(one: list[Any], other: list[Any]) -> list[Any]:
    one.extend(other)
    return one


@pytest.mark.parametrize(("merge", "error"), [(joined, ""), (extended, "ValueChanged")])
def test_merge_function_that_mutates_session_ends_query_with_check_values(merge: Any, error: str) -> None:
    query = IN.pipe(ops.session_window(2, ops.Fold(list, folded, merge)))
    process = Process(query, times=[0.0, 3.0, 1.5], check_values=True)
    process.feed(3)
    ended = process.engine.queries["q"] or ""
    assert ended.partition(":")[0] == error
    if error:
        assert "extended of operator 0 (session_window) of query 'q'" in ended
        assert "[0, 1]" in ended
    process.engine.unload()

"""Operators against those of RxPY: equal values at equal times, on any input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reactivex
from hypothesis import given, settings
from hypothesis import strategies as st
from reactivex import operators as rx
from reactivex.testing import ReactiveTest, TestScheduler

from rt.query import Observable, Source
from rt.query import operators as ops
from rt.query.operators import creation
from rt.testing.queries import MarbleEvent, check_laws, cold, run

IN = Source("in")
OTHER = Source("other")

Stream = list[MarbleEvent]
Ours = Observable[Any]
Theirs = Callable[[Any, Any], Any]


def streams(offset: float) -> st.SearchStrategy[Stream]:
    """Events at whole seconds and an offset, so that those of two streams never coincide."""

    def made(steps: list[tuple[int, int]], end: str) -> Stream:
        at, events = offset, []
        for wait, value in steps:
            at += wait
            events.append(MarbleEvent(at, "next", value))
        if end == "completed":
            events.append(MarbleEvent(at + 1, "completed"))
        if end == "error":
            events.append(MarbleEvent(at + 1, "error", ValueError("#")))
        return events

    steps = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=12)
    return st.builds(made, steps, st.sampled_from(["completed", "completed", "error", "none"]))


def theirs_of(build: Theirs, sources: dict[str, Stream]) -> list[tuple[float, str, Any]]:
    """What RxPY emits, counted from the subscription."""
    scheduler = TestScheduler()

    def hot(events: Stream) -> Any:
        make = {
            "next": ReactiveTest.on_next,
            "error": ReactiveTest.on_error,
            "completed": lambda at, _: ReactiveTest.on_completed(at),
        }
        return scheduler.create_hot_observable(
            [make[each.kind](200 + each.at_s, each.value) for each in events]
        )

    observables = [hot(events) for events in sources.values()]
    output = scheduler.start(lambda: build(*observables), disposed=500.1)
    kinds = {"N": "next", "E": "error", "C": "completed"}
    return [
        (round(each.time - 200, 3), kinds[each.value.kind], getattr(each.value, "value", None))
        for each in output.messages
    ]


def ours_of(query: Ours, sources: dict[str, Stream]) -> list[tuple[float, str, Any]]:
    """What our operators emit. Errors are None."""
    output = run(query, sources, until_s=300)
    return [(round(each.at_s, 3), each.kind, None if each.kind == "error" else each.value) for each in output]


def echo(value: int) -> Ours:
    """At times whose sums are never whole seconds: RxPY orders events at equal times differently."""
    return cold(
        [
            MarbleEvent(0.317, "next", value),
            MarbleEvent(1.713, "next", -value),
            MarbleEvent(2.371, "completed"),
        ]
    )


def rx_echo(value: int) -> Any:
    return reactivex.merge(
        reactivex.timer(0.317).pipe(rx.map(lambda _: value)),
        reactivex.timer(1.713).pipe(rx.map(lambda _: -value)),
        reactivex.timer(2.371).pipe(rx.ignore_elements()),
    )


def keyed(group: Any) -> Ours:
    return group.pipe(ops.to_list(), ops.map(lambda values: (group.key, values)))  # type: ignore[no-any-return]


def rx_keyed(group: Any) -> Any:
    return group.pipe(rx.to_list(), rx.map(lambda values: (group.key, values)))


def one(ours: Any, theirs: Any) -> tuple[Ours, Theirs]:
    """An operator after one source."""
    return IN.pipe(ours), lambda xs, _: xs.pipe(theirs)


listed = ops.flat_map(lambda window: window.pipe(ops.to_list()))
rx_listed = rx.flat_map(rx.to_list())

CASES: dict[str, tuple[Ours, Theirs]] = {
    "all": one(ops.all(lambda x: x < 4), rx.all(lambda x: x < 4)),
    "average": one(ops.average(lambda x: x + 0.1), rx.average(lambda x: x + 0.1)),
    "buffer_with_count": one(ops.buffer_with_count(3, 2), rx.buffer_with_count(3, 2)),
    "buffer_with_count_apart": one(ops.buffer_with_count(2, 3), rx.buffer_with_count(2, 3)),
    "buffer_with_time": one(ops.buffer_with_time(2.61), rx.buffer_with_time(2.61)),
    "buffer_with_time_shifted": one(ops.buffer_with_time(2.61, 1.37), rx.buffer_with_time(2.61, 1.37)),
    "buffer_with_time_or_count": one(
        ops.buffer_with_time_or_count(2.61, 2), rx.buffer_with_time_or_count(2.61, 2)
    ),
    "catch": (IN.pipe(ops.catch(OTHER)), lambda xs, ys: xs.pipe(rx.catch(ys))),
    "combine_latest": (IN.pipe(ops.combine_latest(OTHER)), lambda xs, ys: xs.pipe(rx.combine_latest(ys))),
    "concat": (IN.pipe(ops.concat(OTHER)), lambda xs, ys: xs.pipe(rx.concat(ys))),
    "concat_map": one(ops.concat_map(echo), rx.concat_map(rx_echo)),
    "contains": one(ops.contains(3), rx.contains(3)),
    "count": one(ops.count(lambda x: x > 1), rx.count(lambda x: x > 1)),
    "debounce": one(ops.debounce(1.37), rx.debounce(1.37)),
    "default_if_empty": one(ops.default_if_empty(9), rx.default_if_empty(9)),
    "delay": one(ops.delay(2.61), rx.delay(2.61)),
    "delay_subscription": (  # RxPY's own would wait in the system's time.
        IN.pipe(ops.delay_subscription(2.61)),
        lambda xs, _: reactivex.timer(2.61).pipe(rx.flat_map(lambda _: xs)),
    ),
    "distinct": one(ops.distinct(lambda x: x % 3), rx.distinct(lambda x: x % 3)),
    "distinct_until_changed": one(
        ops.distinct_until_changed(lambda x: x % 2), rx.distinct_until_changed(lambda x: x % 2)
    ),
    "do_action": one(ops.do_action(lambda x: 1 // (x - 4)), rx.do_action(lambda x: 1 // (x - 4))),
    "element_at_or_default": one(ops.element_at_or_default(2, 9), rx.element_at_or_default(2, 9)),
    "filter_indexed": one(
        ops.filter_indexed(lambda x, i: (x + i) % 2), rx.filter_indexed(lambda x, i: (x + i) % 2)
    ),
    "finally_action": one(ops.finally_action(lambda: None), rx.finally_action(lambda: None)),
    "first": one(ops.first(lambda x: x > 3), rx.first(lambda x: x > 3)),
    "first_or_default": one(
        ops.first_or_default(lambda x: x > 4, 9), rx.first_or_default(lambda x: x > 4, 9)
    ),
    "flat_map": one(ops.flat_map(echo), rx.flat_map(rx_echo)),
    "flat_map_indexed": one(
        ops.flat_map_indexed(lambda x, i: echo(x * i)), rx.flat_map_indexed(lambda x, i: rx_echo(x * i))
    ),
    "group_by": (
        IN.pipe(ops.group_by(lambda x: x % 3, lambda x: -x), ops.flat_map(keyed)),
        lambda xs, _: xs.pipe(rx.group_by(lambda x: x % 3, lambda x: -x), rx.flat_map(rx_keyed)),
    ),
    "group_by_taken": (
        IN.pipe(ops.group_by(lambda x: x % 3), ops.take(2), ops.flat_map(keyed)),
        lambda xs, _: xs.pipe(rx.group_by(lambda x: x % 3), rx.take(2), rx.flat_map(rx_keyed)),
    ),
    "ignore_elements": one(ops.ignore_elements(), rx.ignore_elements()),
    "is_empty": one(ops.is_empty(), rx.is_empty()),
    "last": one(ops.last(lambda x: x > 3), rx.last(lambda x: x > 3)),
    "last_or_default": one(ops.last_or_default(9), rx.last_or_default(9)),
    "map": one(ops.map(lambda x: 6 // x), rx.map(lambda x: 6 // x)),
    "map_indexed": (  # Made for each run: RxPY continues to count in the next subscription.
        IN.pipe(ops.map_indexed(lambda x, i: x * i)),
        lambda xs, _: xs.pipe(rx.map_indexed(lambda x, i: x * i)),
    ),
    "max": one(ops.max(lambda x, y: x % 4 - y % 4), rx.max(lambda x, y: x % 4 - y % 4)),
    "merge": (IN.pipe(ops.merge(OTHER)), lambda xs, ys: xs.pipe(rx.merge(ys))),
    "min": one(ops.min(), rx.min()),
    "reduce": one(ops.reduce(lambda a, x: 2 * a + x, 1), rx.reduce(lambda a, x: 2 * a + x, 1)),
    "reduce_unseeded": one(ops.reduce(lambda a, x: 2 * a + x), rx.reduce(lambda a, x: 2 * a + x)),
    "repeat": (IN.pipe(ops.take(2), ops.repeat(3)), lambda xs, _: xs.pipe(rx.take(2), rx.repeat(3))),
    "retry": (
        IN.pipe(ops.map(lambda x: 6 // x), ops.retry(3)),
        lambda xs, _: xs.pipe(rx.map(lambda x: 6 // x), rx.retry(3)),
    ),
    "sample": one(ops.sample(1.37), rx.sample(1.37)),
    "scan": one(ops.scan(lambda a, x: a + x), rx.scan(lambda a, x: a + x)),
    "scan_seeded": one(ops.scan(lambda a, x: a + x, 5), rx.scan(lambda a, x: a + x, 5)),
    "sequence_equal": (
        IN.pipe(ops.map(lambda x: x // 3), ops.sequence_equal(OTHER.pipe(ops.map(lambda x: x // 3)))),
        lambda xs, ys: xs.pipe(
            rx.map(lambda x: x // 3), rx.sequence_equal(ys.pipe(rx.map(lambda x: x // 3)))
        ),
    ),
    "single": one(ops.single(lambda x: x > 4), rx.single(lambda x: x > 4)),
    "single_or_default": one(
        ops.single_or_default(lambda x: x > 4, 9), rx.single_or_default(lambda x: x > 4, 9)
    ),
    "skip": one(ops.skip(3), rx.skip(3)),
    "skip_until": (
        IN.pipe(ops.skip_until(OTHER.pipe(ops.start_with(0)))),
        lambda xs, _: xs,
    ),
    "skip_until_with_time": one(ops.skip_until_with_time(2.61), rx.skip_until_with_time(2.61)),
    "skip_while": one(ops.skip_while(lambda x: x < 3), rx.skip_while(lambda x: x < 3)),
    "skip_while_indexed": (
        IN.pipe(ops.skip_while_indexed(lambda x, i: x + i < 5)),
        lambda xs, _: xs.pipe(rx.skip_while_indexed(lambda x, i: x + i < 5)),
    ),
    "skip_with_time": one(ops.skip_with_time(2.61), rx.skip_with_time(2.61)),
    "some": one(ops.some(lambda x: x > 4), rx.some(lambda x: x > 4)),
    "sum": one(ops.sum(lambda x: x * 0.1), rx.sum(lambda x: x * 0.1)),
    "switch_latest": one(
        ops.compose(ops.window_with_time(2.61), ops.switch_latest()),
        lambda xs: xs.pipe(rx.window_with_time(2.61), rx.switch_latest()),
    ),
    "switch_map": one(ops.switch_map(echo), rx.switch_map(rx_echo)),
    "take": one(ops.take(3), rx.take(3)),
    "take_until": (IN.pipe(ops.take_until(OTHER)), lambda xs, ys: xs.pipe(rx.take_until(ys))),
    "take_until_with_time": one(ops.take_until_with_time(5.31), rx.take_until_with_time(5.31)),
    "take_while": one(
        ops.take_while(lambda x: x < 4, inclusive=True), rx.take_while(lambda x: x < 4, inclusive=True)
    ),
    "take_while_indexed": one(
        ops.take_while_indexed(lambda x, i: x + i < 7), rx.take_while_indexed(lambda x, i: x + i < 7)
    ),
    "take_with_time": one(ops.take_with_time(5.31), rx.take_with_time(5.31)),
    "throttle_first": one(ops.throttle_first(2), rx.throttle_first(2)),
    "throttle_with_mapper": one(
        ops.throttle_with_mapper(lambda x: creation.timer(x / 2 + 0.1)),
        rx.throttle_with_mapper(lambda x: reactivex.timer(x / 2 + 0.1)),
    ),
    "to_list": one(ops.to_list(), rx.to_list()),
    "where": one(ops.where(lambda x: x % 2), rx.filter(lambda x: x % 2)),
    "window_with_count": one(
        ops.compose(ops.window_with_count(3, 2), listed),
        lambda xs: xs.pipe(rx.window_with_count(3, 2), rx_listed),
    ),
    "window_with_time": one(
        ops.compose(ops.window_with_time(2.61, 3.37), listed),
        lambda xs: xs.pipe(rx.window_with_time(2.61, 3.37), rx_listed),
    ),
    "window_with_time_or_count": one(
        ops.compose(ops.window_with_time_or_count(2.61, 2), listed),
        lambda xs: xs.pipe(rx.window_with_time_or_count(2.61, 2), rx_listed),
    ),
    "with_latest_from": (
        IN.pipe(ops.with_latest_from(OTHER)),
        lambda xs, ys: xs.pipe(rx.with_latest_from(ys)),
    ),
    "zip": (IN.pipe(ops.zip(OTHER)), lambda xs, ys: xs.pipe(rx.zip(ys))),
}


LATE = {"catch", "concat", "delay_subscription", "repeat", "retry"}
"""Of these only values are compared: our source also ends later subscribers, a hot one of RxPY does not."""


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(first=streams(0), second=streams(0.5))
def test_an_operator_emits_what_rxpy_emits(name: str, first: Stream, second: Stream) -> None:
    ours, theirs = CASES[name]
    sources = {"in": first, "other": second}
    outputs = [ours_of(ours, sources), theirs_of(theirs, sources)]
    if name in LATE:
        outputs = [[each for each in output if each[1] == "next"] for output in outputs]
    assert outputs[0] == outputs[1]


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), first=streams(0), second=streams(0.5))
def test_saves_and_crashes_change_nothing_on_any_input(name: str, first: Stream, second: Stream) -> None:
    check_laws(CASES[name][0], {"in": first, "other": second}, until_s=60)

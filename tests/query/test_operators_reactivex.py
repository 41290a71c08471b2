"""Operators compared with those of RxPY: equal values at equal times, on any input."""

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
    """Events at whole seconds plus an offset, so that events of two streams never coincide."""

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


END_S = 300.0


def theirs_of(build: Theirs, sources: dict[str, Stream]) -> list[tuple[float, str, Any]]:
    """What RxPY emits until `END_S`, counted from the subscription."""
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
    output = scheduler.start(lambda: build(*observables), disposed=200 + END_S + 1)
    kinds = {"N": "next", "E": "error", "C": "completed"}
    return [
        (at_s, kinds[each.value.kind], getattr(each.value, "value", None))
        for each in output.messages
        if (at_s := round(each.time - 200, 3)) <= END_S
    ]


def ours_of(query: Ours, sources: dict[str, Stream]) -> list[tuple[float, str, Any]]:
    """What our operators emit until `END_S`. Errors are None."""
    output = run(query, sources, until_s=END_S + 1)
    return [
        (at_s, each.kind, None if each.kind == "error" else each.value)
        for each in output
        if (at_s := round(each.at_s, 3)) <= END_S
    ]


def echo(value: int) -> Ours:
    """Events at times whose sums are never whole seconds, because RxPY orders events at equal times
    differently.
    """
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

NEVER = creation.never()


def closing(value: int) -> Ours:
    """The period during which a value is open. It never ends at a whole or half second."""
    return creation.timer(value * 0.7 + 1.113)


def rx_closing(value: int) -> Any:
    return reactivex.timer(value * 0.7 + 1.113)


def endless(xs: Any) -> Any:
    return xs.pipe(rx.concat(reactivex.never()))


def shortened(group: Any) -> Ours:
    """The duration of a group: until it has three values."""
    return group.pipe(ops.skip(2))  # type: ignore[no-any-return]


def rx_shortened(group: Any) -> Any:
    """Like `shortened`, but without completion: RxPY raises if durations end while the groups complete."""
    return reactivex.create(lambda observer, _: group.pipe(rx.skip(2)).subscribe(observer.on_next))


def as_event(notification: Any) -> tuple[str, Any]:
    """The same event as our `materialize` emits."""
    match notification.kind:
        case "N":
            return "next", notification.value
        case "E":
            return "error", (type(notification.exception).__name__, str(notification.exception))
        case _:
            return "completed", None


CASES: dict[str, tuple[Ours, Theirs]] = {
    "all": one(ops.all(lambda x: x < 4), rx.all(lambda x: x < 4)),
    "amb": (IN.pipe(ops.amb(OTHER)), lambda xs, ys: xs.pipe(rx.amb(ys))),
    "average": one(ops.average(lambda x: x + 0.1), rx.average(lambda x: x + 0.1)),
    "buffer_toggle": (
        IN.pipe(ops.concat(NEVER), ops.buffer_toggle(OTHER.pipe(ops.concat(NEVER)), closing)),
        lambda xs, ys: endless(xs).pipe(rx.buffer_toggle(endless(ys), rx_closing)),
    ),
    "buffer_when": one(
        ops.buffer_when(lambda: creation.timer(2.61)), rx.buffer_when(lambda: reactivex.timer(2.61))
    ),
    "buffer_with_count": one(ops.buffer_with_count(3, 2), rx.buffer_with_count(3, 2)),
    "buffer_with_count_apart": one(ops.buffer_with_count(2, 3), rx.buffer_with_count(2, 3)),
    "buffer_with_time": one(ops.buffer_with_time(2.61), rx.buffer_with_time(2.61)),
    "buffer_with_time_unaligned": one(ops.buffer_with_time(2.61, aligned=False), rx.buffer_with_time(2.61)),
    "buffer_with_time_shifted": one(
        ops.buffer_with_time(2.61, 1.37, aligned=False), rx.buffer_with_time(2.61, 1.37)
    ),
    "buffer_with_time_or_count": one(
        ops.buffer_with_time_or_count(2.61, 2, aligned=False), rx.buffer_with_time_or_count(2.61, 2)
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
    "delay_subscription": (  # RxPY's operator would wait in real time.
        IN.pipe(ops.delay_subscription(2.61)),
        lambda xs, _: reactivex.timer(2.61).pipe(rx.flat_map(lambda _: xs)),
    ),
    "dematerialize": one(
        ops.compose(ops.materialize(), ops.dematerialize()),
        lambda xs: xs.pipe(rx.materialize(), rx.dematerialize()),
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
    "group_by_until": (
        IN.pipe(ops.group_by_until(lambda x: x % 3, lambda x: -x, shortened), ops.flat_map(keyed)),
        lambda xs, _: xs.pipe(
            rx.group_by_until(lambda x: x % 3, lambda x: -x, rx_shortened), rx.flat_map(rx_keyed)
        ),
    ),
    "group_by_until_timed": (
        IN.pipe(
            ops.group_by_until(lambda x: x % 3, None, lambda _: creation.timer(4.37)), ops.flat_map(keyed)
        ),
        lambda xs, _: xs.pipe(
            rx.group_by_until(lambda x: x % 3, None, lambda _: reactivex.timer(4.37)), rx.flat_map(rx_keyed)
        ),
    ),
    "group_by_until_taken": (
        IN.pipe(ops.group_by_until(lambda x: x % 3, None, shortened), ops.take(2), ops.flat_map(keyed)),
        lambda xs, _: xs.pipe(
            rx.group_by_until(lambda x: x % 3, None, rx_shortened), rx.take(2), rx.flat_map(rx_keyed)
        ),
    ),
    "group_join": (
        IN.pipe(ops.group_join(OTHER, closing, closing), ops.flat_map(keyed)),
        lambda xs, ys: xs.pipe(
            rx.group_join(ys, rx_closing, rx_closing),
            rx.flat_map(lambda pair: pair[1].pipe(rx.to_list(), rx.map(lambda values: (pair[0], values)))),
        ),
    ),
    "ignore_elements": one(ops.ignore_elements(), rx.ignore_elements()),
    "is_empty": one(ops.is_empty(), rx.is_empty()),
    "join": (
        IN.pipe(ops.join(OTHER, closing, closing)),
        lambda xs, ys: xs.pipe(rx.join(ys, rx_closing, rx_closing)),
    ),
    "last": one(ops.last(lambda x: x > 3), rx.last(lambda x: x > 3)),
    "last_or_default": one(ops.last_or_default(9), rx.last_or_default(9)),
    "map": one(ops.map(lambda x: 6 // x), rx.map(lambda x: 6 // x)),
    "map_indexed": (  # Created for each run: RxPY keeps counting in later subscriptions.
        IN.pipe(ops.map_indexed(lambda x, i: x * i)),
        lambda xs, _: xs.pipe(rx.map_indexed(lambda x, i: x * i)),
    ),
    "materialize": (IN.pipe(ops.materialize()), lambda xs, _: xs.pipe(rx.materialize(), rx.map(as_event))),
    "max": one(ops.max(lambda x, y: x % 4 - y % 4), rx.max(lambda x, y: x % 4 - y % 4)),
    "max_by": one(ops.max_by(lambda x: x % 3), rx.max_by(lambda x: x % 3)),
    "merge": (IN.pipe(ops.merge(OTHER)), lambda xs, ys: xs.pipe(rx.merge(ys))),
    "min": one(ops.min(), rx.min()),
    "min_by": one(
        ops.min_by(lambda x: x % 3, lambda x, y: y - x), rx.min_by(lambda x: x % 3, lambda x, y: y - x)
    ),
    "on_error_resume_next": (
        IN.pipe(ops.on_error_resume_next(OTHER)),
        lambda xs, ys: xs.pipe(rx.on_error_resume_next(ys)),
    ),
    "pairwise": one(ops.pairwise(), rx.pairwise()),
    "partition": (
        creation.merge(*ops.partition(lambda x: x % 2)(IN)),
        lambda xs, _: reactivex.merge(*xs.pipe(rx.partition(lambda x: x % 2))),
    ),
    "reduce": one(ops.reduce(lambda a, x: 2 * a + x, 1), rx.reduce(lambda a, x: 2 * a + x, 1)),
    "reduce_unseeded": one(ops.reduce(lambda a, x: 2 * a + x), rx.reduce(lambda a, x: 2 * a + x)),
    "repeat": (IN.pipe(ops.take(2), ops.repeat(3)), lambda xs, _: xs.pipe(rx.take(2), rx.repeat(3))),
    "retry": (
        IN.pipe(ops.map(lambda x: 6 // x), ops.retry(3)),
        lambda xs, _: xs.pipe(rx.map(lambda x: 6 // x), rx.retry(3)),
    ),
    "sample": one(ops.sample(1.37), rx.sample(1.37)),
    "sample_unaligned": one(ops.sample(1.37, aligned=False), rx.sample(1.37)),
    "scan": one(ops.scan(lambda a, x: a + x), rx.scan(lambda a, x: a + x)),
    "scan_seeded": one(ops.scan(lambda a, x: a + x, 5), rx.scan(lambda a, x: a + x, 5)),
    "sequence_equal": (
        IN.pipe(ops.map(lambda x: x // 3), ops.sequence_equal(OTHER.pipe(ops.map(lambda x: x // 3)))),
        lambda xs, ys: xs.pipe(
            rx.map(lambda x: x // 3), rx.sequence_equal(ys.pipe(rx.map(lambda x: x // 3)))
        ),
    ),
    "share": (
        IN.pipe(ops.share(lambda each: each.pipe(ops.zip(each.pipe(ops.skip(1)))))),
        lambda xs, _: xs.pipe(rx.publish(lambda each: each.pipe(rx.zip(each.pipe(rx.skip(1)))))),
    ),
    "single": one(ops.single(lambda x: x > 4), rx.single(lambda x: x > 4)),
    "single_or_default": one(
        ops.single_or_default(lambda x: x > 4, 9), rx.single_or_default(lambda x: x > 4, 9)
    ),
    "skip": one(ops.skip(3), rx.skip(3)),
    "skip_last": one(ops.skip_last(2), rx.skip_last(2)),
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
    "starmap": one(
        ops.compose(ops.pairwise(), ops.starmap(divmod)),
        lambda xs: xs.pipe(rx.pairwise(), rx.starmap(divmod)),
    ),
    "sum": one(ops.sum(lambda x: x * 0.1), rx.sum(lambda x: x * 0.1)),
    "switch_latest": one(
        ops.compose(ops.window_with_time(2.61), ops.switch_latest()),
        lambda xs: xs.pipe(rx.window_with_time(2.61), rx.switch_latest()),
    ),
    "switch_map": one(ops.switch_map(echo), rx.switch_map(rx_echo)),
    "take": one(ops.take(3), rx.take(3)),
    "take_last": one(ops.take_last(3), rx.take_last(3)),
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
    "time_interval": (
        IN.pipe(ops.time_interval()),
        lambda xs, _: xs.pipe(
            rx.time_interval(), rx.map(lambda each: (each.value, round(each.interval.total_seconds() * 1e9)))
        ),
    ),
    "timeout": (
        IN.pipe(ops.timeout(2.61, creation.of(9))),
        lambda xs, _: xs.pipe(rx.timeout(2.61, reactivex.of(9))),
    ),
    "timeout_failing": one(ops.timeout(2.61), rx.timeout(2.61)),
    "timestamp": (
        IN.pipe(ops.timestamp()),
        lambda xs, _: xs.pipe(
            rx.timestamp(),
            rx.map(lambda each: (each.value, round(each.timestamp.timestamp() * 1e9) - 200 * 10**9)),
        ),
    ),
    "to_dict": one(ops.to_dict(lambda x: x % 3, lambda x: -x), rx.to_dict(lambda x: x % 3, lambda x: -x)),
    "to_list": one(ops.to_list(), rx.to_list()),
    "to_set": one(ops.to_set(), rx.to_set()),
    "where": one(ops.where(lambda x: x % 2), rx.filter(lambda x: x % 2)),
    "window_toggle": (
        IN.pipe(
            ops.concat(NEVER), ops.window_toggle(OTHER.pipe(ops.concat(NEVER)), closing), ops.merge_all()
        ),
        lambda xs, ys: endless(xs).pipe(rx.window_toggle(endless(ys), rx_closing), rx.merge_all()),
    ),
    "window_when": (
        IN.pipe(ops.window_when(lambda: creation.timer(2.61)), listed),
        lambda xs, _: xs.pipe(rx.window_when(lambda: reactivex.timer(2.61)), rx_listed),
    ),
    "window_when_taken": (
        IN.pipe(ops.window_when(lambda: creation.timer(2.61)), ops.take(2), listed),
        lambda xs, _: xs.pipe(rx.window_when(lambda: reactivex.timer(2.61)), rx.take(2), rx_listed),
    ),
    "window_with_count": one(
        ops.compose(ops.window_with_count(3, 2), listed),
        lambda xs: xs.pipe(rx.window_with_count(3, 2), rx_listed),
    ),
    "window_with_time": one(
        ops.compose(ops.window_with_time(2.61, 3.37), listed),
        lambda xs: xs.pipe(rx.window_with_time(2.61, 3.37), rx_listed),
    ),
    "window_with_time_or_count": one(
        ops.compose(ops.window_with_time_or_count(2.61, 2, aligned=False), listed),
        lambda xs: xs.pipe(rx.window_with_time_or_count(2.61, 2), rx_listed),
    ),
    "with_latest_from": (
        IN.pipe(ops.with_latest_from(OTHER)),
        lambda xs, ys: xs.pipe(rx.with_latest_from(ys)),
    ),
    "zip": (IN.pipe(ops.zip(OTHER)), lambda xs, ys: xs.pipe(rx.zip(ys))),
}


LATE = {"catch", "concat", "delay_subscription", "on_error_resume_next", "repeat", "retry"}
"""Operators with only their values compared: our source also ends later subscribers, and RxPY's hot source
does not.
"""


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(first=streams(0), second=streams(0.5))
def test_operator_output_equals_rxpy_output(name: str, first: Stream, second: Stream) -> None:
    ours, theirs = CASES[name]
    sources = {"in": first, "other": second}
    outputs = [ours_of(ours, sources), theirs_of(theirs, sources)]
    if name in LATE:
        outputs = [[each for each in output if each[1] == "next"] for output in outputs]
    assert outputs[0] == outputs[1]


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), first=streams(0), second=streams(0.5))
def test_saves_and_crashes_do_not_change_output_on_any_input(
    name: str, first: Stream, second: Stream
) -> None:
    check_laws(CASES[name][0], {"in": first, "other": second}, until_s=60)

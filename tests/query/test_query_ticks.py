"""Periodic query operators: alignment, timer drift, and clock jumps over many empty windows."""

from __future__ import annotations

from typing import Any

import pytest

from rt.objects import CheckpointKind, MemoryStore
from rt.query import Factories, Observable, QueryEngine, Source, VirtualScheduler
from rt.query import operators as ops
from rt.query.core.observable import Transform
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import NS_PER_S, TICKS_MAX, RealScheduler
from rt.query.operators import creation
from rt.testing.queries import MarbleEvent, check_laws

DAY = 86_400
START = 1_767_225_600  # 2026-01-01
IN = Source("in")


def listed(window: Observable[Any]) -> Observable[Any]:
    return window.pipe(ops.to_list())


class Feed:
    """A source that sends `(second, value)` and is asked again after a crash."""

    is_dense = True

    def __init__(self) -> None:
        self._observer: Any = None

    def subscribe(self, observer: Any, /) -> Feed:
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None: ...
    def acknowledge(self, sequence_id: int, /) -> None: ...
    def dispose(self) -> None: ...

    def send(self, number: int, value: tuple[float, Any]) -> None:
        self._observer.on_next(number, value)


class Output:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        if sequence_id == len(self.values):
            self.values.append(value)

    def on_error(self, sequence_id: int, error: Exception, /) -> None: ...
    def on_completed(self, sequence_id: int, /) -> None: ...


def outputs(
    query: Observable[Any],
    events: list[tuple[float, Any]],
    *,
    crashes: bool = False,
    ticks_max: int = TICKS_MAX,
) -> list[Any]:
    """The output of an engine whose clock follows the times of the events."""
    factories = Factories()
    factories("query")(lambda: query)
    store, output = MemoryStore(), Output()

    def started() -> tuple[QueryEngine, Feed]:
        engine, feed = QueryEngine(store, factories, VirtualScheduler(ticks_max=ticks_max)), Feed()
        engine.add_source("in", feed, time_of=lambda event: round(event[0] * NS_PER_S))
        edge = engine.add_sink("out", limit=10_000_000)
        engine.recover()
        edge.subscribe(output).start(len(output.values))
        return engine, feed

    engine, feed = started()
    engine.start("query", "query", {}, sink="out")
    for number, event in enumerate(events):
        feed.send(number, event)
        if crashes or number == len(events) - 1:
            engine.checkpoint(CheckpointKind.DIFFERENTIAL)
            engine.deliver()
        if crashes:
            engine.unload()
            engine, feed = started()
    engine.unload()
    return output.values


VALUES = ops.map(lambda event: event[1])
WINDOWS: dict[str, Transform] = {
    "buffer": ops.buffer_with_time(1),
    "buffer_unaligned": ops.buffer_with_time(1, aligned=False),
    "buffer_shifted": ops.buffer_with_time(5, 1),
    "buffer_or_count": ops.buffer_with_time_or_count(1, 9),
    "window": ops.compose(ops.window_with_time(1), ops.flat_map(listed)),
    "window_apart": ops.compose(ops.window_with_time(0.5, 1), ops.flat_map(listed)),
    "window_shifted": ops.compose(ops.window_with_time(3, 1), ops.flat_map(listed)),
    "window_or_count": ops.compose(ops.window_with_time_or_count(1, 9), ops.flat_map(listed)),
}
TICKS = {
    "interval": creation.interval(1),
    "interval_aligned": creation.interval(1, aligned=True),
    "timer": creation.timer(0.5, 1),
}


@pytest.mark.parametrize("name", [*WINDOWS, *TICKS])
def test_clock_jump_of_a_month_fires_few_ticks_and_keeps_window_values(name: str) -> None:
    at = START + 0.25
    query = IN.pipe(VALUES, WINDOWS.get(name) or ops.merge(TICKS[name]))
    events = [(at, 1), (at + 1, 2), (at + 30 * DAY, 3), (at + 30 * DAY + 1, 4), (at + 60 * DAY, 5)]
    found = outputs(query, [*events, (at + 61 * DAY, 6)])
    assert found == outputs(query, [*events, (at + 61 * DAY, 6)], crashes=True)
    assert 2 * TICKS_MAX < len(found) < 5 * TICKS_MAX
    if name in WINDOWS:
        lists = [each for each in found if each]
        assert {value for each in lists for value in each} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", [*WINDOWS, *TICKS])
def test_crash_during_clock_jump_does_not_change_output(name: str) -> None:
    query = IN.pipe(ops.delay(150.1), WINDOWS.get(name) or ops.merge(TICKS[name]))
    events = [MarbleEvent(at_s, "next", at_s) for at_s in (0.25, 1.25, 400.25)]
    output = check_laws(query, {"in": [*events, MarbleEvent(401, "completed")]}, until_s=402)
    values = {each.value for each in output if type(each.value) is float}
    listed = {value for each in output if type(each.value) is list for value in each.value}
    assert {0.25, 1.25} <= values | listed
    assert TICKS_MAX <= len(output) < 1.5 * TICKS_MAX


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_skipped_by_clock_jump_are_empty(name: str) -> None:
    at = START + 0.25
    events = [(at + second, second) for second in (0, 1, 2, 90, 180, 180.5, 400, 401, 407, 900)]
    few, many = (outputs(IN.pipe(VALUES, WINDOWS[name]), events, ticks_max=most) for most in (1, 10_000))
    assert [each for each in few if each] == [each for each in many if each]
    assert len(few) < len(many) // 2


@pytest.mark.parametrize("wait_s", [0.1, 1.1, 5.1, 400.7, 20 * DAY])
@pytest.mark.parametrize("name", WINDOWS)
def test_value_sent_by_timer_during_clock_jump_is_in_window_of_its_time(name: str, wait_s: float) -> None:
    query = IN.pipe(VALUES, ops.delay(wait_s), WINDOWS[name], ops.where(bool))
    events = [(START + 0.25, 1), (START + 0.5, 2), (START + (40 * DAY if wait_s > DAY else 500), 3)]
    found = outputs(query, events, ticks_max=1)
    assert found == outputs(query, events)
    assert found == outputs(query, events, crashes=True)
    if wait_s < DAY:
        assert found == outputs(query, events, ticks_max=1000)
    assert {value for each in found for value in each} <= {1, 2}


def test_sample_sets_no_timer_without_pending_value() -> None:
    query = IN.pipe(VALUES, ops.sample(1))
    assert outputs(query, [(START, 1), (START + 10_000 * DAY, 2), (START + 10_001 * DAY, 3)]) == [1, 2]
    runtime = QueryRuntime(VirtualScheduler())
    root = runtime.roots["q"] = OperatorGroup(runtime, "q")
    root.build(creation.never().pipe(ops.sample(1)), _Appends([]))
    root.open()
    root.start()
    assert runtime.scheduler.next_due_ns is None


def test_windows_do_not_drift_when_timers_fire_late() -> None:
    now = [START * NS_PER_S]
    runtime = QueryRuntime(RealScheduler(lambda: now[0]))
    seen: list[Any] = []
    for number, query in enumerate(
        [
            ops.buffer_with_time(1),
            ops.buffer_with_time(1, aligned=False),
            ops.buffer_with_time_or_count(1, 5),
            ops.buffer_with_time_or_count(1, 5, aligned=False),
            ops.compose(ops.window_with_time_or_count(1, 5), ops.flat_map(listed)),
            ops.compose(ops.window_with_time_or_count(1, 5, aligned=False), ops.flat_map(listed)),
            ops.compose(ops.window_with_time(1), ops.flat_map(listed)),
        ]
    ):
        root = runtime.roots[str(number)] = OperatorGroup(runtime, str(number))
        root.build(creation.never().pipe(query), _Appends(seen))
        root.open()
        root.start()
    late_ns = NS_PER_S // 10
    while runtime.scheduler.run_due():
        pass
    for tick in range(1, 100):
        due_ns = runtime.scheduler.next_due_ns
        assert due_ns == (START + tick) * NS_PER_S
        now[0] = due_ns + late_ns
        while runtime.scheduler.run_due():
            pass
        assert len(seen) == 7 * tick


def test_aligned_windows_start_at_round_times_plus_offset() -> None:
    at = START + 37 * 60
    minutes = [(at + 60.0 * each, each) for each in range(200)]
    starts = {
        ops.buffer_with_time(3600): 23,
        ops.buffer_with_time(3600, offset=600): 33,
        ops.buffer_with_time(3600, aligned=False): 60,
        ops.compose(ops.window_with_time(3600), ops.flat_map(listed)): 23,
    }
    for window, first in starts.items():
        found = outputs(IN.pipe(VALUES, window), minutes)
        # The query's clock starts with the first value. A value at a tick belongs to the next list.
        assert found[0] == list(range(first))
        assert found[1] == list(range(first, first + 60))


class _Appends:
    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def on_next(self, value: Any, /) -> None:
        self._seen.append(value)

    def on_error(self, error: Exception, /) -> None:
        self._seen.append(error)

    def on_completed(self) -> None: ...


@pytest.mark.parametrize(
    "operator", [ops.window_with_time(1), ops.window_with_time_or_count(1, 5)], ids=["time", "time_or_count"]
)
def test_window_count_is_same_if_due_timers_fire_before_clock_jump(
    operator: Transform,
) -> None:
    """After a crash, due timers may fire before the repeated value."""
    counts = []
    for fires_first in (False, True):
        factories = Factories()
        factories.add("q", lambda: IN.pipe(operator, ops.flat_map(listed)))
        engine, source = QueryEngine(MemoryStore(), factories, VirtualScheduler()), Feed()
        engine.add_source("in", source, time_of=lambda value: round(value[0] * NS_PER_S))
        output = engine.add_sink("out")
        engine.recover()
        source.send(0, (START, 0))
        engine.start("q", "q", sink="out")
        if fires_first:
            engine.run_due()
        source.send(1, (START + DAY, 1))
        engine.run_due()
        counts.append(output.end)
    assert counts[0] == counts[1]

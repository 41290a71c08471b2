"""Event time of an engine: watermarks, idle sources, late values and limits on jumps of the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from timed_engines import SECOND, Timed, TimedRun, TimedSource, time_of

from rt import InvalidOption
from rt.objects import MemoryStore
from rt.query import (
    Backlogged,
    ClockJump,
    Factories,
    NoSuchQuery,
    Observable,
    Operator,
    QueryEngine,
    Source,
    VirtualScheduler,
    WrongState,
    applied,
)
from rt.query import operators as ops
from rt.query.core.lifecycle import EventLock
from rt.query.runner import EngineRunner
from rt.testing.queries import MarbleEvent, check_laws

A, B = Source("a"), Source("b")


def counts(source: Observable[Any], **options: Any) -> Observable[Any]:
    """The number of values in every 10 s."""
    return source.pipe(
        ops.tumbling_window(10, ops.Fold.count(), **options),
        ops.map(lambda each: [each["start_ns"] // SECOND, each["value"]]),
    )


def values(*times: float) -> list[Timed]:
    return [(float(each), number) for number, each in enumerate(times)]


def now_s(run: TimedRun) -> float:
    return run.engine.scheduler.now_ns / SECOND


def send_all(run: TimedRun, names: str) -> list[bool]:
    return [run.send(name) for name in names]


def test_values_within_out_of_orderness_bound_reach_their_windows() -> None:
    run = TimedRun(counts(A), {"a": values(12, 3, 25, 17, 15, 40)}, {"a": {"max_out_of_orderness_s": 10}})
    assert run.finish() == [[0, 1], [10, 3], [20, 1], [40, 1]]
    assert run.engine.event_time.sources["a"].late == 0
    assert run.late.values == []


def test_late_values_are_counted_and_sent_to_late_output() -> None:
    run = TimedRun(counts(A, late="late"), {"a": values(1, 12, 3, 25)})
    assert run.finish(crashes=True) == [[0, 1], [10, 1], [20, 1]]
    assert run.late.values == [
        {
            "value": (3.0, 2),
            "time_ns": 3 * SECOND,
            "clock_ns": 12 * SECOND,
            "place": "query query",
            "reason": "late",
        }
    ]
    assert run.engine.event_time.sources["a"].late == 1


def test_late_value_counters_survive_crash() -> None:
    run = TimedRun(counts(A), {"a": values(1, 12, 3, 4)})
    send_all(run, "aaaa")
    run.commit()
    before = run.engine.event_time.sources
    assert run.engine.event_time.late_values == {"query": 2}
    assert before["a"].late == 2
    assert before["a"].watermark_ns == 12 * SECOND
    run.crash()
    assert run.engine.event_time.sources == before
    assert run.engine.event_time.late_values == {"query": 2}
    run.engine.stop("query")
    assert run.engine.event_time.late_values == {}


def test_late_value_without_late_output_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    run = TimedRun(counts(A), {"a": values(1, 12, 3)})
    send_all(run, "aaa")
    lines = [each.getMessage() for each in caplog.records if each.getMessage().startswith("value_late")]
    assert lines == ["value_late query=query operator=tumbling_window late_ms=9000 output=None total=1"]


def test_clock_follows_lowest_watermark() -> None:
    run = TimedRun(counts(A.pipe(ops.merge(B))), {"a": values(5, 30, 60), "b": values(2, 20, 70)})
    assert not run.send("a")  # The clock starts when both sources have sent a value.
    assert run.send("b")
    assert now_s(run) == 2
    assert send_all(run, "aaa") == [True] * 3
    assert now_s(run) == 2
    assert send_all(run, "bb") == [True] * 2
    assert now_s(run) == 60


def test_refused_first_value_reports_missing_sources() -> None:
    run = TimedRun(A, {"a": values(5), "b": values(2)})
    with pytest.raises(Backlogged, match=r"\['b'\].*idle_s"):
        run.sources["a"].observer.on_next(0, (5.0, 0))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_clock_starts_at_lowest_first_value_in_any_source_order(order: str) -> None:
    starts: list[int] = []

    class Started(Operator[Any, Any]):
        NAME = "started"

        def on_start(self) -> None:
            starts.append(self.now_ns)

        def on_next(self, value: Any, /) -> None:
            self.emit(value)

    query = A.pipe(ops.merge(B), applied(Started))
    run = TimedRun(query, {"a": values(5), "b": values(2)})
    run.finish(list(order) * 2)
    assert starts == [2 * SECOND]


def test_ended_source_does_not_hold_clock() -> None:
    run = TimedRun(counts(A.pipe(ops.merge(B))), {"a": values(5, 30, 60), "b": values(2)})
    assert send_all(run, "abaaa") == [False, True, True, True, True]
    assert now_s(run) == 2
    assert run.send("b")  # the completion of the source
    run.engine.run_due()
    assert now_s(run) == 60


def test_idle_source_does_not_hold_clock_until_it_sends_again() -> None:
    options = {"b": {"idle_s": 10}}
    query = counts(A.pipe(ops.merge(B)), late="late")
    run = TimedRun(query, {"a": values(5, 30, 60, 90), "b": values(2, 20, 75)}, options)
    assert send_all(run, "babaa") == [False, True, True, True, True]
    for at_s, is_idle in ((100.0, False), (109.9, False), (110.0, True)):
        run.engine.event_time.check_idle(at_s)
        assert run.engine.event_time.sources["b"].is_idle is is_idle
    run.engine.run_due()
    assert now_s(run) == 60
    run.commit()
    run.crash()
    assert run.engine.event_time.sources["b"].is_idle
    assert send_all(run, "bab") == [True] * 3
    run.commit()
    assert not run.engine.event_time.sources["b"].is_idle
    assert now_s(run) == 75
    assert [each["value"] for each in run.late.values] == [(20.0, 1)]


def test_clock_starts_without_idle_source() -> None:
    run = TimedRun(counts(A), {"a": values(5, 30), "b": values(2)}, {"b": {"idle_s": 1}, "a": {"idle_s": 1}})
    assert not run.send("a")
    run.engine.event_time.check_idle(50.0)
    run.engine.event_time.check_idle(51.0)
    assert not run.engine.event_time.sources["a"].is_idle  # A source with a waiting value is not idle.
    assert run.engine.event_time.sources["b"].is_idle
    assert run.send("a")
    assert now_s(run) == 5


def test_source_is_not_idle_while_output_is_full() -> None:
    engine = QueryEngine(MemoryStore(), Factories(), VirtualScheduler())
    output = engine.add_sink("out", limit=1)
    source = TimedSource(values(1, 2))
    engine.add_source("a", source, time_of=time_of, idle_s=1)
    engine.recover()
    engine.event_time.check_idle(10.0)
    output.on_next("full")
    engine.event_time.check_idle(11.0)
    engine.event_time.check_idle(12.0)
    assert not engine.event_time.sources["a"].is_idle
    engine.unload()


def test_clock_uses_highest_watermark_if_all_sources_are_idle() -> None:
    options = {"a": {"idle_s": 1}, "b": {"idle_s": 1}}
    run = TimedRun(counts(A.pipe(ops.merge(B))), {"a": values(5, 30), "b": values(2, 20)}, options)
    send_all(run, "baab")
    run.engine.event_time.check_idle(1.0)
    run.engine.event_time.check_idle(2.0)
    run.engine.run_due()
    assert now_s(run) == 30


def test_value_beyond_max_jump_is_sent_to_late_output_without_moving_clock() -> None:
    month = 30 * 86_400.0
    times = values(1, month, 2, 12, 2 * month, 25)
    run = TimedRun(counts(A), {"a": times}, {"a": {"max_jump_s": 3600, "late": "late"}})
    assert run.finish(crashes=True) == [[0, 2], [10, 1], [20, 1]]
    assert [(each["value"], each["reason"], each["place"]) for each in run.late.values] == [
        ((month, 1), "max_jump_s", "source a"),
        ((2 * month, 4), "max_jump_s", "source a"),
    ]
    assert run.engine.event_time.sources["a"].refused == 2
    assert now_s(run) == 25


def test_value_beyond_max_jump_raises_clock_jump_without_late_output() -> None:
    run = TimedRun(counts(A), {"a": values(1, 5000, 6000)}, {"a": {"max_jump_s": 3600}})
    run.send("a")
    for _ in range(2):  # The rejected value is sent again, and rejected again.
        with pytest.raises(ClockJump, match="max_jump_s"):
            run.send("a")
    assert run.engine.watermarks == {"a": 0}
    assert now_s(run) == 1


def test_missing_late_output_is_rejected() -> None:
    with pytest.raises(NoSuchQuery, match=r"sink.*'no'"):
        TimedRun(A, {"a": values(1)}, {"a": {"max_jump_s": 1, "late": "no"}})
    with pytest.raises(NoSuchQuery, match=r"sink.*'no'"):
        TimedRun(counts(A, late="no"), {"a": values(1)})


@pytest.mark.parametrize("options", [{"max_out_of_orderness_s": 1}, {"idle_s": 1}, {"max_jump_s": 1}])
def test_event_time_options_require_time_of(options: dict[str, Any]) -> None:
    engine = QueryEngine(MemoryStore(), Factories())
    with pytest.raises(InvalidOption, match="time_of"):
        engine.add_source("a", TimedSource([]), **options)
    engine.add_source("a", TimedSource([]))


@pytest.mark.parametrize("options", [{"idle_s": 0}, {"max_jump_s": -1}, {"late": "late"}])
def test_invalid_event_time_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        TimedRun(A, {"a": []}, {"a": options})


def test_operators_see_event_time_of_each_value_and_timer() -> None:
    seen: list[Any] = []

    class Seen(Operator[Any, Any]):
        NAME = "seen"

        def on_next(self, value: Any, /) -> None:
            seen.append((self.event_ns // SECOND, self.now_ns // SECOND))
            self.set_timer(15 * SECOND)

        def on_timer(self, key: str, /) -> None:
            seen.append(("timer", self.event_ns // SECOND))

    run = TimedRun(A.pipe(applied(Seen)), {"a": values(10, 8, 20)})
    send_all(run, "aaa")
    assert seen == [(10, 10), (8, 10), ("timer", 15), (20, 20)]


class Pumped:
    """A source that a runner asks for values."""

    def __init__(self, source: TimedSource) -> None:
        self.source = source
        self.waited: list[float] = []

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:
        if self.source.is_at_end:
            self.waited.append(timeout)
            return 0
        if not self.source.send():
            raise Backlogged("refused")
        return 1


def runner_of(run: TimedRun, names: Sequence[str], clock: list[float]) -> tuple[EngineRunner, list[Pumped]]:
    pumped = [Pumped(run.sources[name]) for name in names]
    return EngineRunner(run.engine, pumped, clock=lambda: clock[0]), pumped


def test_runner_detects_idle_sources() -> None:
    run = TimedRun(counts(A.pipe(ops.merge(B))), {"a": values(5, 30), "b": []}, {"b": {"idle_s": 60}})
    clock = [0.0]
    runner, _ = runner_of(run, "ab", clock)
    assert runner.run_once() == 0  # The clock cannot start without source b.
    clock[0] = 60.0
    assert runner.run_once() == 0
    assert [runner.run_once() for _ in range(2)] == [1, 1]
    runner.checkpoint()
    assert run.out.values == [[0, 1]]


def test_runner_waits_on_missing_source_while_other_source_is_refused() -> None:
    run = TimedRun(A, {"a": values(5), "b": []})
    runner, (_, b) = runner_of(run, "ab", [0.0])
    runner.run_once(timeout=0.5)
    assert b.waited == [0.5]


class Many(Operator[Any, Any]):
    """Sets many timers at the first value. Emits the number of each timer, and the clock at each value."""

    NAME = "many"

    def on_next(self, value: Any, /) -> None:
        self.emit(["value", self.now_ns // SECOND])
        for second in range(3000):
            if self.now_ns < SECOND * 10:
                self.set_timer((second + 10) * SECOND, str(second))

    def on_timer(self, key: str, /) -> None:
        self.emit(int(key))


def test_many_timers_fire_before_value_advancing_the_clock() -> None:
    run = TimedRun(A.pipe(applied(Many)), {"a": values(1, 5000, 4000)}, {"a": {"max_out_of_orderness_s": 1}})
    assert run.finish() == [["value", 0], *range(3000), ["value", 4999], ["value", 4999]]


def test_crash_while_clock_advances_changes_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TimedRun(A.pipe(applied(Many)), {"a": values(1, 5000, 4000)}, {"a": {"max_out_of_orderness_s": 1}})

    class Crash(Exception):
        pass

    def crash(_: EventLock) -> None:
        run.engine.checkpoint()  # another thread may do the same at this moment
        raise Crash

    assert run.send("a")
    with monkeypatch.context() as patch:
        patch.setattr(EventLock, "give_way", crash)
        with pytest.raises(Crash):
            run.send("a")
    assert 1 < now_s(run) < 3000
    run.crash()
    assert run.finish() == [["value", 0], *range(3000), ["value", 4999], ["value", 4999]]


def test_late_output_of_source_cannot_be_dropped() -> None:
    run = TimedRun(A, {"a": values(1)}, {"a": {"max_jump_s": 1, "late": "late"}})
    with pytest.raises(WrongState, match="late"):
        run.engine.drop_sink("late")


def test_late_output_of_operator_cannot_be_dropped_while_query_runs() -> None:
    windows = ops.tumbling_window(1, ops.Fold.count(), late="late")
    run = TimedRun(A.pipe(windows), {"a": values(1)}, {})
    with pytest.raises(WrongState, match="late"):
        run.engine.drop_sink("late")
    run.engine.stop_many(run.engine.queries)
    run.engine.drop_sink("late")
    assert "late" not in run.engine.sinks


class Stamped(Operator[Any, Any]):
    """Emits the time of each value."""

    NAME = "stamped"

    def on_next(self, value: Any, /) -> None:
        self.emit(self.event_ns // SECOND)


def test_values_emitted_at_source_end_have_clock_time() -> None:
    events = [MarbleEvent(10, "next", "a", time_s=3), MarbleEvent(20, "completed")]
    stamps = A.pipe(ops.merge(A.pipe(ops.count())), applied(Stamped))
    assert [each.value for each in check_laws(stamps, {"a": events}) if each.kind == "next"] == [3, 20]

"""Misbehaving operators, factories and sources: the error is typed, and other queries continue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from query_engines import Numbers, Sink

from rt.errors import DiskFull, InvalidOption
from rt.objects import MemoryStore
from rt.query import (
    RESUME,
    BadTime,
    EngineState,
    Factories,
    Observable,
    QueryEngine,
    RealScheduler,
    Scheduler,
    Source,
    TimersPending,
    VirtualScheduler,
    WrongState,
)
from rt.query import operators as ops
from rt.query.checkpoint.error_policy import OnError
from rt.query.core.observable import applied
from rt.query.core.operator import Operator
from rt.query.operators import creation
from rt.testing.queries import run

factories = Factories()
factories.add("plain", lambda: Source("in").pipe(ops.map(lambda x: x)))


class Broken(OSError): ...


class BreaksAtTheEnd(Operator[Any, Any]):
    """Passes values on. `on_dispose` raises. `disposed` has the names of the operators that were disposed."""

    __slots__ = ("_name",)
    NAME = "breaks"
    disposed: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self._name = name

    def on_next(self, value: Any, /) -> None:
        if value == 2:
            raise ValueError("two")
        self.emit(value)

    def on_dispose(self) -> None:
        self.disposed.append(self._name)
        raise Broken(self._name)


@factories("completes")
def completes(count: int) -> Any:
    return Source("in").pipe(applied(BreaksAtTheEnd, "a"), ops.take(count), applied(BreaksAtTheEnd, "b"))


@factories("inner")
def inner() -> Any:
    return Source("in").pipe(ops.switch_map(lambda _: Source("in").pipe(applied(BreaksAtTheEnd, "c"))))


def engine_of(scheduler: Scheduler | None = None, **more: Any) -> tuple[QueryEngine, Numbers, Sink]:
    BreaksAtTheEnd.disposed.clear()
    source, sink = Numbers(), Sink()
    engine = QueryEngine(MemoryStore(), factories, scheduler)
    engine.add_source("in", source, **more)
    output = engine.add_sink("out")
    engine.recover()
    output.subscribe(sink).start(RESUME)
    return engine, source, sink


@pytest.mark.parametrize(
    ("factory", "arguments", "on_error", "error", "disposed"),
    [
        ("completes", {"count": 1}, "stop", "Broken: a", ["a", "b"]),
        ("completes", {"count": 1}, "skip", "Broken: a", ["a", "b"]),
        ("completes", {"count": 5}, "stop", "ValueError: two", ["a", "b"]),
        ("inner", {}, "stop", "Broken: c", ["c", "c"]),  # The next inner query opens before the first closes.
        ("inner", {}, "skip", "Broken: c", ["c", "c"]),
    ],
)
def test_operator_with_failing_dispose_ends_only_its_query(
    factory: str, arguments: dict[str, Any], on_error: OnError, error: str, disposed: list[str]
) -> None:
    engine, source, sink = engine_of()
    engine.start("bad", factory, arguments, on_error=on_error)
    engine.start("good", "plain", sink="out")
    source.pump(5)
    assert (engine.queries["bad"] or "").startswith(error)
    assert sorted(BreaksAtTheEnd.disposed) == disposed
    engine.checkpoint()
    engine.deliver()
    assert sink.values == list(range(5))
    engine.stop("bad")
    assert engine.queries == {"good": None}
    engine.unload()


def test_query_stops_although_operator_dispose_raises() -> None:
    engine, source, _ = engine_of()
    engine.start("bad", "completes", {"count": 5})
    engine.stop("bad")
    assert (engine.queries, sorted(BreaksAtTheEnd.disposed)) == ({}, ["a", "b"])
    source.pump(3)
    engine.checkpoint()
    engine.unload()


def test_unload_disposes_all_operators_and_raises_dispose_error() -> None:
    engine, source, _ = engine_of()
    engine.start("bad", "completes", {"count": 5})
    engine.start("bad-too", "completes", {"count": 5})
    with pytest.raises(Broken):
        engine.unload()
    assert (sorted(BreaksAtTheEnd.disposed), source.is_disposed) == (["a", "a", "b", "b"], True)
    engine.unload()


def repeated(engine: QueryEngine, step: Any, query_id: str) -> None:
    """Run a step again and again in a thread, until another thread stops the query."""
    is_over, errors = threading.Event(), list[Exception]()

    def work() -> None:
        while not is_over.is_set():
            try:
                step()
            except TimersPending:
                pass
            except Exception as error:  # noqa: BLE001 - reported by the test
                errors.append(error)
                return

    def stop() -> None:
        engine.checkpoint()
        engine.stop(query_id)
        stopped.set()

    stopped = threading.Event()
    threads = [threading.Thread(target=each, daemon=True) for each in (work, stop)]
    for each in threads:
        each.start()
    assert stopped.wait(600), "the query keeps the engine's lock"
    is_over.set()
    for each in threads:
        each.join(600)
    assert (errors, engine.queries) == ([], {"good": None})


ENDLESS: dict[str, Callable[[], Observable[Any]]] = {
    "of": lambda: creation.of(1).pipe(ops.repeat()),
    "empty": lambda: creation.empty().pipe(ops.repeat()),
    "throw": lambda: creation.throw(ValueError("no")).pipe(ops.retry()),
    "catch": lambda: creation.throw(ValueError("no")).pipe(ops.catch(creation.of(1)), ops.repeat()),
    "timer": lambda: creation.timer(0).pipe(ops.repeat()),
    "concat_map": lambda: creation.range(10**12).pipe(ops.concat_map(lambda _: creation.empty())),
    "flat_map": lambda: creation.of(1).pipe(ops.repeat(), ops.flat_map(creation.of)),
    "range": lambda: creation.range(10**12),
}
for _name, _make in ENDLESS.items():
    factories.add(f"endless-{_name}", _make)


@pytest.mark.parametrize("name", list(ENDLESS))
@pytest.mark.parametrize("scheduler", [RealScheduler, VirtualScheduler])
def test_endless_query_can_be_stopped_while_its_timers_fire(
    name: str, scheduler: Callable[[], Scheduler]
) -> None:
    engine, _, _ = engine_of(scheduler())
    engine.start("good", "plain", sink="out")
    engine.start("endless", f"endless-{name}")
    repeated(engine, engine.run_due, "endless")
    engine.unload()


def test_source_waits_for_endless_timers_in_virtual_time_until_query_is_stopped() -> None:
    engine, source, sink = engine_of(VirtualScheduler(), time_of=lambda value: value * 10**9)
    source.pump(1)
    engine.start("good", "plain", sink="out")
    engine.start("endless", "endless-of")
    with pytest.raises(TimersPending, match="stop the query"):
        source.pump(2)
    repeated(engine, lambda: source.pump(2), "endless")
    source.pump(4)
    engine.checkpoint()
    engine.deliver()
    assert sink.values == [1, 2, 3]
    engine.unload()


def test_source_continues_despite_endless_query_in_real_time() -> None:
    engine, source, sink = engine_of(RealScheduler())
    engine.start("good", "plain", sink="out")
    engine.start("endless", "endless-of")
    source.pump(5)
    engine.checkpoint()
    engine.deliver()
    assert sink.values == list(range(5))
    engine.unload()


@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
def test_many_timers_due_at_the_same_time_fire_before_next_value(count: int) -> None:
    counted = Factories()
    counted.add(
        "both", lambda: creation.range(count).pipe(ops.merge(Source("in").pipe(ops.map(lambda x: -x))))
    )
    engine, source, sink = (
        QueryEngine(MemoryStore(), counted, VirtualScheduler()),
        Numbers(),
        Sink(),
    )
    engine.add_source("in", source, time_of=lambda value: 1 + value)
    output = engine.add_sink("out")
    engine.recover()
    output.subscribe(sink).start(RESUME)
    source.pump(1)
    engine.start("q", "both", sink="out")
    source.pump(3)
    engine.checkpoint()
    engine.deliver()
    assert sink.values == [*range(count), -1, -2]
    engine.unload()


def test_value_without_valid_time_raises_bad_time_with_source_and_sequence_id() -> None:
    for bad in (ValueError("no"), None, "soon", 1 << 63):

        def time_of(value: int, bad: Any = bad) -> Any:
            if value == 2:
                if isinstance(bad, Exception):
                    raise bad
                return bad
            return value

        engine, source, _ = engine_of(VirtualScheduler(), time_of=time_of)
        with pytest.raises(BadTime, match=r"source 'in', sequence id 2") as raised:
            source.pump(5)
        assert (raised.value.source, raised.value.sequence_id, raised.value.value) == ("in", 2, 2)
        assert (engine.watermarks, engine.skipped) == ({"in": 1}, {"in": 0})
        engine.unload()


def test_values_without_valid_time_are_skipped_counted_and_reported_with_on_bad_time() -> None:
    skipped: list[BadTime] = []
    engine, source, sink = engine_of(
        VirtualScheduler(), time_of=lambda value: 6 // (value % 3), on_bad_time=skipped.append
    )
    engine.start("good", "plain", sink="out")
    source.pump(7)
    assert [(each.sequence_id, each.value) for each in skipped] == [(0, 0), (3, 3), (6, 6)]
    assert isinstance(skipped[0].__cause__, ZeroDivisionError)
    assert (engine.skipped, engine.watermarks) == ({"in": 3}, {"in": 6})
    engine.checkpoint()
    engine.deliver()
    assert (sink.values, source.acknowledged) == ([1, 2, 4, 5], 6)
    engine.unload()


@pytest.mark.parametrize("kind", ["full", "FULL", None, 1])
def test_invalid_checkpoint_kind_raises_invalid_option(kind: Any) -> None:
    engine, source, _ = engine_of()
    source.pump(1)
    with pytest.raises(InvalidOption, match="CheckpointKind"):
        engine.checkpoint(kind)
    assert source.acknowledged == -1
    engine.unload()


def test_failed_unload_can_be_repeated() -> None:
    engine, source, _ = engine_of()
    source.fails = "dispose"
    for _ in range(2):
        with pytest.raises(DiskFull):
            engine.unload()
        assert engine.state is EngineState.UNLOADED
    source.fails = ""
    engine.unload()
    assert source.is_disposed
    engine.unload()


def test_unload_after_failed_recovery_disposes_remaining_sources() -> None:
    source, bad = Numbers(fails="dispose"), Numbers(fails="start")
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("in", source)
    engine.add_source("bad", bad)
    with pytest.raises(DiskFull):
        engine.recover()
    source.fails = ""
    engine.unload()
    assert source.is_disposed


def test_output_of_unloaded_engine_rejects_consumers() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    output = engine.add_sink("out")
    engine.recover()
    waiting = output.subscribe(Sink(), "waiting")
    engine.unload()
    for use in (lambda: output.subscribe(Sink(), "late"), lambda: waiting.start(RESUME)):
        with pytest.raises(WrongState, match="unloaded"):
            use()


@pytest.mark.slow
def test_test_kit_rejects_endless_query() -> None:
    with pytest.raises(AssertionError, match=r"does not end at 0\.0 s"):
        run(creation.empty().pipe(ops.repeat()))


def test_time_before_1970_is_rejected_and_not_counted_as_late() -> None:
    skipped: list[BadTime] = []
    times = [5, -1, 7, -(10**20)]
    for on_bad_time in (None, skipped.append):
        engine, source, _ = engine_of(VirtualScheduler(), time_of=times.__getitem__, on_bad_time=on_bad_time)
        engine.start("q", "plain")
        if on_bad_time is None:
            with pytest.raises(BadTime, match=r"sequence id 1\): got -1, expected .* 0 or more"):
                source.pump(4)
            assert engine.watermarks == {"in": 0}
        else:
            source.pump(4)
            assert engine.skipped == {"in": 2}
            assert [(each.sequence_id, each.value) for each in skipped] == [(1, 1), (3, 3)]
        assert engine.event_time.sources["in"].late == 0
        engine.unload()

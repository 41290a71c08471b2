"""Query sinks: end with their query, shared use, recovery after a crash, and drop_sink."""

from __future__ import annotations

from typing import Any

import pytest
import reactivex
from query_engines import FailingStore, Numbers

from rt.errors import DiskFull
from rt.objects import CommitUnknown, MemoryStore
from rt.query import (
    RESUME,
    Factories,
    NoSuchQuery,
    OutputEdge,
    QueryEngine,
    QueryExists,
    QueryFailed,
    Source,
    WrongState,
)
from rt.query import operators as ops
from rt.query.checkpoint.edge import Release
from rt.query.query_registry import Start
from rt.query.rx import RxSource, to_reactivex

factories = Factories()
factories.add("first", lambda count: Source("in").pipe(ops.take(count)))
factories.add("fragile", lambda: Source("in").pipe(ops.map(lambda x: 6 // (2 - x))))


class Consumer:
    """Records its input. After an end, nothing may follow in the same subscription."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        self.got.append(value)

    def on_error(self, error: Exception, /) -> None:
        assert isinstance(error, QueryFailed)
        self.got.append(str(error))

    def on_completed(self) -> None:
        self.got.append("completed")


class Run:
    """A run of a program with one sink."""

    def __init__(
        self, store: MemoryStore | None = None, *, release: Release = "commit", ends: bool = True
    ) -> None:
        self.store = store or MemoryStore()
        self.source, self.consumer = Numbers(), Consumer()
        self.engine = QueryEngine(self.store, factories, on_error="stop")
        self.engine.add_source("in", self.source)
        self.output: OutputEdge = self.engine.add_sink("out", release=release, ends_with_query=ends)
        self.engine.recover()
        self.subscription = self.output.subscribe(self.consumer)
        self.subscription.start(RESUME)

    def deliver(self, *, checkpoint: bool = True) -> list[Any]:
        if checkpoint:
            self.engine.checkpoint()
        self.engine.deliver()
        return self.consumer.got

    def crash(self) -> Run:
        return Run(MemoryStore(self.store.content()))


@pytest.mark.parametrize("release", ["commit", "now"])
def test_consumers_receive_end_of_query_after_its_values(release: Release) -> None:
    for factory, arguments, expected in (
        ("first", {"count": 2}, [0, 1, "completed"]),
        ("fragile", {}, [3, 6, "ZeroDivisionError: integer division or modulo by zero"]),
    ):
        run = Run(release=release)
        run.engine.start("q", factory, arguments, sink="out")
        run.source.pump(4)
        if release == "commit":
            assert run.deliver(checkpoint=False) == []
        assert run.deliver(checkpoint=release == "commit") == expected
        assert run.deliver() == expected
        run.engine.unload()


def test_end_of_query_is_delivered_only_after_checkpoint() -> None:
    run = Run()
    run.engine.start("q", "first", {"count": 2}, sink="out")
    run.source.pump(1)
    run.deliver()
    run.source.observer.on_completed()
    assert run.deliver(checkpoint=False) == [0]
    assert run.deliver() == [0, "completed"]
    run.engine.unload()


def test_end_of_query_in_checkpoint_is_delivered_after_crash() -> None:
    run = Run()
    run.engine.start("q", "first", {"count": 2}, sink="out")
    run.source.pump(4)
    run.engine.checkpoint()
    after = run.crash()
    assert after.deliver() == [0, 1, "completed"]
    for each in (run, after):
        each.engine.unload()


def test_stopped_query_does_not_end_sink_and_next_query_continues() -> None:
    run = Run()
    run.engine.start("q", "first", {"count": 9}, sink="out")
    run.source.pump(2)
    run.engine.stop("q")
    assert run.deliver() == [0, 1]
    run.engine.start("next", "first", {"count": 1}, sink="out")
    run.source.pump(3)
    assert run.deliver() == [0, 1, 2, "completed"]
    run.engine.unload()


def test_next_query_reopens_ended_sink_for_restarted_subscriptions() -> None:
    run = Run()
    run.engine.start("q", "first", {"count": 1}, sink="out")
    run.source.pump(1)
    assert run.deliver() == [0, "completed"]
    run.subscription.acknowledge(0)
    run.engine.start("next", "first", {"count": 1}, sink="out")
    for each in (run, run.crash()):  # The start of the query is in the log.
        each.source.pump(2)
        each.consumer.got.clear()
        each.subscription.start(RESUME)
        assert each.deliver()[-2:] == [1, "completed"]
        each.engine.unload()


def test_end_of_earlier_query_does_not_end_sink_of_next_query_after_crash() -> None:
    run = Run()
    run.engine.start("q", "first", {"count": 1}, sink="out")
    run.engine.checkpoint()
    run.source.pump(1)
    run.engine.start("next", "first", {"count": 2}, sink="out")
    run = run.crash()
    run.source.pump(2)
    assert run.deliver() == [0, 1]
    run.source.pump(3)
    assert run.deliver() == [0, 1, 2, "completed"]
    run.engine.unload()


def test_sink_stays_ended_if_start_of_next_query_fails() -> None:
    store = FailingStore()
    run = Run(store)
    run.engine.start("q", "first", {"count": 1}, sink="out")
    run.source.pump(1)
    run.engine.checkpoint()
    store.fail_once(DiskFull("full"))
    with pytest.raises(DiskFull):
        run.engine.start("next", "first", {"count": 1}, sink="out")
    assert run.deliver() == [0, "completed"]
    run.engine.unload()


def test_sink_with_ends_with_query_accepts_one_query_at_a_time() -> None:
    run = Run()
    run.engine.start("q", "first", {"count": 9}, sink="out")
    with pytest.raises(QueryExists, match="ends with its query"):
        run.engine.start("other", "first", {"count": 9}, sink="out")
    run.engine.stop("q")
    starts = [Start(each, "first", {"count": 9}, "out") for each in "ab"]
    with pytest.raises(QueryExists, match="ends with its query"):
        run.engine.start_many(starts)
    assert run.engine.queries == {}
    run.engine.unload()


def test_shared_sink_does_not_end_with_its_queries() -> None:
    run = Run(ends=False)
    run.engine.start("a", "first", {"count": 1}, sink="out")
    run.engine.start("b", "fragile", sink="out")
    run.source.pump(4)
    assert run.deliver() == [0, 3, 6]
    run.engine.start("c", "first", {"count": 1}, sink="out")
    run.source.pump(5)
    assert run.deliver() == [0, 3, 6, 4]
    run.engine.unload()


def test_downstream_query_completes_when_its_upstream_query_completes() -> None:
    source, made = Numbers(), Factories()
    made.add("first", lambda: Source("in").pipe(ops.take(3)))
    made.add("total", lambda: Source("between").pipe(ops.sum()))
    engine = QueryEngine(MemoryStore(), made)
    engine.add_source("in", source)
    engine.add_source("between", engine.add_sink("between", ends_with_query=True))
    output = engine.add_sink("out", ends_with_query=True)
    engine.recover()
    consumer = Consumer()
    output.subscribe(consumer).start(RESUME)
    engine.start("first", "first", sink="between")
    engine.start("total", "total", sink="out")
    source.pump(5)
    for _ in range(3):
        engine.checkpoint()
        engine.deliver()
    assert (consumer.got, engine.queries) == ([3, "completed"], {"first": "", "total": ""})
    engine.unload()


def test_reactivex_observable_of_sink_completes_or_fails_with_query() -> None:
    assert _observed(reactivex.range(0, 3), "first", {"count": 2}) == [0, 1, "completed"]
    assert _observed(reactivex.of(2), "fragile", {}) == ["error"]


def _observed(source: reactivex.Observable[int], factory: str, arguments: dict[str, Any]) -> list[Any]:
    got: list[Any] = []
    numbers = RxSource(source)
    engine = QueryEngine(MemoryStore(), factories, on_error="stop")
    engine.add_source("in", numbers)
    output = engine.add_sink("out", ends_with_query=True)
    engine.recover()
    engine.start("q", factory, arguments, sink="out")
    to_reactivex(output).subscribe(got.append, lambda _: got.append("error"), lambda: got.append("completed"))
    numbers.pump()
    engine.checkpoint()
    engine.deliver()
    engine.unload()
    return got


# Removed sinks


def left_over(values: int, acknowledged: int) -> MemoryStore:
    """The store of a program whose sink "out" had values. Some of the values were acknowledged."""
    run = Run(ends=False)
    run.engine.start("q", "first", {"count": values}, sink="out")
    run.source.pump(values)
    run.deliver()
    run.subscription.acknowledge(acknowledged - 1)
    run.engine.stop("q")
    run.engine.checkpoint()
    run.engine.unload()
    return run.store


def test_drop_sink_deletes_all_rows_of_sink_missing_from_program() -> None:
    store = left_over(3, 3)
    assert any("sink" in each for each in store.content())
    engine = QueryEngine(store, factories)
    engine.recover()
    engine.checkpoint()
    assert engine.sinks == {"out": 0}
    engine.drop_sink("out")
    assert engine.sinks == {}
    assert not [each for each in store.content() if "sink" in each]
    engine.unload()
    again = QueryEngine(MemoryStore(store.content()), factories)
    output = again.add_sink("out")
    again.recover()
    assert (again.sinks, output.buffer.end) == ({"out": 0}, 0)
    again.unload()


def test_drop_sink_rejects_unacknowledged_values_without_discard() -> None:
    store = left_over(3, 1)
    engine = QueryEngine(store, factories)
    engine.recover()
    assert engine.sinks == {"out": 2}
    with pytest.raises(WrongState, match="unacknowledged") as raised:
        engine.drop_sink("out")
    assert "discard=True" in str(raised.value)
    assert engine.sinks == {"out": 2}
    engine.drop_sink("out", discard=True)
    assert not [each for each in store.content() if "sink" in each]
    engine.unload()


def test_drop_sink_rejects_sink_in_use_or_unknown() -> None:
    run = Run(ends=False)
    run.engine.start("q", "first", {"count": 1}, sink="out")
    with pytest.raises(WrongState, match="queries send"):
        run.engine.drop_sink("out")
    with pytest.raises(NoSuchQuery):
        run.engine.drop_sink("none")
    run.engine.stop("q")
    run.engine.drop_sink("out")
    with pytest.raises(WrongState):
        run.output.subscribe(Consumer(), "late")
    with pytest.raises(NoSuchQuery):
        run.engine.start("q", "first", {"count": 1}, sink="out")
    run.engine.add_sink("out")
    run.engine.start("q", "first", {"count": 1}, sink="out")
    run.engine.unload()


@pytest.mark.parametrize("happens", [False, True])
def test_drop_sink_with_failed_commit_is_stored_by_next_checkpoint(happens: bool) -> None:
    store = FailingStore(left_over(2, 2).content())
    engine = QueryEngine(store, factories)
    engine.recover()
    store.fail_once(CommitUnknown("power"), happens=happens)
    with pytest.raises(CommitUnknown):
        engine.drop_sink("out")
    engine.checkpoint()
    assert not [each for each in store.content() if "sink" in each]
    engine.unload()


def test_recovery_logs_sinks_missing_from_program(caplog: pytest.LogCaptureFixture) -> None:
    engine = QueryEngine(left_over(3, 1), factories)
    with caplog.at_level("WARNING", logger="rt.query"):
        engine.recover()
    assert "sink_not_added name=out values=2" in caplog.text
    engine.unload()

"""Stages and their queries after faults: failed restarts, odd keys, bursts, and failing sources."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from query_engines import FailingStore, Numbers, Sink

from rt.errors import DiskFull
from rt.objects import CheckpointKind
from rt.query import (
    RESUME,
    Factories,
    Mitigation,
    NoSuchQuery,
    Observable,
    Operator,
    QueryEngine,
    Source,
    Start,
    VirtualScheduler,
    WrongState,
    applied,
)
from rt.query import operators as ops

IN = Source("in")
NAN = float("nan")


class Connecting(Operator[Any, Any]):
    """Passes values on. Cannot connect to its service while `fails` has an element."""

    __slots__ = ("_fails",)
    NAME = "connecting"

    def __init__(self, fails: list[Exception]) -> None:
        self._fails = fails

    def on_connect(self) -> None:
        if self._fails:
            raise self._fails[0]

    def on_next(self, value: Any, /) -> None:
        self.emit(value)


class Spread(Operator[Any, Any]):
    """Emit the elements of each value."""

    __slots__ = ()
    NAME = "spread"

    def on_next(self, value: Iterable[Any], /) -> None:
        for each in value:
            self.emit(each)


class World:
    """A recovered engine, with factories for queries that read a feed or one of its keys.

    The factories raise an element of `broken` while it is not empty.
    """

    def __init__(
        self,
        *stages: tuple[str, Observable[Any], dict[str, Any]],
        store: FailingStore | None = None,
        **more: Any,
    ) -> None:
        self.broken: list[Exception] = more.pop("broken", [])
        factories = Factories()
        factories.add("read", lambda name: self._made(Source(name)))
        factories.add("key", lambda name, key: self._made(Source(name, key=NAN if key == "nan" else key)))
        factories.add("pair", lambda name: self._made(Source(name, key=("pair", -NAN))))
        factories.add("copied", lambda name: copy.deepcopy(self._made(Source(name))))
        self.store = store or FailingStore()
        self.engine, self.source = QueryEngine(self.store, factories, VirtualScheduler(), **more), Numbers()
        self.engine.add_source("in", self.source)
        self._output = self.engine.add_sink("out")
        for name, made, options in stages:
            self.engine.add_stage(name, made, **options)
        self.engine.recover()

    def _made(self, source: Source) -> Observable[Any]:
        if self.broken:
            raise self.broken[0]
        return source.pipe(ops.map(str))

    def start(self, query_id: str, of: str = "read", **arguments: Any) -> None:
        self.engine.start(query_id, of, arguments, sink="out")

    def crash(self) -> FailingStore:
        """Unload this engine, and return the store as of the last checkpoint."""
        store = FailingStore(self.store.content())
        self.engine.unload()
        return store

    def results(self) -> list[Any]:
        sink = Sink()
        subscription = self._output.subscribe(sink)
        subscription.start(RESUME)
        self.engine.checkpoint()
        self.engine.deliver()
        subscription.dispose()
        return sink.values


def test_queries_of_stage_fail_if_stage_cannot_restart() -> None:
    fails: list[Exception] = []
    stages = [("s", IN.pipe(applied(Connecting, fails)), {}), ("later", Source("s"), {})]
    world = World(*stages)
    world.start("q", name="s")
    world.start("on-later", name="later")
    world.source.pump(2)
    world.engine.checkpoint()
    store = world.crash()
    fails.append(OSError("no service"))
    world = World(*stages, store=store)
    world.source.pump(3)
    world.engine.run_due()
    assert world.engine.queries == {"q": "OSError: no service", "on-later": "OSError: no service"}
    assert world.results() == ["0", "0", "1", "1"]
    world.engine.unload()


@pytest.mark.parametrize("end", [None, ValueError("end")])
def test_ignored_query_ends_if_its_source_or_stage_ended_meanwhile(end: Exception | None) -> None:
    stages = [("s", IN, {})]
    world = World(*stages)
    world.start("on-source", name="in")
    world.start("on-stage", name="s")
    world.source.pump(1)
    world.engine.checkpoint()
    world = World(
        *stages, store=world.crash(), broken=[OSError("x")], on_load_failed=lambda *_: Mitigation.IGNORE
    )
    world.source.pump(2)
    if end is None:
        world.source.observer.on_completed()
    else:
        world.source.observer.on_error(end)
    world.engine.checkpoint()
    world = World(*stages, store=world.crash())
    world.engine.run_due()
    assert set(world.engine.queries.values()) == {"" if end is None else "ValueError: end"}
    assert world.results() == ["0", "0"]
    world.engine.unload()


@pytest.mark.parametrize("of", ["key", "pair"])
def test_nan_is_one_key_for_queries_and_stages_after_restart(of: str) -> None:
    key = float if of == "key" else lambda text: ("pair", float(text))
    through = Source("s", key=key("-nan"))
    stages = [("s", IN, {"key_of": lambda _: key("nan")}), ("t", through, {"key_of": lambda _: key("nan")})]
    arguments = {"key": "nan"} if of == "key" else {}
    world = World(*stages)
    world.start("q", of, name="s", **arguments)
    world.start("r", of, name="t", **arguments)
    world.source.pump(2)
    world.engine.checkpoint()
    world = World(*stages, store=world.crash())
    world.source.pump(3)
    assert world.results() == ["0", "0", "1", "1", "2", "2"]
    world.engine.stop_many(["q", "r"])
    world.engine.unload()


class Odd:
    """A key that cannot be compared."""

    def __hash__(self) -> int:
        return hash("odd")

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not comparable")


def test_value_with_incomparable_key_is_skipped_by_all_readers_of_stage() -> None:
    world = World(
        ("s", IN, {"key_of": lambda n: Odd() if n == 1 else n}),
        ("one", Source("s", key="odd"), {}),
        ("all", Source("s"), {}),
    )
    for name in ("s", "all"):
        world.start(name, name=name)
    world.source.pump(3)
    assert world.results() == ["0", "0", "2", "2"]
    assert [(each.query, each.sequence_id) for each in world.engine.dead_letters] == [("stage@s", 1)]
    world.engine.unload()


def test_keyed_stages_are_found_without_comparing_all_keys() -> None:
    compared = []

    class Counted(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    read = [(f"s{number}", Source("s", key=Counted(f"k{number}")), {}) for number in range(50)]
    world = World(("s", IN, {"key_of": lambda n: Counted(f"k{n}")}), *read)
    world.start("q", name="s7")
    compared.clear()
    world.source.pump(10)
    assert len(compared) < 100
    assert world.results() == ["7"]
    world.engine.unload()


def test_message_of_many_values_takes_under_20_bytes_per_value_and_query() -> None:
    count = 200
    world = World(("s", IN.pipe(ops.map(lambda _: range(count)), applied(Spread)), {}))
    world.engine.start_many([Start(f"q{number}", "read", {"name": "s"}) for number in range(count)])
    world.source.pump(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        world.source.pump(2)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 20 * count * count
    world.engine.unload()


def test_source_cannot_be_read_if_add_source_failed() -> None:
    class Refusing(Numbers):
        def subscribe(self, observer: Any, /) -> Numbers:
            raise DiskFull("subscribe")

    factories = Factories()
    factories.add("read", lambda: Source("other"))
    engine = QueryEngine(FailingStore(), factories, VirtualScheduler())
    for _ in range(2):
        with pytest.raises(DiskFull):
            engine.add_source("other", Refusing())
    engine.add_source("in", Numbers())
    engine.add_stage("other", IN)
    engine.recover()
    with pytest.raises(DiskFull):
        engine.add_source("more", Refusing())
    factories.add("more", lambda: Source("more"))
    with pytest.raises(NoSuchQuery):
        engine.start("q", "more")
    engine.unload()


def test_deep_copied_query_reads_same_values_as_original() -> None:
    world = World(("s", IN, {"key_of": lambda n: n}))
    for name in ("in", "s"):
        world.start(name, "copied", name=name)
    world.source.pump(2)
    assert world.results() == ["0", "0", "1", "1"]
    world.engine.unload()


def not_two(value: int) -> int:
    if value == 2:
        raise ValueError("two")
    return value


def total(source: Observable[Any]) -> Observable[Any]:
    return source.pipe(ops.map(not_two), ops.scan(lambda last, value: last + value, 0))


@pytest.mark.parametrize("kind", CheckpointKind)
@pytest.mark.parametrize("in_later_run", [False, True])
def test_ended_stage_restarts_without_state(kind: CheckpointKind, in_later_run: bool) -> None:
    stages = [("s", total(IN), {"on_error": "stop", "key_of": lambda n: n % 2}), ("later", Source("s"), {})]
    world = World(*stages)
    assert world.engine.stages.ends == {"s": None, "later": None}
    with pytest.raises(WrongState, match="has not ended"):
        world.engine.stages.restart("s")
    with pytest.raises(NoSuchQuery):
        world.engine.stages.restart("none")
    world.start("q", name="s")
    world.source.pump(4)
    if in_later_run:
        world.engine.checkpoint(kind)
        world = World(*stages, store=world.crash())
        world.source.pump(4)
    assert world.engine.stages.ends == {"s": "ValueError: two", "later": "ValueError: two"}
    for name in ("s", "later"):
        world.engine.stages.restart(name)
    world = World(*stages, store=world.crash())
    assert world.engine.stages.ends == {"s": None, "later": None}
    world.source.pump(4)
    for query_id, name in (("q", "s"), ("r", "later")):
        world.start(query_id, name=name)
    world.source.pump(6)
    world.engine.checkpoint(kind)
    world = World(*stages, store=world.crash())
    world.source.pump(7)
    assert world.results() == ["0", "1", "4", "4", "9", "9", "15", "15"]
    world.engine.unload()


def test_query_started_before_stage_restart_continues_after_it() -> None:
    world = World(("s", IN.pipe(ops.map(not_two)), {"on_error": "stop"}))
    world.source.pump(3)
    world.start("q", name="s")
    world.engine.stages.restart("s")
    world.engine.run_due()
    world.source.pump(5)
    assert world.engine.queries == {"q": None}
    assert world.results() == ["3", "4"]
    world.engine.unload()


def test_stage_restart_with_failed_checkpoint_becomes_durable_with_next_commit() -> None:
    stages = [("s", total(IN), {"on_error": "stop"})]
    world = World(*stages)
    world.source.pump(4)
    world.engine.checkpoint()
    world.store.fail_once(DiskFull("no"))
    with pytest.raises(DiskFull):
        world.engine.stages.restart("s")
    assert world.engine.stages.ends == {"s": None}
    world.start("q", name="s")
    world.source.pump(6)
    assert world.results() == ["4", "9"]
    world = World(*stages, store=world.crash())
    world.source.pump(7)
    assert world.results() == ["4", "9", "15"]
    world.engine.unload()


@pytest.mark.parametrize("before", ["in", "s"])
@pytest.mark.parametrize("now", ["other", "s"])
def test_query_reading_another_source_in_new_program_receives_all_its_values(before: str, now: str) -> None:
    """Each source has its own ids. The ids of the previous source at the query's start do not apply to the
    new one.
    """
    read, store = before, FailingStore()

    def program() -> tuple[QueryEngine, Numbers, Numbers, Any]:
        factories = Factories()
        factories.add("read", lambda: Source(read).pipe(ops.map(str)))
        engine, source, other = QueryEngine(store, factories, VirtualScheduler()), Numbers(), Numbers()
        engine.add_source("in", source)
        engine.add_source("other", other)
        engine.add_stage("s", Source("other"))
        output = engine.add_sink("out")
        engine.recover()
        return engine, source, other, output

    engine, source, other, _ = program()
    source.pump(5)
    engine.start("q", "read", sink="out")
    source.pump(6)
    engine.checkpoint()
    engine.unload()
    read, store = now, FailingStore(store.content())
    engine, source, other, output = program()
    other.pump(3)
    engine.checkpoint()
    sink = Sink()
    output.subscribe(sink).start(RESUME)
    engine.deliver()
    assert sink.values == [*(["5"] if before == "in" else []), "0", "1", "2"]
    engine.unload()

"""Shared stages of queries: same results as inlined operators, error policies, recovery, and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from query_engines import FailingStore, Numbers, Sink

from rt.errors import DiskFull
from rt.objects import CheckpointKind, CommitUnknown
from rt.query import (
    RESUME,
    EngineStopped,
    Factories,
    InvalidKey,
    Mitigation,
    NoSuchQuery,
    Observable,
    Operator,
    QueryEngine,
    QueryExists,
    Source,
    StateMismatch,
    Transform,
    VirtualScheduler,
    WrongState,
    applied,
)
from rt.query import operators as ops

SECOND = 10**9
VALUES = 14
Pair = list[int]


class Twice(Operator[Any, Any]):
    """Emit two values for each value."""

    __slots__ = ()
    NAME = "twice"

    def on_next(self, value: Pair, /) -> None:
        self.emit(value)
        self.emit([value[0], value[1] + 1])


class Spread(Operator[Any, Any]):
    """Emit the elements of each value."""

    __slots__ = ()
    NAME = "spread"

    def on_next(self, value: list[Any], /) -> None:
        for each in value:
            self.emit(each)


class Stamp(Operator[Any, Any]):
    """Append the event time, and the number of values so far."""

    __slots__ = ("_count",)
    NAME = "stamp"
    SAVED = "_count"

    def __init__(self) -> None:
        self._count = 0

    def on_next(self, value: Any, /) -> None:
        self._count += 1
        self.changed()
        self.emit([*value, self.event_ns, self._count])


def not_three(value: Pair) -> Pair:
    if value[1] % 10 == 3:
        raise ValueError(f"no {value[1]}")
    return value


PURE: dict[str, Transform] = {
    "map": ops.map(lambda v: [v[0], v[1] * 7 % 11]),
    "where": ops.where(lambda v: v[1] % 3 > 0),
    "sum": ops.scan(lambda last, v: [v[0], last[1] + v[1]], [0, 0]),
    "last of two": lambda source: source.pipe(ops.buffer_with_count(2), ops.map(lambda pair: pair[-1])),
    "twice": applied(Twice),
    "take": ops.take(9),
    "distinct": ops.distinct(lambda v: v[1] % 5),
    "raise": ops.map(not_three),
    "merge": lambda source: source.pipe(ops.merge(Source("in").pipe(ops.map(lambda n: [n, -n])))),
}
"""The first element of each value is the number of the event. So a query can select the values since its
start.
"""
TIMED: dict[str, Transform] = {
    "delay": ops.delay(1.5),
    "collect": lambda source: source.pipe(ops.buffer_with_time(3), applied(Spread)),
    "tumble": lambda source: source.pipe(
        ops.tumbling_window(4, ops.Fold.count()), ops.map(lambda window: [0, window["value"]])
    ),
}
QUERIES: dict[str, Transform] = {
    "pass": lambda source: source,
    "twice": applied(Twice),
    "sum": ops.scan(lambda last, v: [v[0], last[1] + v[1]], [0, 0]),
    "take": ops.take(3),
    "pairs": lambda source: source.pipe(ops.buffer_with_count(2), ops.map(lambda pair: pair[1])),
}


def key_of(value: Pair) -> Any:
    """The key of a value. For a few values the function raises or returns an unhashable key."""
    if value[1] % 13 == 6:
        raise LookupError(str(value))
    return [] if value[1] % 13 == 8 else value[1] % 3


def with_key(value: Pair) -> Pair:
    hash(key_of(value))
    return value


@dataclass(frozen=True)
class Query:
    """A query: its input (0 is the source, 1 and 2 are stages), key, operators, first event, and number of
    events.
    """

    reads: int
    key: int | None
    operators: tuple[str, ...]
    also_source: bool
    start: int = 0
    lasts: int = VALUES


@dataclass(frozen=True)
class Plan:
    """The operators of two stages, `first` and `second`.

    The second stage reads the first stage, or only its values with `second_key`. It may also read the source.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    second_key: int | None
    is_diamond: bool
    on_error: Literal["skip", "stop"]
    values: tuple[int, ...]
    queries: tuple[Query, ...]

    def raw(self) -> Observable[Any]:
        return Source("in").pipe(ops.map(lambda n: [n, self.values[n]]))

    def stage(self, number: int, *, is_shared: bool) -> Observable[Any]:
        """The operators of a stage. If it is not shared, also all operators between the source and the
        stage.
        """
        if number == 0:
            return self.raw()
        if number == 1:
            return self.raw().pipe(*(OPERATORS[name] for name in self.first))
        before = self.read(1, self.second_key, is_shared=is_shared)
        if self.is_diamond:
            before = before.pipe(ops.merge(self.raw()))
        return before.pipe(*(OPERATORS[name] for name in self.second))

    def read(self, number: int, key: int | None, *, is_shared: bool) -> Observable[Any]:
        if number == 0:
            return self.raw()
        if is_shared:
            return Source(str(number)) if key is None else Source(str(number), key=key)
        made = self.stage(number, is_shared=False).pipe(ops.map(with_key))
        return made if key is None else made.pipe(ops.where(lambda value: key_of(value) == key))

    def query(self, number: int, *, is_shared: bool) -> Observable[Any]:
        query = self.queries[number]
        made = self.read(query.reads, query.key, is_shared=is_shared)
        if query.also_source:
            made = made.pipe(ops.merge(self.raw()))
        if not is_shared and query.start:
            made = made.pipe(ops.where(lambda value: value[0] >= query.start))
        steps = [OPERATORS[name] for name in query.operators]
        return made.pipe(*steps, applied(Stamp), ops.map(lambda value: [number, *value]))


OPERATORS = {**PURE, **TIMED, **QUERIES}


class World:
    """A process with an engine. With `is_shared` its queries read stages. Otherwise each query has all
    operators.

    In the second case all queries start at once, in the same order, and skip the values before their start.
    """

    def __init__(
        self, plan: Plan, *, is_shared: bool, store: FailingStore | None = None, before: World | None = None
    ) -> None:
        factories = Factories()
        factories.add("query", lambda number: plan.query(number, is_shared=is_shared))
        self.plan, self.is_shared = plan, is_shared
        self.store = store or FailingStore()
        self.sink = before.sink if before else Sink()
        self.source = Numbers(before.source.acknowledged if before else -1)
        self.engine = QueryEngine(self.store, factories, VirtualScheduler(), on_error=plan.on_error)
        self.engine.add_source("in", self.source, time_of=lambda value: value * SECOND)
        if is_shared:
            for number in (1, 2):
                self.engine.add_stage(str(number), plan.stage(number, is_shared=True), key_of=key_of)
        output = self.engine.add_sink("out", limit=100_000)
        self.engine.recover()
        self.subscription = output.subscribe(self.sink)
        self.subscription.start(RESUME)

    def crash(self) -> World:
        return World(
            self.plan, is_shared=self.is_shared, store=FailingStore(self.store.content()), before=self
        )

    def feed(self, end: int) -> None:
        self.source.pump(end)
        self.engine.deliver()

    def act(self, event: int) -> None:
        for number, query in enumerate(self.plan.queries):
            name = f"q{number}"
            if event == (query.start if self.is_shared else 0):
                self.again(lambda name=name, number=number: self.start(name, number))  # type: ignore[misc]
        for number, query in enumerate(self.plan.queries):
            if event == query.start + query.lasts:
                self.again(lambda name=f"q{number}": self.stop(name))  # type: ignore[misc]

    def start(self, name: str, number: int) -> None:
        if name not in self.engine.queries:
            self.engine.start(name, "query", {"number": number}, sink="out")

    def stop(self, name: str) -> None:
        if name in self.engine.queries:
            self.engine.stop(name)

    def again(self, call: Callable[[], object]) -> None:
        """Repeat the call until no commit fails."""
        while True:
            try:
                call()
                self.engine.checkpoint()
            except (DiskFull, CommitUnknown):
                continue
            return

    def results(self) -> list[Any]:
        self.again(self.engine.checkpoint)
        self.engine.deliver()
        self.engine.unload()
        return self.sink.values


def chains(names: Iterable[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(names)), max_size=most).map(tuple)


def queries(*, at: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Query, ...]]:
    reads, key = st.sampled_from([1, 1, 2, 2, 0]), st.none() | st.integers(0, 2)
    lasts = st.integers(1, VALUES)
    one = st.builds(Query, reads, key, chains(QUERIES, 2), st.booleans(), at, lasts)
    return st.lists(one, min_size=1, max_size=5).map(lambda each: tuple(sorted(each, key=lambda q: q.start)))


def plans(operators: Iterable[str], at: st.SearchStrategy[int]) -> st.SearchStrategy[Plan]:
    values = st.lists(st.integers(0, 40), min_size=VALUES, max_size=VALUES).map(tuple)
    first, second = chains(operators, 3), chains(PURE, 3)
    key, on_error = st.none() | st.integers(0, 2), st.sampled_from(["skip", "stop"])
    return st.builds(Plan, first, second, key, st.booleans(), on_error, values, queries(at=at))


FAULTS = st.sampled_from([None, None, (DiskFull("no"), False), (CommitUnknown("yes"), True)])


def compare(plan: Plan, data: st.DataObject) -> None:
    """Check that both worlds emit the same results in the same order, despite crashes and failed saves."""
    inlined, shared = World(plan, is_shared=False), World(plan, is_shared=True)
    for event in range(VALUES):
        for each in (inlined, shared):
            each.feed(event)
            each.act(event)
        shared.feed(event + 1)
        match data.draw(st.sampled_from(["crash", "crash", "save", "fail", "none"])):
            case "crash":
                shared = shared.crash()
                shared.feed(event + 1)
            case "save":
                with suppress(DiskFull, CommitUnknown):
                    shared.engine.checkpoint(data.draw(st.sampled_from(CheckpointKind)))
            case "fail":
                faults = data.draw(st.lists(FAULTS, max_size=3))
                shared.store.draw = lambda faults=faults: faults.pop() if faults else None  # type: ignore[misc]
                with suppress(DiskFull, CommitUnknown):
                    shared.engine.checkpoint()
            case _:
                pass
    for each in (inlined, shared):
        each.feed(VALUES)
    states = [{name: end is None for name, end in each.engine.queries.items()} for each in (inlined, shared)]
    assert shared.results() == inlined.results()
    assert states[0] == states[1]


@pytest.mark.slow
@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(plans(PURE, st.integers(0, 8)), st.data())
def test_query_on_stage_has_same_results_as_query_with_its_operators(plan: Plan, data: st.DataObject) -> None:
    compare(plan, data)


@pytest.mark.slow
@settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
@given(plans([*TIMED, *TIMED, *PURE], st.just(0)), st.data())
def test_stage_timers_fire_in_same_order_as_query_timers(plan: Plan, data: st.DataObject) -> None:
    """This holds for timers of one stage. If timers of two stages are due at one instant, the order of the
    stages' timers decides.
    """
    compare(plan, data)


def engine_with(
    *stages: tuple[str, Any, dict[str, Any]], store: FailingStore | None = None, **more: Any
) -> tuple[QueryEngine, Numbers]:
    """An engine that has recovered, with a sink "out" and a query for each source and key."""
    factories = Factories()
    factories.add("read", lambda name: Source(name).pipe(ops.map(str)))
    factories.add("key", lambda name, key: Source(name, key=key).pipe(ops.map(str)))
    engine, source = QueryEngine(store or FailingStore(), factories, VirtualScheduler(), **more), Numbers()
    engine.add_source("in", source)
    engine.add_sink("out")
    for name, made, options in stages:
        engine.add_stage(name, made, **options)
    engine.recover()
    return engine, source


def sent(engine: QueryEngine) -> list[Any]:
    sink, output = Sink(), engine._edges.outputs["out"]
    output.subscribe(sink).start(RESUME)
    engine.checkpoint()
    engine.deliver()
    return sink.values


IN = Source("in")


def test_value_skipped_by_stage_is_one_dead_letter_of_stage() -> None:
    stage = IN.pipe(ops.map(lambda n: [n, 10 // (n - 2)]))
    store = FailingStore()
    engine, source = engine_with(
        ("s", stage, {"key_of": lambda v: [] if v[0] == 3 else v[0] % 2}), store=store
    )
    for number in range(3):
        engine.start(f"q{number}", "key", {"name": "s", "key": number % 2}, sink="out")
    source.pump(5)
    assert [(each.query, each.source, each.sequence_id) for each in engine.dead_letters] == [
        ("stage@s", "in", 2),
        ("stage@s", "in", 3),
    ]
    assert "ZeroDivisionError" in engine.dead_letters[0].error
    assert "key_of of stage 's'" in engine.dead_letters[1].error
    assert sent(engine) == ["[0, -5]", "[0, -5]", "[1, -10]", "[4, 5]", "[4, 5]"]
    assert engine._catalog.stages["s"] == {"end": None, "skipped": 2, "counts": {"in": 0}}
    engine.unload()


@pytest.mark.parametrize("in_key", [False, True])
def test_on_error_stop_ends_stage_and_its_queries_even_after_restart(in_key: bool) -> None:
    stage = IN if in_key else IN.pipe(ops.map(lambda n: 1 // (n - 2)))
    options = {"on_error": "stop", "key_of": lambda n: [][n] if in_key and n == 2 else 0}
    store = FailingStore()
    engine, source = engine_with(("s", stage, options), store=store)
    engine.start("q", "read", {"name": "s"})
    engine.start("other", "read", {"name": "in"})
    source.pump(5)
    assert engine.queries["other"] is None
    assert engine.queries["q"]
    engine.checkpoint()
    engine, _ = engine_with(("s", stage, options), store=FailingStore(store.content()))
    engine.start("later", "read", {"name": "s"})
    engine.run_due()
    assert engine.queries["later"]
    engine.unload()


def test_on_error_stop_engine_stops_engine_and_value_is_sent_again() -> None:
    stage, store = IN.pipe(ops.map(lambda n: 1 // (n - 2))), FailingStore()
    engine, source = engine_with(("s", stage, {"on_error": "stop-engine"}), store=store)
    engine.start("q", "read", {"name": "s"}, sink="out")
    with pytest.raises(EngineStopped, match="stage@s"):
        source.pump(5)
    engine.unload()
    engine, source = engine_with(("s", IN.pipe(ops.map(abs)), {}), store=FailingStore(store.content()))
    source.pump(3)
    assert sent(engine) == ["0", "1", "2"]
    engine.unload()


def test_on_error_retry_calls_key_function_of_stage_again() -> None:
    failures = [ValueError("once"), KeyError("twice")]

    def flaky(value: int) -> int:
        if failures:
            raise failures.pop()
        return value

    engine, source = engine_with(("s", IN.pipe(ops.map(abs)), {"key_of": flaky, "on_error": "retry"}))
    engine.start("q", "key", {"name": "s", "key": 0}, sink="out")
    source.pump(2)
    assert sent(engine) == ["0"]
    assert engine.dead_letters == []
    engine.unload()


def test_recovery_rejects_missing_or_changed_stage_without_mitigation() -> None:
    store = FailingStore()
    engine, source = engine_with(("s", IN.pipe(ops.scan(lambda a, b: a + b, 0)), {}), store=store)
    source.pump(4)
    engine.checkpoint()

    def again() -> FailingStore:
        return FailingStore(store.content())

    with pytest.raises(NoSuchQuery, match="stage was not added"):
        engine_with(store=again())
    with pytest.raises(StateMismatch):
        engine_with(("s", IN.pipe(ops.take(3)), {}), store=again())
    removed = FailingStore(store.content())
    engine, _ = engine_with(store=removed, on_load_failed=lambda *_: Mitigation.REMOVE)
    engine.checkpoint()
    engine_with(store=FailingStore(removed.content()))[0].unload()
    ignored = FailingStore(store.content())
    engine_with(store=ignored, on_load_failed=lambda *_: Mitigation.IGNORE)[0].checkpoint(CheckpointKind.FULL)
    engine_with(("s", IN.pipe(ops.scan(lambda a, b: a + b, 0)), {}), store=FailingStore(ignored.content()))
    engine, source = engine_with(
        ("s", IN.pipe(ops.take(3)), {}), store=again(), on_load_failed=lambda *_: Mitigation.REGENERATE
    )
    engine.start("q", "read", {"name": "s"}, sink="out")
    source.pump(6)
    assert sent(engine) == ["4", "5"]
    engine.unload()


def test_invalid_stages_and_stage_keys_are_rejected() -> None:
    late = IN.pipe(ops.flat_map(lambda _: Source("s")))
    with pytest.raises(NoSuchQuery):
        engine_with(("s", Source("s"), {}))
    with pytest.raises(QueryExists):
        engine_with(("in", IN, {}))
    with pytest.raises(QueryExists):
        engine_with(("s", IN, {}), ("s", lambda: IN, {}))
    with pytest.raises(TypeError, match="must be an Observable"):
        engine_with(("s", lambda: 3, {}))
    engine, source = engine_with(
        ("s", late, {"on_error": "stop"}), ("w", IN.pipe(ops.window_with_count(2)), {})
    )
    with pytest.raises(WrongState, match="too late"):
        engine.add_stage("later", IN)
    with pytest.raises(NoSuchQuery, match="no keys"):
        engine.start("q", "key", {"name": "s", "key": 1})
    for name in ("s", "w"):
        engine.start(name, "read", {"name": name})
    source.pump(1)
    assert "reads itself" in (engine.queries["s"] or "")
    assert "window or group" in (engine.queries["w"] or "")
    engine.unload()
    with pytest.raises(TypeError):
        Source("s", key=[])
    assert issubclass(InvalidKey, TypeError)


def test_keyed_queries_start_and_stop_without_leftover_routes() -> None:
    engine, source = engine_with(("s", lambda: IN.pipe(ops.map(abs)), {"key_of": lambda n: n % 5}))
    for number in range(5):
        engine.start(f"q{number}", "key", {"name": "s", "key": number}, sink="out")
    source.pump(7)
    engine.stop_many(["q1", "q2"])
    source.pump(12)
    engine.start("q1", "key", {"name": "s", "key": 1}, sink="out")
    source.pump(17)
    assert sent(engine) == [str(n) for n in range(17) if n < 7 or n % 5 not in (1, 2) or n == 16]
    engine.stop_many(["q0", "q1", "q3", "q4"])
    assert engine._runtime.feed("s")._routes == {}  # type: ignore[attr-defined]
    engine.unload()


def test_query_changing_stage_value_fails_with_value_changed() -> None:
    factories = Factories()
    factories.add("change", lambda: Source("s").pipe(ops.map(lambda v: v.append(1))))
    engine, source = QueryEngine(FailingStore(), factories, check_values=True), Numbers()
    engine.add_source("in", source)
    engine.add_stage("s", IN.pipe(ops.map(lambda n: [n])))
    engine.recover()
    engine.start("q", "change", {}, on_error="stop")
    source.pump(2)
    assert "ValueChanged" in (engine.queries["q"] or "")
    engine.unload()

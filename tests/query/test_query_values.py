"""Detection of queries and sources that change shared values, in check_laws and in engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import reactivex
from query_engines import Sink
from reactivex.subject import Subject

from rt.objects import MemoryStore
from rt.query import RESUME, Factories, Observable, Operator, QueryEngine, Source, ValueChanged, applied
from rt.query import operators as ops
from rt.query.mutation_check import REMEMBERED, MutationCheck
from rt.query.rx import RxSource
from rt.testing.queries import check_laws, hot


@dataclass
class Click:
    page: str
    tags: list[str] = field(default_factory=list)


class Visit(msgspec.Struct):
    page: str


class Record(msgspec.Struct, frozen=True):
    page: str
    tags: list[str] | None = None


@dataclass(frozen=True)
class FrozenClick:
    page: str


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Later(Operator[Any, Any]):
    """Emits a list. At the next value it changes that list and emits nothing."""

    __slots__ = ("_last",)
    NAME = "later"

    def __init__(self) -> None:
        self._last: list[int] = []

    def on_next(self, value: Any, /) -> None:
        if self._last:
            self._last.append(value)
        else:
            self._last = [value]
            self.emit(self._last)


def appended(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def put(key: Any, value: Any) -> Callable[[dict[Any, Any]], dict[Any, Any]]:
    def change(values: dict[Any, Any]) -> dict[Any, Any]:
        values[key] = value
        return values

    return change


CHANGES: dict[str, tuple[Observable[Any], str]] = {
    "scan": (Source("in").pipe(ops.scan(appended, [])), "operator 0 (scan) of query 'query'"),
    "map": (
        Source("in").pipe(ops.map(lambda x: {"x": x}), ops.map(put("y", 1)), ops.where(bool)),
        "operator 1 (map) of query 'query'",
    ),
    "do_action": (
        Source("in").pipe(ops.buffer_with_count(2), ops.do_action(list.clear)),
        "operator 0 (do_action) of query 'query'",
    ),
    "later": (
        Source("in").pipe(applied(Later), ops.map(tuple)),
        "operator 1 (later) of query 'query'",
    ),
    "inner": (
        Source("in").pipe(
            ops.group_by(lambda x: 0), ops.flat_map(lambda group: group.pipe(ops.scan(appended, [])))
        ),
        "operator 0 (scan) of query 'query/0.0'",
    ),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_check_laws_names_operator_changing_shared_value(name: str) -> None:
    query, culprit = CHANGES[name]
    with pytest.raises(AssertionError) as raised:
        check_laws(query, {"in": hot("abcdef|")})
    assert f"(at {culprit})" in str(raised.value)
    assert "Values are shared" in str(raised.value)


def test_check_laws_accepts_queries_creating_new_values() -> None:
    query = Source("in").pipe(ops.scan(lambda values, value: [*values, value], []), ops.map(len))
    assert [each.value for each in check_laws(query, {"in": hot("abc")})] == [1, 2, 3]


SEED: list[int] = []

factories = Factories()
factories.add("passed", lambda: Source("in").pipe(ops.map(lambda x: x)))
factories.add("changed", lambda: Source("in").pipe(ops.map(put("changed", True))))


def engine_of(*, check_values: bool) -> tuple[QueryEngine, RxSource, Sink, Any]:
    subject, sink = Subject[Any](), Sink()
    source = RxSource(subject)
    engine = QueryEngine(MemoryStore(), factories, check_values=check_values)
    engine.add_source("in", source)
    output = engine.add_sink("out", release="now")
    engine.recover()
    output.subscribe(sink).start(RESUME)
    return engine, source, sink, subject


def test_query_changing_shared_value_fails_only_with_check_values() -> None:
    for check_values in (True, False):
        engine, source, sink, subject = engine_of(check_values=check_values)
        engine.start("bad", "changed")
        engine.start("good", "passed", sink="out")
        subject.on_next({"x": 1})
        source.pump()
        engine.deliver()
        assert len(sink.values) == 1
        error = engine.queries["bad"]
        if check_values:
            assert error is not None
            assert error.startswith("ValueChanged: a value of operator 1 (source) of query 'bad' was changed")
            assert "at operator 0 (map) of query 'bad'" in error
            assert "got {'x': 1, 'changed': True}, expected {'x': 1}" in error
        else:
            assert error is None
        assert engine.queries["good"] is None
        engine.unload()


def test_source_resending_changed_list_is_detected() -> None:
    engine, source, _, subject = engine_of(check_values=True)
    engine.start("good", "passed")
    values = [1]
    subject.on_next(values)
    source.pump()
    values.append(2)
    subject.on_next(values)
    source.pump()
    assert "at operator 1 (source) of query 'good'" in (engine.queries["good"] or "")
    engine.unload()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ([1], lambda v: v.__setitem__(0, True)),
        (([1], 2), lambda v: v[0].append(2)),
        ({"a": 1}, lambda v: v.update(a=1.0)),
        ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
        ({1}, lambda v: v.add(2)),
        (deque([1]), lambda v: v.append(2)),
        (bytearray(b"a"), lambda v: v.append(1)),
        (Click("/"), lambda v: setattr(v, "page", "/buy")),
        (Click("/"), lambda v: v.tags.append("new")),
        (Visit("/"), lambda v: setattr(v, "page", "/buy")),
        (Record("/", []), lambda v: v.tags.append("new")),
        (Slotted(), lambda v: setattr(v, "count", 1)),
    ],
)
def test_mutation_check_detects_every_kind_of_change(value: Any, change: Callable[[Any], object]) -> None:
    check = MutationCheck()
    check.remember(value, "one")
    check.check("other")
    change(value)
    with pytest.raises(ValueChanged, match="a value of one was changed"):
        check.check("other")
    check.check("other")
    assert len(check.found) == 1


def test_mutation_check_detects_only_real_changes_of_cyclic_and_nan_values() -> None:
    check = MutationCheck()
    cycle: list[Any] = [float("nan"), object(), Source("in")]
    cycle.append(cycle)
    check.remember(cycle, "one")
    check.check("other")
    cycle.append(1)
    with pytest.raises(ValueChanged):
        check.check("other")


@pytest.mark.parametrize("value", [Record("/"), FrozenClick("/"), (1, "a"), 1.5, None])
def test_mutation_check_does_not_remember_immutable_values(value: Any) -> None:
    check = MutationCheck()
    check.remember(value, "one")
    assert not check._emitted


def test_mutation_check_remembers_only_last_values() -> None:
    check = MutationCheck()
    first = [0]
    check.remember(first, "one")
    for number in range(REMEMBERED):
        check.remember([number], "one")
        check.remember(number, "one")
    first.append(1)
    check.check("other")
    assert len(check._emitted) == REMEMBERED


def test_scan_seed_is_not_shared_between_subscriptions() -> None:
    made = Factories()
    made.add("listed", lambda: Source("in").pipe(ops.scan(appended, SEED), ops.map(tuple)))
    made.add("argument", lambda seed: Source("in").pipe(ops.scan(appended, seed), ops.map(tuple)))
    arguments: dict[str, Any] = {"seed": []}
    for factory, given in (("listed", {}), ("argument", arguments)):
        engine, sink = QueryEngine(MemoryStore(), made), Sink()
        source = RxSource(reactivex.of(1, 2))
        engine.add_source("in", source)
        output = engine.add_sink("out", release="now")
        engine.recover()
        output.subscribe(sink).start(RESUME)
        for query_id in "ab":
            engine.start(query_id, factory, given, sink="out")
        source.pump()
        engine.deliver()
        assert sink.values == [(1,), (1,), (1, 2), (1, 2)]
        engine.unload()
    assert (SEED, arguments) == ([], {"seed": []})

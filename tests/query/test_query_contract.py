"""Contract of operators: saved state, versions, and a test kit that finds violations."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.errors import InvalidOption, UnknownVersion
from rt.objects import CheckpointKind, MemoryStore
from rt.query.core.errors import StateMismatch
from rt.query.core.observable import Observable, applied
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.operators import buffer_with_count, buffer_with_time_or_count, take, where
from rt.query.operators.elements.take_skip import Take
from rt.testing.queries import MarbleError, MarbleEvent, check_laws, hot

IN = Source("in")


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12),
    count=st.integers(1, 4),
    skip=st.integers(1, 4),
    span=st.integers(1, 4),
)
def test_operator_chain_passes_law_checks_on_any_input(
    steps: list[tuple[int, int]], count: int, skip: int, span: int
) -> None:
    at, events = 0.0, []
    for wait, value in steps:
        at += wait
        events.append(MarbleEvent(at, "next", value))
    events.append(MarbleEvent(at + 1, "completed"))
    query = IN.pipe(
        where(lambda x: x != 5), buffer_with_count(count, skip), buffer_with_time_or_count(span, 3), take(5)
    )
    check_laws(query, {"in": events})


def _saved(query: Observable[Any]) -> MemoryStore:
    store, runtime = MemoryStore(), QueryRuntime(VirtualScheduler())
    runtime.add_feed("in")
    runtime.load(store.reader())
    root = runtime.roots["q"] = OperatorGroup(runtime, "q")
    root.build(query, _NullObserver())
    root.open()
    root.start()
    writer = store.begin(CheckpointKind.FULL)
    runtime.save(writer)
    writer.commit()
    return store


def _load(query: Observable[Any], store: MemoryStore) -> None:
    runtime = QueryRuntime(VirtualScheduler())
    runtime.add_feed("in")
    runtime.load(store.reader())
    root = OperatorGroup(runtime, "q")
    root.build(query, _NullObserver())
    root.load(runtime.pop_stored("q"))


class _NullObserver:
    def on_next(self, value: object, /) -> None: ...
    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


def test_load_of_state_of_other_operators_raises_state_mismatch() -> None:
    store = _saved(IN.pipe(take(3)))
    with pytest.raises(StateMismatch, match="another operator"):
        _load(IN.pipe(where(bool)), store)
    with pytest.raises(StateMismatch, match="wrong number"):
        _load(IN.pipe(take(3), where(bool)), store)


def test_load_of_state_of_newer_operator_raises_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Take, "VERSION", 2)
    store = _saved(IN.pipe(take(3)))
    monkeypatch.undo()
    with pytest.raises(UnknownVersion, match="newer operator take"):
        _load(IN.pipe(take(3)), store)


def test_transitioning_operator_loads_despite_state_of_another_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _saved(IN.pipe(where(bool)))
    monkeypatch.setattr(Take, "IS_TRANSITIONING", True)
    _load(IN.pipe(take(3)), store)


def test_source_error_is_sent_once_and_ends_query() -> None:
    output = check_laws(IN.pipe(buffer_with_count(2)), {"in": hot("1#2|")})
    assert [type(event.value) for event in output] == [MarbleError]


class Flawed(Take[int]):
    """Takes three, with a flaw that the kit must find."""

    __slots__ = ("_flaw",)

    def __init__(self, flaw: str) -> None:
        super().__init__(3)
        self._flaw = flaw

    def on_next(self, value: int, /) -> None:
        if self._flaw == "objects left":
            self._group.runtime.space.get_or_create_value("query#left", 0).value = value
        if self._flaw == "chance":
            value = next(CHANCE)
        super().on_next(value)

    def changed(self) -> None:
        if self._flaw != "unmarked changes":
            super().changed()

    def load_state(self, state: Any, version: int, /) -> None:
        if self._flaw != "forgotten state":
            super().load_state(state, version)


CHANCE = count()


@pytest.mark.parametrize("flaw", ["none", "objects left", "chance", "unmarked changes", "forgotten state"])
def test_test_kit_detects_planted_flaw(flaw: str) -> None:
    query = IN.pipe(applied(Flawed, flaw))
    if flaw == "none":
        check_laws(query, {"in": hot("12345|")})
        return
    with pytest.raises(AssertionError):
        check_laws(query, {"in": hot("12345|")})


@pytest.mark.parametrize("marbles", ["-(ab)-|", "a^b", "a.b|", "é|"])
def test_invalid_marble_characters_raise_invalid_option(marbles: str) -> None:
    with pytest.raises(InvalidOption, match="not marbles"):
        hot(marbles)

"""The contract of operators, on its three models: where, take and buffers."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.errors import UnknownVersion
from rt.objects import CheckpointKind, MemoryStore
from rt.query.core.errors import StateMismatch
from rt.query.core.observable import Observable, Transform, applied
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.operators import buffer_with_count, buffer_with_time_or_count, take, where
from rt.query.operators.filter import Take
from rt.testing.queries import MarbleError, MarbleEvent, check_laws, cold, hot, rows_written

IN = Source("in")


def outcome(events: list[MarbleEvent]) -> str:
    """Values and the end, without times."""
    marks = {"completed": "|", "error": "#"}
    return " ".join(marks.get(event.kind) or str(event.value) for event in events)


@pytest.mark.parametrize(
    ("marbles", "transforms", "wanted"),
    [
        ("1234|", [where(lambda x: x % 2)], "1 3 |"),
        ("1234", [where(lambda x: 12 // (3 - x))], "1 2 #"),
        ("1234|", [take(2)], "1 2 |"),
        ("1|", [take(2)], "1 |"),
        ("1234|", [take(0)], "|"),
        ("12#", [take(3)], "1 2 #"),
        ("1234567|", [buffer_with_count(3)], "[1, 2, 3] [4, 5, 6] [7] |"),
        ("1234|", [buffer_with_count(3, 1)], "[1, 2, 3] [2, 3, 4] [3, 4] [4] |"),
        ("1234567|", [buffer_with_count(2, 3)], "[1, 2] [4, 5] [7] |"),
        ("12#", [buffer_with_count(3)], "#"),
        ("12345|", [buffer_with_count(2), take(1)], "[1, 2] |"),
        ("-1-23---4|", [buffer_with_time_or_count(2.5, None)], "[1] [2, 3] [] [4] |"),
        ("-123--4|", [buffer_with_time_or_count(2.5, 2)], "[1, 2] [3] [4] [] |"),
        ("1-2-3-4-5|", [where(lambda x: x != 2), buffer_with_count(2), take(3)], "[1, 3] [4, 5] |"),
    ],
)
def test_an_operator_emits_what_it_says_whatever_happens_to_it(
    marbles: str, transforms: list[Transform], wanted: str
) -> None:
    for source, events in ((IN, {"in": hot(marbles)}), (cold(marbles), {})):
        query: Observable[Any] = source.pipe(*transforms)
        assert outcome(check_laws(query, events, until_s=20)) == wanted


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12),
    count=st.integers(1, 4),
    skip=st.integers(1, 4),
    span=st.integers(1, 4),
)
def test_the_models_keep_the_laws_on_any_input(
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


def test_a_checkpoint_of_a_long_buffer_costs_what_changed() -> None:
    events = [MarbleEvent(number, "next", number) for number in range(300)]
    assert rows_written(IN.pipe(buffer_with_count(1000)), {"in": events}, last=5) <= 6


def _saved(query: Observable[Any]) -> MemoryStore:
    store, runtime = MemoryStore(), QueryRuntime(VirtualScheduler())
    runtime.add_feed("in")
    runtime.load(store.reader())
    root = runtime.roots["q"] = OperatorGroup(runtime, "q")
    root.build(query, _Nobody())
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
    root.build(query, _Nobody())
    root.load(runtime.pop_stored("q"))


class _Nobody:
    def on_next(self, value: object, /) -> None: ...
    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


def test_state_of_other_operators_is_refused() -> None:
    store = _saved(IN.pipe(take(3)))
    with pytest.raises(StateMismatch, match="another operator"):
        _load(IN.pipe(where(bool)), store)
    with pytest.raises(StateMismatch, match="wrong number"):
        _load(IN.pipe(take(3), where(bool)), store)


def test_state_of_a_newer_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Take, "VERSION", 2)
    store = _saved(IN.pipe(take(3)))
    monkeypatch.undo()
    with pytest.raises(UnknownVersion, match="newer operator take"):
        _load(IN.pipe(take(3)), store)


def test_an_operator_may_begin_anew_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _saved(IN.pipe(where(bool)))
    monkeypatch.setattr(Take, "IS_TRANSITIONING", True)
    _load(IN.pipe(take(3)), store)


def test_an_error_is_told_once_and_ends_it() -> None:
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
        if self._flaw != "untold changes":
            super().changed()

    def load_state(self, state: Any, version: int, /) -> None:
        if self._flaw != "forgotten state":
            super().load_state(state, version)


CHANCE = count()


@pytest.mark.parametrize("flaw", ["none", "objects left", "chance", "untold changes", "forgotten state"])
def test_the_kit_finds_flaws_that_are_planted(flaw: str) -> None:
    query = IN.pipe(applied(Flawed, flaw))
    if flaw == "none":
        check_laws(query, {"in": hot("12345|")})
        return
    with pytest.raises(AssertionError):
        check_laws(query, {"in": hot("12345|")})

"""Inner subscriptions, windows and groups: what operators of operators lean on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rt.query.core.errors import LateSubscription
from rt.query.core.observable import Applied, Observable, applied
from rt.query.core.operator import Operator
from rt.query.core.source import Source
from rt.query.core.subject import Subject
from rt.query.operators import buffer_with_count, take
from rt.testing.queries import MarbleEvent, check_laws, cold, hot, run

IN = Source("in")


class Flat(Operator[Any, Any]):
    """All that comes out of `of(value)`, for every value."""

    __slots__ = ("_ended", "_of")
    NAME = "flat"

    def __init__(self, of: Callable[[Any], Observable[Any]]) -> None:
        self._of = of
        self._ended = False

    def on_next(self, value: Any, /) -> None:
        self.open_child(str(self._children_made), value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return self._of(seed)

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        self._end()

    def on_completed(self) -> None:
        self._ended = True
        self.changed()
        self._end()

    def _end(self) -> None:
        if self._ended and not self.child_keys():
            self.complete()

    def save_state(self) -> bool:
        return self._ended

    def load_state(self, state: Any, version: int, /) -> None:
        self._ended = state


class Parity(Operator[int, Subject]):
    """A group of odd and one of even values."""

    __slots__ = ("_groups",)
    NAME = "parity"

    def __init__(self) -> None:
        self._groups: dict[int, Subject] = {}

    def on_next(self, value: int, /) -> None:
        odd = value % 2
        if odd not in self._groups:
            self._groups[odd] = self.make_inner(str(odd), odd)
            self.changed()
            self.hand_out(self._groups[odd])
        self._groups[odd].on_next(value)

    def on_completed(self) -> None:
        for group in self._groups.values():
            group.on_completed()
        self.complete()

    def save_state(self) -> list[int]:
        return list(self._groups)

    def load_state(self, state: Any, version: int, /) -> None:
        self._groups = {odd: self.make_inner(str(odd), odd) for odd in state}


def values(events: list[MarbleEvent]) -> list[Any]:
    return [event.value for event in events if event.kind == "next"]


def test_inner_subscriptions_go_on_after_a_recovery() -> None:
    spread = applied(Flat, lambda x: cold(f"-{x}-{x + 1}--{x + 2}|").pipe(take(2)))
    assert values(check_laws(IN.pipe(spread), {"in": hot("1--5-|")})) == [1, 2, 5, 6]


def test_inner_subscriptions_may_have_inner_subscriptions_of_their_own() -> None:
    nested = applied(Flat, lambda x: cold("--a-b|").pipe(applied(Flat, lambda y: cold(f"-{x}|"))))
    assert values(check_laws(IN.pipe(nested), {"in": hot("12|")})) == [1, 2, 1, 2]


def test_groups_go_on_after_a_recovery() -> None:
    query = IN.pipe(applied(Parity), applied(Flat, lambda group: group.pipe(buffer_with_count(2))))
    output = check_laws(query, {"in": hot("1-2-3-4-5-7-8|")})
    assert values(output) == [[1, 3], [2, 4], [5, 7], [8]]


def test_an_inner_that_fails_ends_the_query() -> None:
    output = check_laws(IN.pipe(applied(Flat, lambda x: cold("-#"))), {"in": hot("1|")})
    assert [event.kind for event in output] == ["error"]


class Late(Flat):
    """Subscribes to a group at the value behind it."""

    __slots__ = ("_before",)
    NAME = "late"

    def on_next(self, value: Any, /) -> None:
        if hasattr(self, "_before"):
            self.open_child("late", self._before)
        self._before = value


def test_a_late_subscription_to_a_group_is_refused() -> None:
    output = run(IN.pipe(applied(Parity), applied(Late, lambda group: group)), {"in": hot("12|")})
    assert [type(event.value) for event in output] == [LateSubscription]


class Two(Operator[Any, Any]):
    """Two sources, as one."""

    __slots__ = ()
    NAME = "two"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit((key, value))

    def on_inner_completed(self, key: str, /) -> None:
        if not self.has_open_input():
            self.complete()


def test_an_operator_may_have_several_sources() -> None:
    query = Applied(Two, (IN.pipe(take(2)), cold("--x|")))
    output = check_laws(query, {"in": hot("1-2|")})
    assert sorted(values(output)) == [("0", 1), ("0", 2), ("1", "x")]
    assert output[-1].kind == "completed"

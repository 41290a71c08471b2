"""Operators that emit one bool."""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.core.errors import LimitExceeded
from rt.query.core.observable import Applied, Observable, Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.elements.aggregate import LIMIT
from rt.query.operators.elements.filter import complete_with, only
from rt.query.operators.user_functions import FAILED, UserFunctionOperator, check_least, sources_of

Comparer = Callable[[Any, Any], object]


def some(predicate: Callable[[Any], object] | None = None) -> Transform:
    """True at the first value for which `predicate` is true; False at the end. Saves nothing."""
    return only(predicate, applied(Quantifier, True))


def all(predicate: Callable[[Any], object]) -> Transform:
    """False at the first value for which `predicate` is false; True at the end. Saves nothing."""
    return only(lambda value: not predicate(value), applied(Quantifier, False))


def contains(value: Any, comparer: Comparer = eq) -> Transform:
    """True at the first value equal to `value`; False at the end. Saves nothing."""
    return some(lambda each: comparer(each, value))


def is_empty() -> Transform:
    """False at the first value; True at the end. Saves nothing."""
    return applied(Quantifier, False)


def sequence_equal(second: Observable[Any], comparer: Comparer = eq, *, limit: int = LIMIT) -> Transform:
    """Whether the source and `second` have equal values in the same order and the same number.

    False as soon as they differ. `LimitExceeded` if one is more than `limit` values ahead of the other. Saves
    these values, in the object space.
    """
    sources_of("sequence_equal", (second,))
    check_least("sequence_equal", "limit", limit, 0)
    return lambda source: Applied(lambda: SequenceEqual(comparer, limit), (source, second))


class Quantifier(Operator[Any, bool]):
    """Emits `at_value` at the first value, the opposite at the end."""

    __slots__ = ("_at_value",)
    NAME = "quantifier"

    def __init__(self, at_value: bool) -> None:
        self._at_value: Final = at_value

    def on_next(self, value: Any, /) -> None:
        complete_with(self, self._at_value)

    def on_completed(self) -> None:
        complete_with(self, not self._at_value)


class SequenceEqual(UserFunctionOperator[Any, bool]):
    """At most one of the queues has values."""

    __slots__ = ("_comparer", "_limit", "_waiting")
    NAME = "sequence_equal"

    def __init__(self, comparer: Comparer, limit: int) -> None:
        self._comparer: Final = comparer
        self._limit: Final = limit
        self._waiting: tuple[PersistedQueue[Any], PersistedQueue[Any]]

    def on_open(self) -> None:
        self._waiting = self.objects.queue("0"), self.objects.queue("1")

    def on_inner_next(self, key: str, value: Any, /) -> None:
        mine = int(key)
        other = self._waiting[1 - mine]
        if other:
            pair = (value, other.peek()) if mine == 0 else (other.peek(), value)
            is_equal = self.call(self._comparer, *pair)
            if not is_equal:
                complete_with(self, False)
            elif is_equal is not FAILED:
                other.dequeue()
        elif self.has_input_ended(1 - mine):
            complete_with(self, False)
        elif len(self._waiting[mine]) == self._limit:
            what = "one sequence is too far ahead of the other"
            self.fail(LimitExceeded(what, where=self.address, expected=f"{self._limit} values at most"))
        else:
            self._waiting[mine].enqueue(value)

    def on_inner_completed(self, key: str, /) -> None:
        other = 1 - int(key)
        if self._waiting[other]:
            complete_with(self, False)
        elif self.has_input_ended(other):
            complete_with(self, True)

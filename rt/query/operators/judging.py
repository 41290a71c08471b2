"""Operators that answer yes or no, once."""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.errors import LimitExceeded
from rt.query.observing import Applied, Observable, Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import Asking, sources_of
from rt.query.operators.collecting import LIMIT
from rt.query.operators.filtering import only

Comparer = Callable[[Any, Any], object]


def some(predicate: Callable[[Any], object] | None = None) -> Transform:
    """True at the first value for which `predicate` is true; False at the end. Saves nothing."""
    return only(predicate, applied(Answer, True))


def all(predicate: Callable[[Any], object]) -> Transform:
    """False at the first value for which `predicate` is false; True at the end. Saves nothing."""
    return only(lambda value: not predicate(value), applied(Answer, False))


def contains(value: Any, comparer: Comparer = eq) -> Transform:
    """True at the first value that equals `value`; False at the end. Saves nothing."""
    return some(lambda each: comparer(each, value))


def is_empty() -> Transform:
    """False at the first value; True at the end. Saves nothing."""
    return applied(Answer, False)


def sequence_equal(second: Observable[Any], comparer: Comparer = eq, *, limit: int = LIMIT) -> Transform:
    """Whether this and `second` have equal values in the same order, and end alike; False as soon as not.

    `LimitExceeded` where one is more than `limit` values ahead of the other. Saves these values, in the
    object space.
    """
    sources_of("sequence_equal", (second,))
    if limit < 0:
        raise ValueError(f"sequence_equal(limit={limit})")
    return lambda source: Applied(lambda: SequenceEqual(comparer, limit), (source, second))


class Answer(Operator[Any, bool]):
    """`at_value` at the first value, the opposite at the end."""

    __slots__ = ("_at_value",)

    NAME = "answer"

    def __init__(self, at_value: bool) -> None:
        self._at_value: Final = at_value

    def on_next(self, value: Any, /) -> None:  # noqa: ARG002
        """One is enough."""
        self.emit(self._at_value)
        self.complete()

    def on_completed(self) -> None:
        """None came."""
        self.emit(not self._at_value)
        self.complete()


class SequenceEqual(Asking[Any, bool]):
    """See `sequence_equal`. At most one of the queues has values in it."""

    __slots__ = ("_comparer", "_limit", "_waiting")

    NAME = "sequence_equal"

    def __init__(self, comparer: Comparer, limit: int) -> None:
        self._comparer: Final = comparer
        self._limit: Final = limit
        self._waiting: tuple[PersistedQueue[Any], PersistedQueue[Any]]

    def on_open(self) -> None:
        """The queues."""
        self._waiting = self.objects.queue("0"), self.objects.queue("1")

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Compare it with the other's, or keep it until that comes."""
        mine = int(key)
        other = self._waiting[1 - mine]
        if other:
            pair = (value, other.dequeue()) if mine == 0 else (other.dequeue(), value)
            if not self.ask(self._comparer, *pair):  # FAILED is true
                self._answer(False)
        elif self.has_input_ended(1 - mine):
            self._answer(False)
        elif len(self._waiting[mine]) == self._limit:
            what = "one of two sequences is too far ahead of the other to compare them"
            self.fail(LimitExceeded(what, where=self.address, wanted=f"{self._limit} values at most"))
        else:
            self._waiting[mine].enqueue(value)

    def on_inner_completed(self, key: str, /) -> None:
        """What the other is ahead makes them differ."""
        other = 1 - int(key)
        if self._waiting[other]:
            self._answer(False)
        elif self.has_input_ended(other):
            self._answer(True)

    def _answer(self, answer: bool) -> None:
        self.emit(answer)
        self.complete()

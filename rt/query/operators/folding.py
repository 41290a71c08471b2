"""Operators that sum up: what they hold is one value, however many came."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from rt.query.errors import WrongCount
from rt.query.observing import Transform, applied
from rt.query.operators.asking import ABSENT, FAILED, Asking, compose, storable
from rt.query.operators.filtering import only
from rt.query.operators.mapping import map


def scan(accumulator: Callable[[Any, Any], Any], seed: Any = ABSENT) -> Transform:
    """`accumulator(so far, value)` for every value; `seed`, or else the first value, is what it begins with.

    Saves what there is so far, of what JSON gives back as it was.
    """
    return applied(Scan, accumulator, seed)


def reduce(accumulator: Callable[[Any, Any], Any], seed: Any = ABSENT) -> Transform:
    """At the end, what `scan` emits last; of none `seed`, else `WrongCount`. Saves what there is so far."""
    return applied(Reduce, accumulator, seed)


def count(predicate: Callable[[Any], object] | None = None) -> Transform:
    """At the end, of how many values `predicate` is true. Saves how many."""
    return only(predicate, reduce(_count, 0))


def sum(mapper: Callable[[Any], Any] | None = None) -> Transform:
    """At the end, the sum of what `mapper` makes of the values; 0 of none. Saves the sum."""
    return _mapped(mapper, reduce(_add, 0))


def average(mapper: Callable[[Any], Any] | None = None) -> Transform:
    """At the end, the mean of what `mapper` makes of them; `WrongCount` of none. Saves sum and count."""
    return _mapped(mapper, applied(Average))


def min(comparer: Callable[[Any, Any], Any] | None = None) -> Transform:
    """At the end, the least value, the first of several; `WrongCount` of none.

    `comparer(one, other)` is below 0 where one is less. Saves it.
    """
    return reduce(
        _less if comparer is None else lambda best, value: value if comparer(value, best) < 0 else best
    )


def max(comparer: Callable[[Any, Any], Any] | None = None) -> Transform:
    """At the end, the greatest value, the first of several; `WrongCount` of none. Saves it."""
    return reduce(
        _more if comparer is None else lambda best, value: value if comparer(value, best) > 0 else best
    )


class Scan(Asking[Any, Any]):
    """See `scan`."""

    __slots__ = ("_accumulator", "_is_begun", "_seed", "_so_far")

    NAME = "scan"

    def __init__(self, accumulator: Callable[[Any, Any], Any], seed: Any) -> None:
        self._accumulator: Final = accumulator
        self._seed: Final = seed
        self._is_begun = seed is not ABSENT
        self._so_far: Any = deepcopy(seed) if self._is_begun else None

    def on_next(self, value: Any, /) -> None:
        """Take it in."""
        if self.fold(value):
            self.emit(self._so_far)

    def fold(self, value: Any) -> bool:
        """Take it in; False if that failed."""
        if self._is_begun:
            value = self.ask(self._accumulator, self._so_far, value)
            if value is FAILED:
                return False
        self._so_far = storable(value)
        self._is_begun = True
        self.changed()
        return True

    def save_state(self) -> list[Any]:
        """What there is so far, if there is."""
        return [self._so_far] if self._is_begun else []

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._is_begun = bool(state)
        self._so_far = state[0] if state else None


class Reduce(Scan):
    """See `reduce`."""

    __slots__ = ()

    NAME = "reduce"

    def on_next(self, value: Any, /) -> None:
        """Take it in."""
        self.fold(value)

    def on_completed(self) -> None:
        """Tell."""
        if not self._is_begun:
            self.fail(
                WrongCount("nothing to make one of", where=self.address, got=0, wanted="1 or more values")
            )
            return
        self.emit(self._so_far)
        self.complete()


class Average(Asking[Any, Any]):
    """See `average`."""

    __slots__ = ("_count", "_sum")

    NAME = "average"

    def __init__(self) -> None:
        self._sum: Any = 0
        self._count = 0

    def on_next(self, value: Any, /) -> None:
        """Take it in."""
        total = self.ask(_add, self._sum, value)
        if total is not FAILED:
            self._sum = storable(total)
            self._count += 1
            self.changed()

    def on_completed(self) -> None:
        """Tell."""
        if self._count == 0:
            self.fail(
                WrongCount("the average of nothing", where=self.address, got=0, wanted="1 or more values")
            )
            return
        mean = self.ask(lambda: self._sum / self._count)
        if mean is not FAILED:
            self.emit(mean)
            self.complete()

    def save_state(self) -> list[Any]:
        """Sum and count."""
        return [self._sum, self._count]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._sum, self._count = state


def _mapped(mapper: Callable[[Any], Any] | None, transform: Transform) -> Transform:
    return transform if mapper is None else compose(map(mapper), transform)


def _count(so_far: int, value: Any) -> int:  # noqa: ARG001
    return so_far + 1


def _add(so_far: Any, value: Any) -> Any:
    return so_far + value


def _less(best: Any, value: Any) -> Any:
    return value if value < best else best  # noqa: FURB136 - min is another here


def _more(best: Any, value: Any) -> Any:
    return value if value > best else best  # noqa: FURB136

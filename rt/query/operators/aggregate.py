"""Operators that combine all values: into one value, or into a list at the end."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from rt.objects import PersistedList
from rt.query.core.errors import LimitExceeded, WrongCount
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.filter import only
from rt.query.operators.transform import map
from rt.query.operators.user_functions import ABSENT, FAILED, UserFunctionOperator, compose, storable


def scan(accumulator: Callable[[Any, Any], Any], seed: Any = ABSENT) -> Transform:
    """For every value `accumulator(result, value)`, with the result so far.

    The first result is `seed`, or the first value. Saves the result, which JSON must restore unchanged.
    """
    return applied(Scan, accumulator, seed)


def reduce(accumulator: Callable[[Any, Any], Any], seed: Any = ABSENT) -> Transform:
    """At the end, the last result of `scan`. Without values: `seed`, or `WrongCount`. Saves the result."""
    return applied(Reduce, accumulator, seed)


def count(predicate: Callable[[Any], object] | None = None) -> Transform:
    """At the end, the number of values for which `predicate` is true. Saves the number."""
    return only(predicate, reduce(_count, 0))


def sum(mapper: Callable[[Any], Any] | None = None) -> Transform:
    """At the end, the sum of `mapper(value)`; 0 without values. Saves the sum."""
    return _mapped(mapper, reduce(_add, 0))


def average(mapper: Callable[[Any], Any] | None = None) -> Transform:
    """At the end, the mean of `mapper(value)`; `WrongCount` without values. Saves sum and count."""
    return _mapped(mapper, applied(Average))


def min(comparer: Callable[[Any, Any], Any] | None = None) -> Transform:
    """At the end, the least value, the first of equal ones; `WrongCount` without values.

    `comparer(one, other)` is negative if one is less. Saves the least value.
    """
    return reduce(
        _less if comparer is None else lambda best, value: value if comparer(value, best) < 0 else best
    )


def max(comparer: Callable[[Any, Any], Any] | None = None) -> Transform:
    """At the end, the greatest value, the first of equal ones; `WrongCount` without values.

    Saves the greatest value.
    """
    return reduce(
        _more if comparer is None else lambda best, value: value if comparer(value, best) > 0 else best
    )


class Scan(UserFunctionOperator[Any, Any]):
    __slots__ = ("_accumulator", "_has_result", "_result", "_seed")

    NAME = "scan"

    def __init__(self, accumulator: Callable[[Any, Any], Any], seed: Any) -> None:
        self._accumulator: Final = accumulator
        self._seed: Final = seed
        self._has_result = seed is not ABSENT
        self._result: Any = deepcopy(seed) if self._has_result else None

    def on_next(self, value: Any, /) -> None:
        if self.fold(value):
            self.emit(self._result)

    def fold(self, value: Any) -> bool:
        """Add the value to the result. False if the accumulator failed."""
        if self._has_result:
            value = self.call(self._accumulator, self._result, value)
            if value is FAILED:
                return False
        self._result = storable(value)
        self._has_result = True
        self.changed()
        return True

    def save_state(self) -> list[Any]:
        return [self._result] if self._has_result else []

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._has_result = bool(state)
        self._result = state[0] if state else None


class Reduce(Scan):
    __slots__ = ()

    NAME = "reduce"

    def on_next(self, value: Any, /) -> None:
        self.fold(value)

    def on_completed(self) -> None:
        if not self._has_result:
            self.fail(
                WrongCount(
                    "reduce without values or seed", where=self.address, got=0, expected="1 or more values"
                )
            )
            return
        self.emit(self._result)
        self.complete()


class Average(UserFunctionOperator[Any, Any]):
    __slots__ = ("_count", "_sum")

    NAME = "average"

    def __init__(self) -> None:
        self._sum: Any = 0
        self._count = 0

    def on_next(self, value: Any, /) -> None:
        total = self.call(_add, self._sum, value)
        if total is not FAILED:
            self._sum = storable(total)
            self._count += 1
            self.changed()

    def on_completed(self) -> None:
        if self._count == 0:
            self.fail(
                WrongCount("average without values", where=self.address, got=0, expected="1 or more values")
            )
            return
        mean = self.call(lambda: self._sum / self._count)
        if mean is not FAILED:
            self.emit(mean)
            self.complete()

    def save_state(self) -> list[Any]:
        return [self._sum, self._count]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._sum, self._count = state


def _mapped(mapper: Callable[[Any], Any] | None, transform: Transform) -> Transform:
    return transform if mapper is None else compose(map(mapper), transform)


def _count(result: int, value: Any) -> int:  # noqa: ARG001
    return result + 1


def _add(result: Any, value: Any) -> Any:
    return result + value


def _less(best: Any, value: Any) -> Any:
    return value if value < best else best  # noqa: FURB136 - min is an operator here


def _more(best: Any, value: Any) -> Any:
    return value if value > best else best  # noqa: FURB136


LIMIT: Final = 1_000_000
"""Default number of values that an operator may hold until the end: some hundred MB."""


def to_list(*, limit: int = LIMIT) -> Transform:
    """At the end, the list of all values. More than `limit` values: `LimitExceeded`.

    Saves the list, in the object space.
    """
    if limit < 0:
        raise ValueError(f"to_list: limit must be 0 or more, got {limit}")
    return applied(ToList, limit)


class ToList(Operator[Any, list[Any]]):
    __slots__ = ("_limit", "_values")

    NAME = "to_list"

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit
        self._values: PersistedList[Any]

    def on_open(self) -> None:
        self._values = self.objects.list("values")

    def on_next(self, value: Any, /) -> None:
        if len(self._values) >= self._limit:
            what = "to_list has too many values"
            hint = "Pass a higher limit, or use buffers."
            self.fail(LimitExceeded(what, where=self.address, expected=self._limit, hint=hint))
            return
        self._values.append(value)

    def on_completed(self) -> None:
        self.emit(list(self._values))
        self.complete()

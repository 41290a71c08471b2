"""Operators that combine all values: into one value, or into a list at the end."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from copy import deepcopy
from operator import add, truediv
from typing import Any, Final

from rt.objects import PersistedList
from rt.query.core.errors import LimitExceeded
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.elements.filter import complete_with, only
from rt.query.operators.elements.transform import map
from rt.query.operators.user_functions import (
    ABSENT,
    FAILED,
    UserFunctionOperator,
    check_least,
    compose,
    storable,
)

LIMIT: Final = 1_000_000
"""Default number of values that an operator may hold until the end: some hundred MB."""


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
    return only(predicate, reduce(lambda total, _: total + 1, 0))


def sum(mapper: Callable[[Any], Any] | None = None) -> Transform:
    """At the end, the sum of `mapper(value)`; 0 without values. Saves the sum."""
    return _mapped(mapper, reduce(add, 0))


def average(mapper: Callable[[Any], Any] | None = None) -> Transform:
    """At the end, the mean of `mapper(value)`; `WrongCount` without values. Saves sum and count."""
    return _mapped(mapper, applied(Average))


def min(comparer: Callable[[Any, Any], Any] | None = None) -> Transform:
    """At the end, the least value, the first of equal ones; `WrongCount` without values.

    `comparer(one, other)` is negative if one is less. Saves the least value.
    """
    if comparer is None:
        return reduce(builtins.min)
    return reduce(lambda best, value: value if comparer(value, best) < 0 else best)


def max(comparer: Callable[[Any, Any], Any] | None = None) -> Transform:
    """At the end, the greatest value, the first of equal ones; `WrongCount` without values.

    Saves the greatest value.
    """
    if comparer is None:
        return reduce(builtins.max)
    return reduce(lambda best, value: value if comparer(value, best) > 0 else best)


def to_list(*, limit: int = LIMIT) -> Transform:
    """At the end, the list of all values. More than `limit` values: `LimitExceeded`.

    Saves the list, in the object space.
    """
    check_least("to_list", "limit", limit, 0)
    return applied(ToList, limit)


class Scan(UserFunctionOperator[Any, Any]):
    """`_result` holds the result so far, or nothing."""

    __slots__ = ("_accumulator", "_result")
    NAME = "scan"
    SAVED = "_result"

    def __init__(self, accumulator: Callable[[Any, Any], Any], seed: Any) -> None:
        self._accumulator: Final = accumulator
        self._result: list[Any] = [] if seed is ABSENT else [deepcopy(seed)]

    def on_next(self, value: Any, /) -> None:
        if self.fold(value):
            self.emit(self._result[0])

    def fold(self, value: Any) -> bool:
        """Add the value to the result. False if the accumulator failed."""
        if self._result:
            value = self.call(self._accumulator, self._result[0], value)
            if value is FAILED:
                return False
        self._result = [storable(value)]
        self.changed()
        return True


class Reduce(Scan):
    __slots__ = ()
    NAME = "reduce"

    def on_next(self, value: Any, /) -> None:
        self.fold(value)

    def on_completed(self) -> None:
        complete_with(self, self._result[0] if self._result else ABSENT)


class Average(UserFunctionOperator[Any, Any]):
    __slots__ = ("_count", "_sum")
    NAME = "average"
    SAVED = ("_sum", "_count")

    def __init__(self) -> None:
        self._sum: Any = 0
        self._count = 0

    def on_next(self, value: Any, /) -> None:
        total = self.call(add, self._sum, value)
        if total is not FAILED:
            self._sum = storable(total)
            self._count += 1
            self.changed()

    def on_completed(self) -> None:
        mean = self.call(truediv, self._sum, self._count) if self._count else ABSENT
        if mean is not FAILED:
            complete_with(self, mean)


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
        complete_with(self, list(self._values))


def _mapped(mapper: Callable[[Any], Any] | None, transform: Transform) -> Transform:
    return transform if mapper is None else compose(map(mapper), transform)

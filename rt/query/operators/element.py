"""Operators that emit one of the values.

Without such a value they fail with `WrongCount`; those with `…_or_default` emit their default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.query.core.errors import WrongCount
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.filter import only
from rt.query.operators.user_functions import ABSENT, storable

Predicate = Callable[[Any], object]


def first(predicate: Predicate | None = None) -> Transform:
    """The first value for which `predicate` is true; then completes. Saves nothing."""
    return only(predicate, applied(ElementAt, 0, ABSENT))


def first_or_default(predicate: Predicate | None = None, default_value: Any = None) -> Transform:
    """As `first`, or the default. Saves nothing."""
    return only(predicate, applied(ElementAt, 0, default_value))


def last(predicate: Predicate | None = None) -> Transform:
    """At the end, the last value for which `predicate` is true. Saves the last value so far."""
    return only(predicate, applied(Last, ABSENT))


def last_or_default(default_value: Any = None, predicate: Predicate | None = None) -> Transform:
    """As `last`, or the default. Saves the last value so far."""
    return only(predicate, applied(Last, default_value))


def single(predicate: Predicate | None = None) -> Transform:
    """At the end, the only value for which `predicate` is true; `WrongCount` at a second. Saves the value."""
    return only(predicate, applied(Single, ABSENT))


def single_or_default(predicate: Predicate | None = None, default_value: Any = None) -> Transform:
    """As `single`, or the default. Saves the value."""
    return only(predicate, applied(Single, default_value))


def element_at(index: int) -> Transform:
    """The value at `index`, from 0; then completes. Saves the number of values before it."""
    return element_at_or_default(index, ABSENT)


def element_at_or_default(index: int, default_value: Any = None) -> Transform:
    """As `element_at`, or the default. Saves the number of values before it."""
    if index < 0:
        raise ValueError(f"element_at: index must be 0 or more, got {index}")
    return applied(ElementAt, index, default_value)


class ElementAt(Operator[Any, Any]):
    __slots__ = ("_at", "_default", "_left")

    NAME = "element_at"

    def __init__(self, index: int, default: Any) -> None:
        self._at: Final = index
        self._default: Final = default
        self._left = index

    def on_next(self, value: Any, /) -> None:
        if self._left:
            self._left -= 1
            self.changed()
            return
        self.emit(value)
        self.complete()

    def on_completed(self) -> None:
        _end(self, self._default, self._at - self._left, f"{self._at + 1} or more values")

    def save_state(self) -> int:
        return self._left

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._left = state


class Last(Operator[Any, Any]):
    __slots__ = ("_default", "_last")

    NAME = "last"

    def __init__(self, default: Any) -> None:
        self._default: Final = default
        self._last: Any = ABSENT

    def on_next(self, value: Any, /) -> None:
        self._last = storable(value)
        self.changed()

    def on_completed(self) -> None:
        _end(self, self._default if self._last is ABSENT else self._last, 0, "1 or more values")

    def save_state(self) -> list[Any]:
        return [] if self._last is ABSENT else [self._last]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._last = state[0] if state else ABSENT


class Single(Last):
    __slots__ = ()

    NAME = "single"

    def on_next(self, value: Any, /) -> None:
        if self._last is not ABSENT:
            self.fail(WrongCount("too many values", where=self.address, got="2 or more", expected=1))
            return
        super().on_next(value)


def _end(operator: Operator[Any, Any], value: Any, got: int, expected: str) -> None:
    if value is ABSENT:
        operator.fail(WrongCount("not enough values", where=operator.address, got=got, expected=expected))
        return
    operator.emit(value)
    operator.complete()

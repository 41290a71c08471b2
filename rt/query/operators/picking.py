"""Operators that emit one of the values.

Those with `…_or_default` emit their default where the others fail with `WrongCount`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.query.errors import WrongCount
from rt.query.observing import Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import ABSENT, storable
from rt.query.operators.filtering import only

Predicate = Callable[[Any], object]


def first(predicate: Predicate | None = None) -> Transform:
    """The first value for which `predicate` is true, and the end. Saves nothing."""
    return only(predicate, applied(ElementAt, 0, ABSENT))


def first_or_default(predicate: Predicate | None = None, default_value: Any = None) -> Transform:
    """As `first`; the default if there is none. Saves nothing."""
    return only(predicate, applied(ElementAt, 0, default_value))


def last(predicate: Predicate | None = None) -> Transform:
    """At the end, the last value for which `predicate` is true. Saves the last one so far."""
    return only(predicate, applied(Last, ABSENT))


def last_or_default(default_value: Any = None, predicate: Predicate | None = None) -> Transform:
    """As `last`; the default if there is none. Saves the last one so far."""
    return only(predicate, applied(Last, default_value))


def single(predicate: Predicate | None = None) -> Transform:
    """At the end, the only value for which `predicate` is true; `WrongCount` at a second. Saves it."""
    return only(predicate, applied(Single, ABSENT))


def single_or_default(predicate: Predicate | None = None, default_value: Any = None) -> Transform:
    """As `single`; the default if there is none. Saves it."""
    return only(predicate, applied(Single, default_value))


def element_at(index: int) -> Transform:
    """The value of that index, from 0, and the end. Saves how many come before it."""
    return element_at_or_default(index, ABSENT)


def element_at_or_default(index: int, default_value: Any = None) -> Transform:
    """As `element_at`; the default if there is none. Saves how many come before it."""
    if index < 0:
        raise ValueError(f"element_at({index})")
    return applied(ElementAt, index, default_value)


class ElementAt(Operator[Any, Any]):
    """See `element_at`."""

    __slots__ = ("_at", "_default", "_left")

    NAME = "element_at"

    def __init__(self, index: int, default: Any) -> None:
        self._at: Final = index
        self._default: Final = default
        self._left = index

    def on_next(self, value: Any, /) -> None:
        """This one, or a later one."""
        if self._left:
            self._left -= 1
            self.changed()
            return
        self.emit(value)
        self.complete()

    def on_completed(self) -> None:
        """There is none."""
        _end(self, self._default, self._at - self._left, f"{self._at + 1} or more values")

    def save_state(self) -> int:
        """How many come before it."""
        return self._left

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._left = state


class Last(Operator[Any, Any]):
    """See `last`."""

    __slots__ = ("_default", "_last")

    NAME = "last"

    def __init__(self, default: Any) -> None:
        self._default: Final = default
        self._last: Any = ABSENT

    def on_next(self, value: Any, /) -> None:
        """Perhaps the last."""
        self._last = storable(value)
        self.changed()

    def on_completed(self) -> None:
        """It was."""
        _end(self, self._default if self._last is ABSENT else self._last, 0, "1 or more values")

    def save_state(self) -> list[Any]:
        """The value, if there is one."""
        return [] if self._last is ABSENT else [self._last]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._last = state[0] if state else ABSENT


class Single(Last):
    """See `single`."""

    __slots__ = ()

    NAME = "single"

    def on_next(self, value: Any, /) -> None:
        """The only one, or one too many."""
        if self._last is not ABSENT:
            self.fail(WrongCount("more than one value", where=self.address, got=2, wanted=1))
            return
        super().on_next(value)


def _end(operator: Operator[Any, Any], value: Any, got: int, wanted: str) -> None:
    if value is ABSENT:
        operator.fail(WrongCount("not enough values", where=operator.address, got=got, wanted=wanted))
        return
    operator.emit(value)
    operator.complete()

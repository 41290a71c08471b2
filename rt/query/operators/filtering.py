"""Operators that let some values pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from rt.query.observing import Transform, applied
from rt.query.operator import Operator

A = TypeVar("A")


def where(predicate: Callable[[Any], object]) -> Transform:
    """The values for which `predicate` is true. Saves nothing."""
    return applied(Where, predicate)


def take(count: int) -> Transform:
    """The first `count` values; ends with the last of them, at once if it is 0. Saves how many are left."""
    if count < 0:
        raise ValueError(f"take({count})")
    return applied(Take, count)


class Where(Operator[A, A]):
    """See `where`."""

    __slots__ = ("_predicate",)

    NAME = "where"

    def __init__(self, predicate: Callable[[A], object]) -> None:
        self._predicate: Final = predicate

    def on_next(self, value: A, /) -> None:
        """Let it pass or not."""
        try:
            passes = self._predicate(value)
        except Exception as error:  # noqa: BLE001 - a function of the user's
            self.fail(error)
            return
        if passes:
            self.emit(value)


class Take(Operator[A, A]):
    """See `take`."""

    __slots__ = ("_left",)

    NAME = "take"

    def __init__(self, count: int) -> None:
        self._left = count

    def on_start(self) -> None:
        """With nothing to wait for, end as soon as time runs."""
        if self._left == 0:
            self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """See `on_start`."""
        self.complete()

    def on_next(self, value: A, /) -> None:
        """Count it, then send it on, so that a value which comes back from there finds it counted."""
        if self._left == 0:
            return
        self._left -= 1
        self.changed()
        is_last = self._left == 0
        self.emit(value)
        if is_last:
            self.complete()

    def save_state(self) -> int:
        """How many are left."""
        return self._left

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """How many were left."""
        self._left = state

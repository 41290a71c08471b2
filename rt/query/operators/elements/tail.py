"""Operators that hold the last values back."""

from __future__ import annotations

from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.user_functions import check_least


def take_last(count: int) -> Transform:
    """At the end, the last `count` values. Saves them, in the object space."""
    check_least("take_last", "count", count, 0)
    return applied(TakeLast, count)


def skip_last(count: int) -> Transform:
    """All values except the last `count`: each when `count` others followed it.

    Saves the last `count` values, in the object space.
    """
    check_least("skip_last", "count", count, 0)
    return applied(SkipLast, count)


class HeldBack(Operator[Any, Any]):
    """The queue has the last `count` values."""

    __slots__ = ("_count", "_values")

    def __init__(self, count: int) -> None:
        self._count: Final = count
        self._values: PersistedQueue[Any]

    def on_open(self) -> None:
        self._values = self.objects.queue("values")


class TakeLast(HeldBack):
    __slots__ = ()
    NAME = "take_last"

    def on_next(self, value: Any, /) -> None:
        if self._count:
            self._values.enqueue(value)
            if len(self._values) > self._count:
                self._values.dequeue()

    def on_completed(self) -> None:
        for value in list(self._values):
            self.emit(value)
        self.complete()


class SkipLast(HeldBack):
    __slots__ = ()
    NAME = "skip_last"

    def on_next(self, value: Any, /) -> None:
        if not self._count:
            self.emit(value)
            return
        self._values.enqueue(value)
        if len(self._values) > self._count:
            self.emit(self._values.dequeue())

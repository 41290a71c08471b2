"""Operators that let the first values pass, and then end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from rt.query.observing import Applied, Observable, Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import FAILED, Asking, check_time, sources_of, time_ns
from rt.query.scheduling import Duration, duration_ns


def take_while(predicate: Callable[[Any], object], inclusive: bool = False) -> Transform:
    """The values before the first for which `predicate` is false; with it, if `inclusive`. Saves nothing."""
    return applied(TakeWhile, predicate, inclusive)


def take_while_indexed(predicate: Callable[[Any, int], object], inclusive: bool = False) -> Transform:
    """As `take_while`, for `predicate(value, index)`. Saves the index."""
    return applied(TakeWhileIndexed, predicate, inclusive)


def take_until(other: Observable[Any]) -> Transform:
    """The values before the first of `other`. Saves nothing."""
    sources_of("take_until", (other,))
    return lambda source: Applied(TakeUntil, (source, other))


def take_with_time(duration: Duration) -> Transform:
    """The values that come in less than `duration` from the start. Saves when that is over."""
    duration_ns(duration)
    return applied(TakeWithTime, duration)


def take_until_with_time(end_time: Duration | datetime) -> Transform:
    """The values that come before a time, or a duration from the start. Saves when that is."""
    check_time("take_until_with_time", end_time)
    return applied(TakeWithTime, end_time)


class TakeWhile(Asking[Any, Any]):
    """See `take_while`."""

    __slots__ = ("_is_inclusive", "_predicate")

    NAME = "take_while"

    def __init__(self, predicate: Callable[..., object], inclusive: bool) -> None:
        self._predicate: Final = predicate
        self._is_inclusive: Final = inclusive

    def on_next(self, value: Any, /) -> None:
        """Let it pass, or end."""
        passes = self.passes(value)
        if passes is FAILED:
            return
        if passes or self._is_inclusive:
            self.emit(value)
        if not passes:
            self.complete()

    def passes(self, value: Any) -> Any:
        """What the predicate says."""
        return self.ask(self._predicate, value)


class TakeWhileIndexed(TakeWhile):
    """See `take_while_indexed`."""

    __slots__ = ("_next",)

    NAME = "take_while_indexed"

    def __init__(self, predicate: Callable[[Any, int], object], inclusive: bool) -> None:
        super().__init__(predicate, inclusive)
        self._next = 0

    def passes(self, value: Any) -> Any:
        """What the predicate says."""
        self._next += 1
        self.changed()
        return self.ask(self._predicate, value, self._next - 1)

    def save_state(self) -> int:
        """The index of the next value."""
        return self._next

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._next = state


class TakeUntil(Operator[Any, Any]):
    """See `take_until`."""

    __slots__ = ()

    NAME = "take_until"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Let it pass, or end."""
        if key == "0":
            self.emit(value)
        else:
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:
        """The end of the other means nothing."""
        if key == "0":
            self.complete()


class TakeWithTime(Operator[Any, Any]):
    """See `take_with_time`."""

    __slots__ = ("_time",)

    NAME = "take_with_time"

    def __init__(self, time: Duration | datetime) -> None:
        self._time: Final = time

    def on_start(self) -> None:
        """When it will be over."""
        self.set_timer(time_ns(self._time, self.now_ns))

    def on_next(self, value: Any, /) -> None:
        """Let it pass."""
        self.emit(value)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """It is over."""
        self.complete()

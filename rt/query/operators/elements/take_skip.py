"""Operators that emit the first values, or all but the first values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from rt.query.core.observable import Applied, Observable, Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration, duration_ns
from rt.query.operators.user_functions import (
    FAILED,
    UserFunctionOperator,
    check_least,
    check_time,
    sources_of,
    time_ns,
)

A = TypeVar("A")


def take(count: int) -> Transform:
    """The first `count` values; then completes, at once if `count` is 0. Saves the number still to emit."""
    check_least("take", "count", count, 0)
    return applied(Take, count)


def take_while(predicate: Callable[[Any], object], inclusive: bool = False) -> Transform:
    """The values before the first for which `predicate` is false; also that one if `inclusive`.

    Saves nothing.
    """
    return applied(TakeWhile, predicate, inclusive)


def take_while_indexed(predicate: Callable[[Any, int], object], inclusive: bool = False) -> Transform:
    """As `take_while`, with `predicate(value, index)`. Saves the index."""
    return applied(TakeWhileIndexed, predicate, inclusive)


def take_until(other: Observable[Any]) -> Transform:
    """The values before the first value of `other`. Saves nothing."""
    sources_of("take_until", (other,))
    return lambda source: Applied(TakeUntil, (source, other))


def take_with_time(duration: Duration) -> Transform:
    """The values that arrive less than `duration` after the start. Saves the end."""
    duration_ns(duration)
    return applied(TakeWithTime, duration)


def take_until_with_time(end_time: Duration | datetime) -> Transform:
    """The values that arrive before a time, or a duration after the start. Saves the time."""
    check_time("take_until_with_time", end_time)
    return applied(TakeWithTime, end_time)


def skip(count: int) -> Transform:
    """All values except the first `count`. Saves the number still to skip."""
    check_least("skip", "count", count, 0)
    return applied(Skip, count)


def skip_while(predicate: Callable[[Any], object]) -> Transform:
    """All values from the first for which `predicate` is false. Saves whether it arrived."""
    return applied(SkipWhile, predicate, False)


def skip_while_indexed(predicate: Callable[[Any, int], object]) -> Transform:
    """As `skip_while`, with `predicate(value, index)`. Saves the index, until it arrived."""
    return applied(SkipWhile, predicate, True)


def skip_until(other: Observable[Any]) -> Transform:
    """The values after the first value of `other`. Saves whether it arrived."""
    sources_of("skip_until", (other,))
    return lambda source: Applied(SkipUntil, (source, other))


def skip_with_time(duration: Duration) -> Transform:
    """The values that arrive `duration` after the start or later. Saves the time."""
    duration_ns(duration)
    return applied(SkipWithTime, duration)


def skip_until_with_time(start_time: Duration | datetime) -> Transform:
    """The values that arrive at a time, or a duration after the start, or later. Saves the time."""
    check_time("skip_until_with_time", start_time)
    return applied(SkipWithTime, start_time)


class Take(Operator[A, A]):
    __slots__ = ("_left",)
    NAME = "take"
    SAVED = "_left"

    def __init__(self, count: int) -> None:
        self._left = count

    def on_start(self) -> None:
        """If `count` is 0, complete at the next timer: nothing may be emitted here."""
        if self._left == 0:
            self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:
        self.complete()

    def on_next(self, value: A, /) -> None:
        """Counts before it emits, because the value may cause another event here."""
        if self._left == 0:
            return
        self._left -= 1
        self.changed()
        is_last = self._left == 0
        self.emit(value)
        if is_last:
            self.complete()


class TakeWhile(UserFunctionOperator[Any, Any]):
    __slots__ = ("_is_inclusive", "_predicate")
    NAME = "take_while"

    def __init__(self, predicate: Callable[..., object], inclusive: bool) -> None:
        self._predicate: Final = predicate
        self._is_inclusive: Final = inclusive

    def on_next(self, value: Any, /) -> None:
        passes = self.passes(value)
        if passes is FAILED:
            return
        if passes or self._is_inclusive:
            self.emit(value)
        if not passes:
            self.complete()

    def passes(self, value: Any) -> Any:
        return self.call(self._predicate, value)


class TakeWhileIndexed(TakeWhile):
    __slots__ = ("_next",)
    NAME = "take_while_indexed"
    SAVED = "_next"

    def __init__(self, predicate: Callable[[Any, int], object], inclusive: bool) -> None:
        super().__init__(predicate, inclusive)
        self._next = 0

    def passes(self, value: Any) -> Any:
        self._next += 1
        self.changed()
        return self.call(self._predicate, value, self._next - 1)


class TakeUntil(Operator[Any, Any]):
    __slots__ = ()
    NAME = "take_until"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        if key == "0":
            self.emit(value)
        else:
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:
        if key == "0":
            self.complete()


class TimeBoundary(Operator[Any, Any]):
    """The timer fires at a time, or a duration after the start."""

    __slots__ = ("_time",)

    def __init__(self, time: Duration | datetime) -> None:
        self._time: Final = time

    def on_start(self) -> None:
        self.set_timer(time_ns(self._time, self.now_ns))


class TakeWithTime(TimeBoundary):
    __slots__ = ()
    NAME = "take_with_time"

    def on_next(self, value: Any, /) -> None:
        self.emit(value)

    def on_timer(self, key: str, /) -> None:
        self.complete()


class Skip(Operator[Any, Any]):
    __slots__ = ("_left",)
    NAME = "skip"
    SAVED = "_left"

    def __init__(self, count: int) -> None:
        self._left = count

    def on_next(self, value: Any, /) -> None:
        if self._left:
            self._left -= 1
            self.changed()
        else:
            self.emit(value)


class SkipWhile(UserFunctionOperator[Any, Any]):
    __slots__ = ("_is_indexed", "_next", "_predicate")
    NAME = "skip_while"
    SAVED = "_next"

    def __init__(self, predicate: Callable[..., object], is_indexed: bool) -> None:
        self._predicate: Final = predicate
        self._is_indexed: Final = is_indexed
        self._next: int | None = 0  # None: values pass

    def on_next(self, value: Any, /) -> None:
        if self._next is not None:
            index = (self._next,) if self._is_indexed else ()
            leaves_out = self.call(self._predicate, value, *index)
            if not leaves_out:
                self._next = None
                self.changed()
            elif self._is_indexed:
                self._next += 1
                self.changed()
        if self._next is None:
            self.emit(value)


class SkipUntil(Operator[Any, Any]):
    __slots__ = ("_is_open",)
    NAME = "skip_until"
    SAVED = "_is_open"

    def __init__(self) -> None:
        self._is_open = False

    def on_inner_next(self, key: str, value: Any, /) -> None:
        if key == "1":
            self._is_open = True
            self.changed()
            self._inputs[1].leave()
        elif self._is_open:
            self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        if key == "0":
            self.complete()


class SkipWithTime(TimeBoundary):
    __slots__ = ()
    NAME = "skip_with_time"

    def on_timer(self, key: str, /) -> None:
        """Values pass from now on."""

    def on_next(self, value: Any, /) -> None:
        if not self.has_timer():
            self.emit(value)

"""Operators that leave out the first values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from rt.query.observing import Applied, Observable, Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import FAILED, Asking, check_time, sources_of, time_ns
from rt.query.scheduling import Duration, duration_ns


def skip(count: int) -> Transform:
    """All but the first `count` values. Saves how many are still left out."""
    if count < 0:
        raise ValueError(f"skip({count})")
    return applied(Skip, count)


def skip_while(predicate: Callable[[Any], object]) -> Transform:
    """All from the first value for which `predicate` is false. Saves whether it came."""
    return applied(SkipWhile, predicate, False)


def skip_while_indexed(predicate: Callable[[Any, int], object]) -> Transform:
    """As `skip_while`, for `predicate(value, index)`. Saves the index, until it came."""
    return applied(SkipWhile, predicate, True)


def skip_until(other: Observable[Any]) -> Transform:
    """The values behind the first of `other`. Saves whether that came."""
    sources_of("skip_until", (other,))
    return lambda source: Applied(SkipUntil, (source, other))


def skip_with_time(duration: Duration) -> Transform:
    """The values that come when `duration` is over, from the start. Saves when that is."""
    duration_ns(duration)
    return applied(SkipWithTime, duration)


def skip_until_with_time(start_time: Duration | datetime) -> Transform:
    """The values that come at a time, or a duration from the start, and later. Saves when that is."""
    check_time("skip_until_with_time", start_time)
    return applied(SkipWithTime, start_time)


class Skip(Operator[Any, Any]):
    """See `skip`."""

    __slots__ = ("_left",)

    NAME = "skip"

    def __init__(self, count: int) -> None:
        self._left = count

    def on_next(self, value: Any, /) -> None:
        """Leave it out, or not."""
        if self._left:
            self._left -= 1
            self.changed()
        else:
            self.emit(value)

    def save_state(self) -> int:
        """How many are left out."""
        return self._left

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._left = state


class SkipWhile(Asking[Any, Any]):
    """See `skip_while`."""

    __slots__ = ("_is_indexed", "_next", "_predicate")

    NAME = "skip_while"

    def __init__(self, predicate: Callable[..., object], is_indexed: bool) -> None:
        self._predicate: Final = predicate
        self._is_indexed: Final = is_indexed
        self._next: int | None = 0  # None: nothing is left out any more

    def on_next(self, value: Any, /) -> None:
        """Leave it out, or not."""
        if self._next is not None:
            index = (self._next,) if self._is_indexed else ()
            leaves_out = self.ask(self._predicate, value, *index)
            if leaves_out is FAILED:
                return
            if not leaves_out:
                self._next = None
                self.changed()
            elif self._is_indexed:
                self._next += 1
                self.changed()
        if self._next is None:
            self.emit(value)

    def save_state(self) -> int | None:
        """The index of the next value; None: nothing is left out any more."""
        return self._next

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._next = state


class SkipUntil(Operator[Any, Any]):
    """See `skip_until`."""

    __slots__ = ("_is_open",)

    NAME = "skip_until"

    def __init__(self) -> None:
        self._is_open = False

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Leave it out, or not."""
        if key == "1":
            self._is_open = True
            self.changed()
            self.dispose_input(1)
        elif self._is_open:
            self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        """The end of the other means nothing."""
        if key == "0":
            self.complete()

    def save_state(self) -> bool:
        """Whether values pass."""
        return self._is_open

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._is_open = state


class SkipWithTime(Operator[Any, Any]):
    """See `skip_with_time`. Values pass when the timer is gone."""

    __slots__ = ("_time",)

    NAME = "skip_with_time"

    def __init__(self, time: Duration | datetime) -> None:
        self._time: Final = time

    def on_start(self) -> None:
        """When values pass."""
        self.set_timer(time_ns(self._time, self.now_ns))

    def on_timer(self, key: str, /) -> None:
        """From now on."""

    def on_next(self, value: Any, /) -> None:
        """Leave it out, or not."""
        if not self.has_timer():
            self.emit(value)

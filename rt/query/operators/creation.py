"""Observables to start a query with, by their Rx names. See also `Source`.

`merge`, `concat`, `zip`, `combine_latest`, `catch`, `amb` and `on_error_resume_next` are the function forms
of the operators with these names.
"""

from __future__ import annotations

import builtins
from datetime import datetime
from typing import Any, ClassVar, Final

from rt.query.core.observable import Applied, Observable
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration, next_tick_ns
from rt.query.operators.combining.combine import Amb, CombineLatest, Merge, Zip
from rt.query.operators.combining.concat import Catch, Concat, OnErrorResumeNext
from rt.query.operators.user_functions import (
    check_time,
    last_tick_ns,
    offset_ns,
    period_ns,
    sources_of,
    time_ns,
)


def empty() -> Observable[Any]:
    """Completes at once. Saves only that."""
    return of()


def never() -> Observable[Any]:
    """Emits nothing and never ends. Saves nothing."""
    return Applied(Never, ())


def return_value(value: Any) -> Observable[Any]:
    """`value`; then completes. Saves whether it was sent."""
    return of(value)


def of(*values: Any) -> Observable[Any]:
    """These values at once; then completes. Saves how many were sent."""
    return Applied(lambda: Sequence(values), ())


def range(start: int, stop: int | None = None, step: int = 1) -> Observable[Any]:
    """The numbers of Python's `range` at once; then completes. Saves how many were sent."""
    numbers = builtins.range(start) if stop is None else builtins.range(start, stop, step)
    return Applied(lambda: Sequence(numbers), ())


def throw(error: Exception) -> Observable[Any]:
    """Fails at once. Saves only that."""
    return Applied(lambda: Throw(error), ())


def timer(due: Duration | datetime, period: Duration | None = None) -> Observable[int]:
    """0 at a time, or a duration after the start; with `period`, then 1, 2, … at every period.

    Without `period`, then completes. Ticks that were missed while the engine did not run are emitted once. If
    a virtual clock jumps over more than its `ticks_max` ticks, the last of them are emitted. Saves the time
    of the next number, and the number.
    """
    check_time("timer", due)
    every_ns = None if period is None else period_ns("timer", period)
    return Applied(lambda: Ticks(due, every_ns, None), ())


def interval(period: Duration, *, aligned: bool = False, offset: Duration = 0) -> Observable[int]:
    """0, 1, 2, …: the first one `period` after the start, as `timer(period, period)`.

    With `aligned`, at the round times of `window_with_time`. Saves the same.
    """
    every_ns, from_ns = period_ns("interval", period), offset_ns("interval", offset, aligned=aligned)
    return Applied(lambda: Ticks(period, every_ns, from_ns), ())


def merge(*sources: Observable[Any]) -> Observable[Any]:
    """The values of all sources, as they arrive."""
    return Applied(Merge, sources_of("merge", sources))


def concat(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source. When it completes, those of the second, and so on."""
    sources_of("concat", sources)
    return Applied(lambda: Concat(sources), ())


def zip(*sources: Observable[Any]) -> Observable[Any]:
    """Tuples of the first values of all sources, then of the second values, and so on."""
    return Applied(lambda: Zip(len(sources)), sources_of("zip", sources))


def combine_latest(*sources: Observable[Any]) -> Observable[Any]:
    """At every value, a tuple of the last values of all sources."""
    return Applied(lambda: CombineLatest(len(sources)), sources_of("combine_latest", sources))


def catch(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source. When it fails, those of the second, and so on."""
    sources_of("catch", sources)
    return Applied(lambda: Catch(sources), ())


def amb(*sources: Observable[Any]) -> Observable[Any]:
    """The events of the first source that sends a value, or ends."""
    return Applied(Amb, sources_of("amb", sources))


def on_error_resume_next(*sources: Observable[Any]) -> Observable[Any]:
    """The values of the first source. When it ends, also with an error, those of the second, and so on."""
    sources_of("on_error_resume_next", sources)
    return Applied(lambda: OnErrorResumeNext(sources), ())


class Never(Operator[Any, Any]):
    __slots__ = ()
    NAME = "never"


class Sequence(Operator[Any, Any]):
    """One value for each event, so that a checkpoint can be taken between values."""

    __slots__ = ("_next", "_values")
    NAME: ClassVar[str] = "sequence"
    SAVED = "_next"

    def __init__(self, values: tuple[Any, ...] | builtins.range) -> None:
        self._values: Final = values
        self._next = 0

    def on_start(self) -> None:
        self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:
        if self._next == len(self._values):
            self.complete()
            return
        value = self._values[self._next]
        self._next += 1
        self.set_timer(self.now_ns)
        self.emit(value)


class Throw(Operator[Any, Any]):
    __slots__ = ("_error",)
    NAME = "throw"

    def __init__(self, error: Exception) -> None:
        self._error: Final = error

    def on_start(self) -> None:
        self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:
        self.fail(self._error)


class Ticks(Operator[Any, int]):
    __slots__ = ("_due", "_due_ns", "_every_ns", "_next", "_offset_ns")
    NAME = "timer"
    SAVED = ("_due_ns", "_next")

    def __init__(self, due: Duration | datetime, every_ns: int | None, offset_ns: int | None) -> None:
        self._due: Final = due
        self._every_ns: Final = every_ns
        self._offset_ns: Final = offset_ns
        self._due_ns = 0
        self._next = 0

    def on_start(self) -> None:
        start_ns = last_tick_ns(self.now_ns, self._every_ns or 1, self._offset_ns)
        self._due_ns = time_ns(self._due, start_ns)
        self.set_timer(self._due_ns)

    def on_timer(self, key: str, /) -> None:
        number = self._next
        self._next += 1
        if self._every_ns is not None:
            tick_ns = next_tick_ns(self._due_ns, self._every_ns, self.now_ns)
            self._due_ns = self.skip_ns(tick_ns, self._every_ns)
            self.set_timer(self._due_ns)
        self.emit(number)
        if self._every_ns is None:
            self.complete()

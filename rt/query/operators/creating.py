"""Observables that come from nothing but time."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Final

from rt.query.observing import Applied, Observable
from rt.query.operator import Operator
from rt.query.operators.asking import check_time, next_tick_ns, period_ns, time_ns
from rt.query.scheduling import Duration


def empty() -> Observable[Any]:
    """Completes at once. Saves nothing but that."""
    return of()


def never() -> Observable[Any]:
    """Nothing, ever. Saves nothing."""
    return Applied(Never, ())


def return_value(value: Any) -> Observable[Any]:
    """`value`, and the end. Saves whether it was sent."""
    return of(value)


def of(*values: Any) -> Observable[Any]:
    """These values, and the end, at once. Saves how many were sent."""
    return Applied(lambda: Sequence(values), ())


def range(start: int, stop: int | None = None, step: int = 1) -> Observable[Any]:
    """The numbers of a `range` of Python, and the end, at once. Saves how many were sent."""
    import builtins

    numbers = builtins.range(start) if stop is None else builtins.range(start, stop, step)
    return Applied(lambda: Sequence(numbers), ())


def throw(error: Exception) -> Observable[Any]:
    """Fails at once. Saves nothing but that."""
    return Applied(lambda: Throw(error), ())


def timer(due: Duration | datetime, period: Duration | None = None) -> Observable[int]:
    """0 at a time, or a duration from the start; then the end, or 1, 2, … at every `period` behind it.

    What was missed while nothing ran comes once, not as often as it was missed. Saves the time of the next
    number, and the number.
    """
    check_time("timer", due)
    every_ns = None if period is None else period_ns("timer", period)
    return Applied(lambda: Ticks(due, every_ns), ())


def interval(period: Duration) -> Observable[int]:
    """0, 1, 2, …: the first one `period` from the start. As `timer(period, period)`. Saves the same."""
    return timer(period, period)


class Never(Operator[Any, Any]):
    """See `never`."""

    __slots__ = ()

    NAME = "never"


class Sequence(Operator[Any, Any]):
    """See `of` and `range`. A value an event, so that checkpoints have a place between them."""

    __slots__ = ("_next", "_values")

    NAME: ClassVar[str] = "sequence"

    def __init__(self, values: tuple[Any, ...] | Any) -> None:
        self._values: Final = values
        self._next = 0

    def on_start(self) -> None:
        """As soon as time runs."""
        self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """Send one, or end."""
        if self._next == len(self._values):
            self.complete()
            return
        value = self._values[self._next]
        self._next += 1
        self.set_timer(self.now_ns)
        self.emit(value)

    def save_state(self) -> int:
        """How many were sent."""
        return self._next

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._next = state


class Throw(Operator[Any, Any]):
    """See `throw`."""

    __slots__ = ("_error",)

    NAME = "throw"

    def __init__(self, error: Exception) -> None:
        self._error: Final = error

    def on_start(self) -> None:
        """As soon as time runs."""
        self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """Fail."""
        self.fail(self._error)


class Ticks(Operator[Any, int]):
    """See `timer`."""

    __slots__ = ("_due", "_due_ns", "_every_ns", "_next")

    NAME = "timer"

    def __init__(self, due: Duration | datetime, every_ns: int | None) -> None:
        self._due: Final = due
        self._every_ns: Final = every_ns
        self._due_ns = 0
        self._next = 0

    def on_start(self) -> None:
        """Wait for the first."""
        self._due_ns = time_ns(self._due, self.now_ns)
        self.set_timer(self._due_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """Send a number."""
        number = self._next
        self._next += 1
        if self._every_ns is not None:
            self._due_ns = next_tick_ns(self._due_ns, self._every_ns, self.now_ns)
            self.set_timer(self._due_ns)
        self.emit(number)
        if self._every_ns is None:
            self.complete()

    def save_state(self) -> list[int]:
        """When the next one is due, and the number."""
        return [self._due_ns, self._next]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._due_ns, self._next = state

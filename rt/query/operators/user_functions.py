"""Bases of operators that call users' functions, and checks of arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from typing import Any, Final, SupportsIndex, TypeVar

from rt.errors import InvalidOption
from rt.objects import ANY
from rt.query.core.observable import Observable, Transform, pipe
from rt.query.core.operator import Operator
from rt.query.core.scheduler import NS_PER_S, Duration, duration_ns

A = TypeVar("A")
B = TypeVar("B")

FAILED: Final = object()
"""Result of `UserFunctionOperator.call` if the function raised. Truthy. Nothing may be emitted for it."""


class _Absent(Enum):
    """An enumeration, because a copy of a member is the same object: Spark copies a query to its workers."""

    ABSENT = "absent"


ABSENT: Final[Any] = _Absent.ABSENT
"""Stands for a missing argument where None is a valid argument."""


class UserFunctionOperator(Operator[A, B]):
    __slots__ = ()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function. Return FAILED if it raises: then the value is left out, or this operator
        failed.
        """
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - a user's function
            return self.call_again(error, function, *arguments)

    def call_again(self, error: Exception, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function again after it raised `error`, as often as the query's error policy says.

        Returns as `call`.
        """
        errors = self._group.root.errors
        try:
            if errors is None:
                raise error
            return errors.call_again(error, function, arguments)
        except Exception as last:  # noqa: BLE001 - a user's function
            self.reject(last)
            return FAILED


class IndexedOperator(UserFunctionOperator[Any, Any]):
    """Calls a function with each value and its index."""

    __slots__ = ("_function", "_next")
    SAVED = "_next"

    def __init__(self, function: Callable[[Any, int], Any]) -> None:
        self._function: Final = function
        self._next = 0

    def call_indexed(self, value: Any) -> Any:
        """The function's result, or FAILED."""
        self._next += 1
        self.changed()
        return self.call(self._function, value, self._next - 1)


def storable(value: A) -> A:
    """Return `value`, which the operator will keep.

    Raises `rt.objects.NotSerializable` here, so that it ends one query and not the checkpoint of all queries.
    """
    ANY.check(value)
    return value


def compose(*transforms: Transform) -> Transform:
    """Transforms from left to right as one transform."""
    return lambda source: pipe(source, *transforms)


def time_ns(time: Duration | datetime, now_ns: int) -> int:
    """A time or a duration from now, in ns since the Unix epoch; `ValueError` for a time without zone."""
    if not isinstance(time, datetime):
        return now_ns + duration_ns(time)
    if time.tzinfo is None:
        raise InvalidOption(f"{time} has no time zone")
    return round(time.timestamp() * 1_000_000) * (NS_PER_S // 1_000_000)


def check_time(name: str, time: Duration | datetime) -> None:
    """`ValueError` for a time that `time_ns` refuses."""
    try:
        time_ns(time, 0)
    except ValueError as error:
        raise InvalidOption(f"{name}: {error}") from None


def check_least(name: str, option: str, value: object, least: int) -> None:
    """`rt.InvalidOption` unless it is a whole number of at least `least`."""
    if not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise InvalidOption(f"{name}: {option} must be {least} or more, got {value!r}")


def period_ns(name: str, duration: Duration) -> int:
    """A duration in ns; `ValueError` if it is not greater than 0."""
    ns = duration_ns(duration)
    if ns < 1:
        raise InvalidOption(f"{name}: a duration must be 1 ns or more, got {duration}")
    return ns


def offset_ns(name: str, offset: Duration, *, aligned: bool) -> int | None:
    """The offset of ticks from round times; None: ticks are counted from the start."""
    ns = duration_ns(offset)
    if ns and not aligned:
        raise InvalidOption(f"{name}: an offset needs aligned=True, got {offset}")
    return ns if aligned else None


def last_tick_ns(now_ns: int, every_ns: int, offset_ns: int | None) -> int:
    """The last round time at or before `now_ns`: a multiple of `every_ns` plus `offset_ns`.

    `now_ns` if `offset_ns` is None.
    """
    return now_ns if offset_ns is None else now_ns - (now_ns - offset_ns) % every_ns


def sources_of(transform: str, sources: tuple[Observable[Any], ...]) -> tuple[Observable[Any], ...]:
    """`sources`; `TypeError` unless there is at least one, and all are observables."""
    for each in sources:
        if not isinstance(each, Observable):
            raise TypeError(f"{transform}: a source must be an observable, got {each!r}")
    if not sources:
        raise TypeError(f"{transform} needs at least one source")
    return sources

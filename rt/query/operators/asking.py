"""What operators share that call functions of users, or keep values of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from rt.objects import ANY
from rt.query.observing import Observable, Transform, pipe
from rt.query.operator import Operator
from rt.query.scheduling import NS_PER_S, Duration, duration_ns

A = TypeVar("A")
B = TypeVar("B")

FAILED: Final = object()
"""What `ask` answers where the function raised."""

ABSENT: Final[Any] = object()
"""An argument that was not given, where None may be one."""


class Asking(Operator[A, B]):
    """An operator that calls functions of users."""

    __slots__ = ()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` answers; FAILED, and this has ended with its error, if it raised."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - a function of the user's
            self.fail(error)
            return FAILED


def key_of(value: Any) -> Any:
    """The value as a key: nan, which differs from itself, is one key, before a recovery and behind it."""
    if type(value) is float and math.isnan(value):
        return math.nan
    if type(value) is tuple or type(value) is frozenset:
        return type(value)(map(key_of, value))
    return value


def storable(value: A) -> A:
    """`value`, which an operator is about to keep.

    `rt.objects.NotSerializable` here, where it ends one query, and not in the checkpoint of all of them.
    """
    ANY.check(value)
    return value


def compose(*transforms: Transform) -> Transform:
    """Transforms from left to right, as one."""
    return lambda source: pipe(source, *transforms)


def time_ns(time: Duration | datetime, now_ns: int) -> int:
    """A time that is given as such, with its zone, or as a duration from now."""
    if isinstance(time, datetime):
        return datetime_ns(time)
    return now_ns + duration_ns(time)


def datetime_ns(time: datetime) -> int:
    """Nanoseconds since the Unix epoch; `ValueError` for a time without zone."""
    if time.tzinfo is None:
        raise ValueError(f"{time} has no time zone")
    return round(time.timestamp() * 1_000_000) * (NS_PER_S // 1_000_000)


def check_time(name: str, time: Duration | datetime) -> None:
    """Raise `ValueError` for a time that `time_ns` would refuse."""
    try:
        time_ns(time, 0)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def period_ns(name: str, duration: Duration) -> int:
    """A duration that is not 0: `ValueError`."""
    ns = duration_ns(duration)
    if ns < 1:
        raise ValueError(f"{name}({duration}): it must be longer")
    return ns


def next_tick_ns(due_ns: int, every_ns: int, now_ns: int) -> int:
    """The first of `due_ns + n * every_ns`, n from 1, behind `now_ns`: what was missed is left out."""
    return due_ns + every_ns * max(1, (now_ns - due_ns) // every_ns + 1)


def sources_of(transform: str, sources: tuple[Observable[Any], ...]) -> tuple[Observable[Any], ...]:
    """`sources`, if there are any and they are observables; else `TypeError`."""
    for each in sources:
        if not isinstance(each, Observable):
            raise TypeError(f"{transform} of {each!r}, which is no observable")
    if not sources:
        raise TypeError(f"{transform} of nothing")
    return sources

"""Operators that combine the values of two sources that overlap in time.

A value is open from its arrival until the observable of its duration mapper emits or ends. The mapper is
called again after a crash, and must return the same. Each open value is a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.objects import PersistedSortedDictionary
from rt.query.core.errors import LimitExceeded
from rt.query.core.observable import Applied, Observable, Transform
from rt.query.operators.elements.aggregate import LIMIT
from rt.query.operators.user_functions import FAILED, UserFunctionOperator, check_least, sources_of
from rt.query.operators.windows import SubjectOwner

Mapper = Callable[[Any], Observable[Any]]
Side = PersistedSortedDictionary[int, Any]

SOURCES: Final = ("0", "1")


def join(
    right: Observable[Any],
    left_duration_mapper: Mapper,
    right_duration_mapper: Mapper,
    *,
    limit: int = LIMIT,
) -> Transform:
    """A tuple of each value of the source and each value of `right` that are open at the same time.

    A value is open until its duration emits or ends. Ends when no more pairs can come. More than `limit` open
    values: `LimitExceeded`. Saves the open values, in the object space.
    """
    sources_of("join", (right,))
    check_least("join", "limit", limit, 1)
    mappers = left_duration_mapper, right_duration_mapper
    return lambda source: Applied(lambda: Join(mappers, limit), (source, right))


def group_join(
    right: Observable[Any],
    left_duration_mapper: Mapper,
    right_duration_mapper: Mapper,
    *,
    limit: int = LIMIT,
) -> Transform:
    """For every value of the source a group, whose `key` is that value: the values of `right` open with it.

    The group ends with the value's duration. Groups must be subscribed to immediately, as `flat_map` does.
    Ends when the source has ended and no group is open. More than `limit` open values: `LimitExceeded`. Saves
    the open values, in the object space.
    """
    sources_of("group_join", (right,))
    check_least("group_join", "limit", limit, 1)
    mappers = left_duration_mapper, right_duration_mapper
    return lambda source: Applied(lambda: GroupJoin(mappers, limit), (source, right))


class OpenValues:
    """The open values of both sides, numbered in the order of their arrival.

    The sources of the operator are the inlets "0" and "1". The inner subscription "<side>-<number>" is the
    duration of a value.
    """

    __slots__ = ("_limit", "_mappers", "_operator", "sides")

    def __init__(
        self,
        operator: UserFunctionOperator[Any, Any],
        sides: tuple[Side, Side],
        mappers: tuple[Mapper, Mapper],
        limit: int,
    ) -> None:
        self._operator: Final = operator
        self.sides: Final = sides
        self._mappers: Final = mappers
        self._limit: Final = limit

    def add(self, side: int, value: Any, number: int) -> bool:
        """Open the value. False if the operator failed, or the value is left out."""
        if len(self.sides[0]) + len(self.sides[1]) >= self._limit:
            what = f"{self._operator.NAME} has too many open values"
            hint = "Pass shorter durations, or a higher limit."
            where = self._operator.address
            self._operator.fail(LimitExceeded(what, where=where, expected=self._limit, hint=hint))
            return False
        self.sides[side][number] = value
        return self._open_duration(side, number)

    def _open_duration(self, side: int, number: int) -> bool:
        """Open the duration of a value. False if its mapper failed. Then the value is not open."""
        operator = self._operator
        if operator.call(operator.open_child, f"{side}-{number}") is not FAILED:
            return True
        if not operator.is_disposed:
            del self.sides[side][number]
        return False

    def duration(self, key: str) -> Observable[Any]:
        """The observable of an inner subscription. `TypeError` if the mapper does not return one."""
        side, number = _place(key)
        made = self._mappers[side](self.sides[side][number])
        if not isinstance(made, Observable):
            raise TypeError(f"{self._operator.NAME}: the mapper must return an observable, got {made!r}")
        return made

    def expire(self, key: str) -> tuple[int, int]:
        """Remove the value. Returns its side and number."""
        side, number = _place(key)
        self._operator.close_child(key)
        del self.sides[side][number]
        return side, number


class Join(UserFunctionOperator[Any, Any]):
    __slots__ = ("_limit", "_mappers", "_open")
    NAME = "join"

    def __init__(self, mappers: tuple[Mapper, Mapper], limit: int) -> None:
        self._mappers: Final = mappers
        self._limit: Final = limit
        self._open: OpenValues

    def on_open(self) -> None:
        left: Side = self.objects.sorted_dictionary("left", keys=int)
        right: Side = self.objects.sorted_dictionary("right", keys=int)
        self._open = OpenValues(self, (left, right), self._mappers, self._limit)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return self._open.duration(key)

    def on_inner_next(self, key: str, value: Any, /) -> None:
        if key not in SOURCES:
            self._expire(key)
            return
        side, number = int(key), self._children_made
        if self._open.add(side, value, number):
            for other in list(self._open.sides[1 - side].values()):
                self.emit((other, value) if side else (value, other))

    def on_inner_completed(self, key: str, /) -> None:
        if key not in SOURCES:
            self._expire(key)
        elif self.has_input_ended(1 - int(key)) or not self._open.sides[int(key)]:
            self.complete()

    def _expire(self, key: str) -> None:
        side, _ = self._open.expire(key)
        if self.has_input_ended(side) and not self._open.sides[side]:
            self.complete()


class GroupJoin(SubjectOwner):
    """A group is named by the number of its value."""

    __slots__ = ("_limit", "_mappers", "_open")
    NAME = "group_join"

    def __init__(self, mappers: tuple[Mapper, Mapper], limit: int) -> None:
        super().__init__()
        self._mappers: Final = mappers
        self._limit: Final = limit
        self._open: OpenValues

    def on_open(self) -> None:
        left: Side = self.objects.sorted_dictionary("left", keys=int)
        right: Side = self.objects.sorted_dictionary("right", keys=int)
        self._open = OpenValues(self, (left, right), self._mappers, self._limit)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return self._open.duration(key)

    def on_inner_next(self, key: str, value: Any, /) -> None:
        number = self._children_made
        match key:
            case "0" if not self._is_unsubscribed and self._open.add(0, value, number):
                self.open_inner(str(number), value)
                for each in list(self._open.sides[1].values()):
                    if not self.is_disposed:
                        self._subjects[str(number)].on_next(each)
            case "1" if self._open.add(1, value, number):
                for inner in list(self._subjects.values()):
                    inner.on_next(value)
            case "0" | "1":
                pass
            case _:
                self._expire(key)

    def on_inner_completed(self, key: str, /) -> None:
        if key not in SOURCES:
            self._expire(key)
        elif key == "0" and not self._subjects:
            self.complete()

    def _expire(self, key: str) -> None:
        side, number = self._open.expire(key)
        if side == 0:
            self._subjects.pop(str(number)).on_completed()
            if self.has_input_ended(0) and not self._subjects:
                self.complete()
            self._end_if_idle()

    def save_state(self) -> bool:
        return self._is_unsubscribed

    def load_state(self, state: Any, version: int, /) -> None:
        self._is_unsubscribed = state
        for number, value in self._open.sides[0].items():
            self.reopen_inner(str(number), value)


def _place(key: str) -> tuple[int, int]:
    side, _, number = key.partition("-")
    return int(side), int(number)

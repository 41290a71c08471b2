"""Operators that emit all values at once, at the end."""

from __future__ import annotations

from typing import Any, Final

from rt.objects import PersistedList
from rt.query.errors import LimitExceeded
from rt.query.observing import Transform, applied
from rt.query.operator import Operator

LIMIT: Final = 1_000_000
"""How many values an operator holds that waits for an end, unless it is told: some hundred MB."""


def to_list(*, limit: int = LIMIT) -> Transform:
    """At the end, the list of all values; the one behind the `limit`th ends it with `LimitExceeded`.

    Saves the list, in the object space.
    """
    if limit < 0:
        raise ValueError(f"to_list(limit={limit})")
    return applied(ToList, limit)


class ToList(Operator[Any, list[Any]]):
    """See `to_list`."""

    __slots__ = ("_limit", "_values")

    NAME = "to_list"

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit
        self._values: PersistedList[Any]

    def on_open(self) -> None:
        """The list."""
        self._values = self.objects.list("values")

    def on_next(self, value: Any, /) -> None:
        """Into the list."""
        if len(self._values) >= self._limit:
            what = f"a list of more than {self._limit} values"
            hint = "Give to_list a higher limit, or use buffers."
            self.fail(LimitExceeded(what, where=self.address, wanted=self._limit, hint=hint))
            return
        self._values.append(value)

    def on_completed(self) -> None:
        """Emit it."""
        self.emit(list(self._values))
        self.complete()

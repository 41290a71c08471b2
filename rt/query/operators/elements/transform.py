"""Operators that emit something for every value, or additional values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.user_functions import FAILED, IndexedOperator, UserFunctionOperator, storable


def map(mapper: Callable[[Any], Any]) -> Transform:
    """`mapper(value)` for every value. Saves nothing."""
    return applied(Map, mapper)


def map_indexed(mapper: Callable[[Any, int], Any]) -> Transform:
    """`mapper(value, index)` for every value, index from 0. Saves the index."""
    return applied(MapIndexed, mapper)


def starmap(mapper: Callable[..., Any]) -> Transform:
    """`mapper(*value)` for every value, for example after `zip`. Saves nothing."""
    return applied(Map, lambda value: mapper(*value))


def pairwise() -> Transform:
    """For every value after the first, a tuple of the value before and it. Saves the last value."""
    return applied(Pairwise)


def ignore_elements() -> Transform:
    """No values, only the end. Saves nothing."""
    return applied(IgnoreElements)


def default_if_empty(default: Any = None) -> Transform:
    """The same values; `default` if there were none. Saves whether there was a value."""
    return applied(DefaultIfEmpty, default)


def start_with(*values: Any) -> Transform:
    """`values`, then those of the source. Saves whether `values` were sent."""
    return applied(StartWith, values)


def append(*values: Any) -> Transform:
    """The values of the source; when it completes, `values`. Saves nothing."""
    return applied(Append, values)


class Map(UserFunctionOperator[Any, Any]):
    __slots__ = ("_mapper",)
    NAME = "map"

    def __init__(self, mapper: Callable[[Any], Any]) -> None:
        self._mapper: Final = mapper

    def on_next(self, value: Any, /) -> None:
        try:
            made = self._mapper(value)
        except Exception as error:  # noqa: BLE001 - a user's function
            made = self.call_again(error, self._mapper, value)
            if made is FAILED:
                return
        self.emit(made)


class MapIndexed(IndexedOperator):
    __slots__ = ()
    NAME = "map_indexed"

    def on_next(self, value: Any, /) -> None:
        if (made := self.call_indexed(value)) is not FAILED:
            self.emit(made)


class Pairwise(Operator[Any, tuple[Any, Any]]):
    """`_before` holds the last value, or nothing."""

    __slots__ = ("_before",)
    NAME = "pairwise"
    SAVED = "_before"

    def __init__(self) -> None:
        self._before: list[Any] = []

    def on_next(self, value: Any, /) -> None:
        before, self._before = self._before, [storable(value)]
        self.changed()
        if before:
            self.emit((before[0], value))


class IgnoreElements(Operator[Any, Any]):
    __slots__ = ()
    NAME = "ignore_elements"

    def on_next(self, value: Any, /) -> None: ...


class DefaultIfEmpty(Operator[Any, Any]):
    __slots__ = ("_default", "_is_empty")
    NAME = "default_if_empty"
    SAVED = "_is_empty"

    def __init__(self, default: Any) -> None:
        self._default: Final = default
        self._is_empty = True

    def on_next(self, value: Any, /) -> None:
        if self._is_empty:
            self._is_empty = False
            self.changed()
        self.emit(value)

    def on_completed(self) -> None:
        if self._is_empty:
            self.emit(self._default)
        self.complete()


class StartWith(Operator[Any, Any]):
    """The timer exists until the values are sent: when it fires, or before the first event of the source."""

    __slots__ = ("_values",)
    NAME = "start_with"

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values: Final = values

    def on_start(self) -> None:
        self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:
        for value in self._values:
            self.emit(value)

    def on_next(self, value: Any, /) -> None:
        self._send_values()
        self.emit(value)

    def on_error(self, error: Exception, /) -> None:
        self._send_values()
        self.fail(error)

    def on_completed(self) -> None:
        self._send_values()
        self.complete()

    def _send_values(self) -> None:
        if self.has_timer():
            self.cancel_timer()
            self.on_timer("")


class Append(Operator[Any, Any]):
    __slots__ = ("_values",)
    NAME = "append"

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values: Final = values

    def on_next(self, value: Any, /) -> None:
        self.emit(value)

    def on_completed(self) -> None:
        for value in self._values:
            self.emit(value)
        self.complete()

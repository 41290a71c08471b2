"""Operators that send something for every value, or besides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.query.observing import Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import FAILED, Asking


def map(mapper: Callable[[Any], Any]) -> Transform:
    """What `mapper` makes of each value. Saves nothing."""
    return applied(Map, mapper)


def map_indexed(mapper: Callable[[Any, int], Any]) -> Transform:
    """What `mapper` makes of each value and its index, from 0. Saves the index."""
    return applied(MapIndexed, mapper)


def ignore_elements() -> Transform:
    """No value, only the end. Saves nothing."""
    return applied(IgnoreElements)


def default_if_empty(default: Any = None) -> Transform:
    """The same values; `default` if there was none. Saves whether there was one."""
    return applied(DefaultIfEmpty, default)


def start_with(*values: Any) -> Transform:
    """`values`, then those of the source. Saves whether the former are sent."""
    return applied(StartWith, values)


def append(*values: Any) -> Transform:
    """The values of the source, and `values` when it completes. Saves nothing."""
    return applied(Append, values)


class Map(Asking[Any, Any]):
    """See `map`."""

    __slots__ = ("_mapper",)

    NAME = "map"

    def __init__(self, mapper: Callable[[Any], Any]) -> None:
        self._mapper: Final = mapper

    def on_next(self, value: Any, /) -> None:
        """Send what it becomes."""
        try:
            made = self._mapper(value)
        except Exception as error:  # noqa: BLE001 - a function of the user's
            self.fail(error)
            return
        self.emit(made)


class MapIndexed(Asking[Any, Any]):
    """See `map_indexed`."""

    __slots__ = ("_mapper", "_next")

    NAME = "map_indexed"

    def __init__(self, mapper: Callable[[Any, int], Any]) -> None:
        self._mapper: Final = mapper
        self._next = 0

    def on_next(self, value: Any, /) -> None:
        """Send what it becomes."""
        index = self._next
        self._next += 1
        self.changed()
        if (made := self.ask(self._mapper, value, index)) is not FAILED:
            self.emit(made)

    def save_state(self) -> int:
        """The index of the next value."""
        return self._next

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._next = state


class IgnoreElements(Operator[Any, Any]):
    """See `ignore_elements`."""

    __slots__ = ()

    NAME = "ignore_elements"

    def on_next(self, value: Any, /) -> None:
        """Nothing."""


class DefaultIfEmpty(Operator[Any, Any]):
    """See `default_if_empty`."""

    __slots__ = ("_default", "_is_empty")

    NAME = "default_if_empty"

    def __init__(self, default: Any) -> None:
        self._default: Final = default
        self._is_empty = True

    def on_next(self, value: Any, /) -> None:
        """Send it on."""
        if self._is_empty:
            self._is_empty = False
            self.changed()
        self.emit(value)

    def on_completed(self) -> None:
        """Perhaps with the default."""
        if self._is_empty:
            self.emit(self._default)
        self.complete()

    def save_state(self) -> bool:
        """Whether nothing came."""
        return self._is_empty

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._is_empty = state


class StartWith(Operator[Any, Any]):
    """See `start_with`. The timer is there until the values are sent: by it, or by what comes first."""

    __slots__ = ("_values",)

    NAME = "start_with"

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values: Final = values

    def on_start(self) -> None:
        """Send them as soon as time runs."""
        self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """Send them."""
        for value in self._values:
            self.emit(value)

    def on_next(self, value: Any, /) -> None:
        """Behind them."""
        self._begin()
        self.emit(value)

    def on_error(self, error: Exception, /) -> None:
        """Behind them."""
        self._begin()
        self.fail(error)

    def on_completed(self) -> None:
        """Behind them."""
        self._begin()
        self.complete()

    def _begin(self) -> None:
        if self.has_timer():
            self.cancel_timer()
            self.on_timer("")


class Append(Operator[Any, Any]):
    """See `append`."""

    __slots__ = ("_values",)

    NAME = "append"

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values: Final = values

    def on_next(self, value: Any, /) -> None:
        """Send it on."""
        self.emit(value)

    def on_completed(self) -> None:
        """Send them."""
        for value in self._values:
            self.emit(value)
        self.complete()

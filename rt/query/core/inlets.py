"""Observers between operators: of one of several sources or an inner subscription, or to watch values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rt.query.core.observable import Observer

if TYPE_CHECKING:
    from rt.query.core.operator import Operator


class Watched:
    """Stands in for an observer, `out`."""

    def __init__(self, out: Observer[Any]) -> None:
        self.out: Final = out

    def on_next(self, value: Any, /) -> None:
        self.out.on_next(value)

    def on_error(self, error: Exception, /) -> None:
        self.out.on_error(error)

    def on_completed(self) -> None:
        self.out.on_completed()


class Inlet:
    """Receives one of several sources, or an inner subscription."""

    __slots__ = ("_key", "operator")

    def __init__(self, operator: Operator[Any, Any], key: str) -> None:
        self.operator = operator
        self._key = key

    def on_next(self, value: Any, /) -> None:
        if not self.operator.is_disposed:
            self.operator.on_inner_next(self._key, value)

    def on_error(self, error: Exception, /) -> None:
        self.operator.close_child(self._key)
        if not self.operator.is_disposed:
            self.operator.on_inner_error(self._key, error)

    def on_completed(self) -> None:
        self.operator.close_child(self._key)
        if not self.operator.is_disposed:
            self.operator.on_inner_completed(self._key)

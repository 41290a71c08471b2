"""Operators that turn notifications (`on_next`, `on_error`, `on_completed`), or times, into values.

These values are tuples of plain values, so that every operator can save them and every output encode them.
"Saves" is what an operator keeps in a checkpoint.
"""

from __future__ import annotations

from typing import Any

from rt.query.core.errors import QueryFailed
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.combining.concat import Failure


def materialize() -> Transform:
    """Every notification as a value: `("next", value)`, `("error", (kind, text))`, `("completed", None)`.

    Completes after the last one, also if that is an error. `kind` is the error's class. Saves nothing.
    """
    return applied(Materialize)


def dematerialize() -> Transform:
    """The notifications that `materialize` made into values. An error is a `QueryFailed`. Saves nothing."""
    return applied(Dematerialize)


def timestamp() -> Transform:
    """`(value, time)` for every value, in ns since the Unix epoch on the query's clock. Saves nothing."""
    return applied(Timestamp)


def time_interval() -> Transform:
    """`(value, duration)` for every value: ns since the previous value, on the query's clock.

    For the first value it is the time since the query started. Saves the time of the last value.
    """
    return applied(TimeInterval)


class Materialize(Operator[Any, tuple[str, Any]]):
    __slots__ = ()
    NAME = "materialize"

    def on_next(self, value: Any, /) -> None:
        self.emit(("next", value))

    def handles_errors(self) -> bool:
        return True

    def on_error(self, error: Exception, /) -> None:
        failure = Failure.of(error)
        self.emit(("error", (failure.kind, failure.text)))
        self.complete()

    def on_completed(self) -> None:
        self.emit(("completed", None))
        self.complete()


class Dematerialize(Operator[Any, Any]):
    __slots__ = ()
    NAME = "dematerialize"

    def on_next(self, value: Any, /) -> None:
        match value:
            case ("next", inner):
                self.emit(inner)
            case ("error", (str(kind), str(text))):
                self.fail(QueryFailed(f"{kind}: {text}"))
            case ("completed", None):
                self.complete()
            case _:
                self.reject(TypeError(f"dematerialize: expected a value of materialize, got {value!r}"))


class Timestamp(Operator[Any, tuple[Any, int]]):
    __slots__ = ()
    NAME = "timestamp"

    def on_next(self, value: Any, /) -> None:
        self.emit((value, self.now_ns))


class TimeInterval(Operator[Any, tuple[Any, int]]):
    __slots__ = ("_last_ns",)
    NAME = "time_interval"
    SAVED = "_last_ns"

    def __init__(self) -> None:
        self._last_ns = 0

    def on_start(self) -> None:
        self._last_ns = self.now_ns

    def on_next(self, value: Any, /) -> None:
        now_ns = self.now_ns
        elapsed_ns, self._last_ns = now_ns - self._last_ns, now_ns
        self.changed()
        self.emit((value, elapsed_ns))

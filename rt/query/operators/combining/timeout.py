"""An operator that waits for a value only until a deadline."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from rt.errors import Timeout
from rt.query.core.observable import Observable, Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration
from rt.query.operators.user_functions import check_time, sources_of, time_ns

OTHER: Final = "other"


def timeout(duetime: Duration | datetime, other: Observable[Any] | None = None) -> Transform:
    """The same values; `rt.Timeout` if no value or end came for a duration, or no end until a time.

    With `other`, its values then, instead of the error. Time in which the engine does not run counts, unless
    its clock follows the values. Saves when the time ends, and whether `other` is open.
    """
    check_time("timeout", duetime)
    if other is not None:
        sources_of("timeout", (other,))
    return applied(Deadline, duetime, other)


class Deadline(Operator[Any, Any]):
    """The timer exists until it fires. After that `other` is open."""

    __slots__ = ("_due", "_other")
    NAME = "timeout"

    def __init__(self, due: Duration | datetime, other: Observable[Any] | None) -> None:
        self._due: Final = due
        self._other: Final = other

    def on_start(self) -> None:
        self.set_timer(time_ns(self._due, self.now_ns))

    def on_next(self, value: Any, /) -> None:
        if not isinstance(self._due, datetime):
            self.set_timer(time_ns(self._due, self.now_ns))
        self.emit(value)

    def on_timer(self, key: str, /) -> None:
        if self._other is None:
            self.fail(
                Timeout("the source did not send a value in time", where=self.address, expected=self._due)
            )
            return
        self._inputs[0].leave()
        self.open_child(OTHER)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        assert self._other is not None
        return self._other

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        self.complete()

"""Base of operators that wait until the watermark passes a time.

An operator of this kind emits values with times before the clock. For example, it emits the result of a
window when the clock passes the end of the window. So the watermark of operators after it is 1 ns less: they
receive these values before their watermark passes the times of the values. Only operators of the same query
count, without operators inside windows and groups.
"""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar, Final

from rt.query.core.clock import LateValue, is_worth_logging
from rt.query.core.observable import Observer
from rt.query.core.operator import Operator
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.row_json import encode, plain
from rt.query.operators.user_functions import UserFunctionOperator

logger = logging.getLogger("rt.query")


class TimeOperator(UserFunctionOperator[Any, Any]):
    """Has one timer, for the next watermark at which there is work.

    The timer depends only on the saved state, so that it fires in the same order after a crash.
    """

    __slots__ = ("_behind_ns", "_late", "_late_output", "_timer_ns")
    SAVED: ClassVar[tuple[str, ...]] = ("_late", "_timer_ns")

    def __init__(self, late_output: str | None) -> None:
        self._late_output: Final = late_output
        self._late = 0
        self._timer_ns: int | None = None
        self._behind_ns: int

    def on_due(self, watermark_ns: int) -> None:
        """The watermark passed a time that was given to `wake`."""
        raise NotImplementedError

    def next_due_ns(self) -> int | None:
        """The next watermark at which there is work."""
        raise NotImplementedError

    def bind(self, group: OperatorGroup, out: Observer[Any]) -> None:
        super().bind(group, out)
        if self._late_output is not None:
            group.runtime.output(self._late_output)  # Raises if there is none.

    @property
    def side_output(self) -> str | None:
        return self._late_output

    def on_open(self) -> None:
        self._behind_ns = max(map(held_ns, self._inputs), default=0)

    def load_state(self, state: Any, version: int, /) -> None:
        super().load_state(state, version)
        self._group.runtime.late[self._group.root.id] += self._late

    @property
    def watermark_ns(self) -> int:
        """The watermark: no value with an earlier time is expected."""
        return self.now_ns - self._behind_ns

    def times(self) -> tuple[int, int]:
        """The time of the value that is being processed, and the watermark."""
        now_ns = self.now_ns
        return self._group.runtime.scheduler.event_time(now_ns), now_ns - self._behind_ns

    def wake(self, watermark_ns: int) -> None:
        """Call `on_due` at this watermark, or before."""
        if self._timer_ns is None or watermark_ns < self._timer_ns:
            self._timer_ns = watermark_ns
            self.set_timer(watermark_ns + self._behind_ns)

    def on_timer(self, key: str, /) -> None:
        self._timer_ns = None
        self.on_due(self.watermark_ns)
        if not self.is_disposed and (due_ns := self.next_due_ns()) is not None:
            self.wake(due_ns)

    def emit_at(self, time_ns: int, value: Any) -> None:
        """Emit a value with this time."""
        scheduler = self._group.runtime.scheduler
        before, scheduler.event_ns = scheduler.event_ns, time_ns
        try:
            self.emit(value)
        finally:
            scheduler.event_ns = before

    def leave_out(self, value: Any, time_ns: int) -> None:
        """Count a late value, and send it to the late output."""
        runtime, query_id = self._group.runtime, self._group.root.id
        self._late += 1
        runtime.late[query_id] += 1
        self.changed()
        if self._late_output is not None:
            late = LateValue(
                value=value, time_ns=time_ns, clock_ns=self.now_ns, place=f"query {query_id}", reason="late"
            )
            runtime.output(self._late_output).on_next(late)
            runtime.uncertain.add(query_id)
        if is_worth_logging(self._late):
            logger.warning(
                "value_late query=%s operator=%s late_ms=%d output=%s total=%d",
                query_id,
                self.NAME,
                (self.watermark_ns - time_ns) // 1_000_000,
                self._late_output,
                self._late,
            )


def held_ns(operator: Operator[Any, Any]) -> int:
    """How many ns the watermark after this operator is behind the clock."""
    before = max(map(held_ns, operator._inputs), default=0)
    return before + isinstance(operator, TimeOperator)


def order_of(key: Any) -> tuple[str, Any]:
    """Return a sort key for a key of any type.

    Numbers and texts are sorted by their own order, other types by their stored text.
    """
    match key:
        case bool():
            return "bool", key
        case int():
            return "number", key
        case float() if not math.isnan(key):
            return "number", key
        case str():
            return "str", key
        case bytes():
            return "bytes", key
        case tuple():
            return "tuple", tuple(map(order_of, key))
        case _:
            return f"{type(key).__name__} ", encode({"key": plain(key)})

"""Starts queries, and sets their time before each value.

If the clock follows the values, there is no time before the first one. Queries started before it wait for it,
because otherwise their timers would be due since 1970.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from rt.query.core.operator_group import OperatorGroup
from rt.query.core.scheduler import Scheduler, VirtualScheduler


class QueryClock:
    """Not thread-safe. `now_ns`: the saved time; None: time had not started."""

    def __init__(self, scheduler: Scheduler, now_ns: int | None) -> None:
        self._scheduler: Final = scheduler
        self._has_started = now_ns is not None
        self._follows_values = False
        self._waiting: dict[str, tuple[OperatorGroup, dict[str, int] | None]] = {}
        scheduler.restore(now_ns or 0)

    @property
    def now_ns(self) -> int | None:
        """The time to save."""
        return self._scheduler.now_ns if self.has_time else None

    def follow_values(self) -> None:
        """Let `advance` set the time; `ValueError` unless the scheduler is virtual."""
        if not isinstance(self._scheduler, VirtualScheduler):
            raise ValueError("time_of needs a VirtualScheduler")  # noqa: TRY004
        self._follows_values = True

    def start(self, group: OperatorGroup, watermarks: dict[str, int] | None) -> None:
        """Start a query now, or when time starts."""
        if self.has_time:
            group.guard(group.start, watermarks)
        else:
            self._waiting[group.id] = group, watermarks

    def advance(self, now_ns: int | None) -> None:
        """Fire the timers due before a value. `now_ns`: its time; None if it has none."""
        if now_ns is None:
            assert not self._waiting
            while self._scheduler.run_due():
                pass
            return
        assert isinstance(self._scheduler, VirtualScheduler)
        if not self._has_started:
            self.start_time(now_ns)
        self._scheduler.advance_to(now_ns)

    @property
    def has_time(self) -> bool:
        return self._has_started or not self._follows_values

    @property
    def has_waiting_queries(self) -> bool:
        return bool(self._waiting)

    def cancel_start(self, query_id: str) -> None:
        """Do not start a waiting query. Does nothing if it does not wait."""
        self._waiting.pop(query_id, None)

    def start_time(self, now_ns: int) -> None:
        self._has_started = True
        self._scheduler.restore(now_ns)
        waiting, self._waiting = self._waiting, {}
        for group, watermarks in waiting.values():
            group.mark()
            group.guard(partial(group.start, watermarks, is_new=True))

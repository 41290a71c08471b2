"""Time for queries: timers at absolute times on a given clock.

Invariants:
- Timers fire only in `run_due` and `advance_to`, on the calling thread.
- Timers fire in the order of their times, and at equal times in the order of their creation. This order is
  saved. A timer in the past fires at the next call.
- The clock never goes back.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from rt.errors import InvalidOption

NS_PER_S: Final = 1_000_000_000

Duration = float | int | timedelta
"""Seconds, or a timedelta."""


def duration_ns(duration: Duration) -> int:
    """Whole nanoseconds; `ValueError` for a negative or infinite duration."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not 0 <= seconds < 2**33:
        raise InvalidOption(f"a duration must be 0 to {2**33} seconds, got {seconds}")
    return round(seconds * NS_PER_S)


_CANCELLED_MAX: Final = 64


class Timer:
    """An action at a time. `order` sorts timers with equal times."""

    __slots__ = ("_action", "_on_cancel", "due_ns", "order")

    def __init__(
        self, due_ns: int, order: int, action: Callable[[], object], on_cancel: Callable[[], object]
    ) -> None:
        self.due_ns: Final = due_ns
        self.order: Final = order
        self._action: Callable[[], object] | None = action
        self._on_cancel: Final = on_cancel

    def cancel(self) -> None:
        """Idempotent."""
        if self._action is not None:
            self._action = None
            self._on_cancel()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled or has fired."""
        return self._action is None

    def fire(self) -> None:
        """Run the action once, unless cancelled."""
        action, self._action = self._action, None
        if action is not None:
            action()

    def __lt__(self, other: Timer) -> bool:
        return (self.due_ns, self.order) < (other.due_ns, other.order)


class Scheduler:
    """Timers, and a clock that changes only between calls of `run_due`. Not thread-safe."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns
        self._heap: list[Timer] = []
        self._order = 0
        self._cancelled = 0
        """Number of cancelled timers in the heap: at most half of it, or `_CANCELLED_MAX`."""

    @property
    def now_ns(self) -> int:
        """The time, in ns since the Unix epoch."""
        return self._now_ns

    @property
    def next_due_ns(self) -> int | None:
        """When the next timer fires; None if there is none."""
        while self._heap and self._heap[0].is_cancelled:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0].due_ns if self._heap else None

    def at(self, due_ns: int, action: Callable[[], object], *, order: int | None = None) -> Timer:
        """Run `action` at this time. `order`: that of a saved timer."""
        if order is None:
            order = self._order
        self._order = max(self._order, order + 1)
        timer = Timer(due_ns, order, action, self._count_cancelled)
        heapq.heappush(self._heap, timer)
        return timer

    def run_due(self) -> bool:
        """Fire the next due timer. Returns whether there was one."""
        due_ns = self.next_due_ns
        if due_ns is None or due_ns > self._now_ns:
            return False
        heapq.heappop(self._heap).fire()
        return True

    def _count_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > max(_CANCELLED_MAX, len(self._heap) // 2):
            self._heap = [timer for timer in self._heap if not timer.is_cancelled]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def restore(self, now_ns: int) -> None:
        """Set the clock to a saved time, if that is later."""
        self._now_ns = max(self._now_ns, now_ns)


class VirtualScheduler(Scheduler):
    """A clock that is set by the caller, or by the times of messages: every run is the same."""

    def advance_to(self, now_ns: int) -> None:
        """Set the clock, and fire each timer due before at its own time. The clock never goes back."""
        while self._heap and (due_ns := self.next_due_ns) is not None and due_ns <= now_ns:
            self._now_ns = max(self._now_ns, due_ns)
            self.run_due()
        self._now_ns = max(self._now_ns, now_ns)


class RealScheduler(Scheduler):
    """The system's clock. Timers fire when the engine calls `run_due`."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(clock_ns())
        self._clock_ns: Final = clock_ns

    @property
    def now_ns(self) -> int:
        """The time; if the system's clock was set back, the latest time seen."""
        self._now_ns = max(self._now_ns, self._clock_ns())
        return self._now_ns

    def run_due(self) -> bool:
        self.restore(self._clock_ns())
        return super().run_due()

"""Time for queries: timers at absolute times on a given clock.

Invariants:
- Timers fire only in `run_due` and `advance_to`, on the calling thread.
- Timers fire in the order of their times, and at equal times in the order in which they were set. This order
  is saved. The first timers of a query come after all other timers set at the time of its start. This is also
  true if a recovery starts the query before the clock has reached that time again. A timer in the past fires
  at the next call.
- The clock never goes back.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final

from rt.errors import InvalidOption
from rt.option_checks import check_count

NS_PER_S: Final = 1_000_000_000

logger = logging.getLogger("rt.query")

Duration = float | int | timedelta
"""Seconds, or a timedelta."""


def duration_ns(duration: Duration) -> int:
    """Whole nanoseconds; `ValueError` for a negative or infinite duration."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not 0 <= seconds < 2**33:
        raise InvalidOption(f"a duration must be 0 to {2**33} seconds, got {seconds}")
    return round(seconds * NS_PER_S)


def next_tick_ns(due_ns: int, every_ns: int, now_ns: int) -> int:
    """The first `due_ns + n * every_ns` after `now_ns`, n from 1. Missed ticks are left out."""
    return due_ns + every_ns * max(1, (now_ns - due_ns) // every_ns + 1)


_AHEAD_S: Final = 1.0
"""If the time is ahead of the system's clock by at least this many seconds, this is logged."""
_CANCELLED_MAX: Final = 64
_FEW: Final = 16
"""New timers are pushed to the heap one by one if they are at most 1/`_FEW` of its timers."""

TICKS_MAX: Final = 100
"""Default number of ticks of one operator in one jump of a virtual clock."""


_AT_START: Final = 1 << 62
"""Added to the order of timers that a query sets when it starts, because a query starts after the events of
that time.
"""


class Timer:
    """An action at a time. `order` is its position among timers with equal times: `set_ns`, then a number."""

    __slots__ = ("_action", "_on_cancel", "due_ns", "order")

    def __init__(
        self,
        due_ns: int,
        order: tuple[int, int],
        action: Callable[[], object],
        on_cancel: Callable[[], object],
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
        """Called by the heap if time and order are equal. This is possible only for timers of two
        histories.
        """
        return False


SavedTimer = tuple[Callable[[], object], int, int, int]
"""The action and the time, and the two parts of `Timer.order`."""


class Scheduler:
    """Timers, and a clock that changes only between calls of `run_due`. Not thread-safe."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns
        self.event_ns: int | None = None
        """The time of the value that is being processed. None: the time of the clock is used."""
        self.is_starting = False
        """Whether a query is starting, and sets its first timers."""
        self._heap: list[tuple[int, int, int, Timer]] = []
        self._next_number = 0
        self._cancelled = 0
        """Number of cancelled timers in the heap: at most half of it, or `_CANCELLED_MAX`."""

    @property
    def now_ns(self) -> int:
        """The time, in ns since the Unix epoch."""
        return self._now_ns

    def event_time(self, now_ns: int) -> int:
        """The time of the value that is being processed; the present time, if there is none."""
        return now_ns if self.event_ns is None else self.event_ns

    def skip_ns(self, due_ns: int, every_ns: int) -> int:  # noqa: ARG002
        """The time at which a periodic operator that has nothing to do must fire, instead of at its tick
        `due_ns`.
        """
        return due_ns

    @property
    def next_due_ns(self) -> int | None:
        """When the next timer fires; None if there is none."""
        while self._heap and self._heap[0][3].is_cancelled:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def at(self, due_ns: int, action: Callable[[], object], *, set_ns: int | None = None) -> Timer:
        """Run `action` at this time. `set_ns`: the present time for the caller. Default: the clock's."""
        set_ns = self.now_ns if set_ns is None else set_ns
        number = self._next_number + _AT_START if self.is_starting else self._next_number
        self._next_number += 1
        timer = Timer(due_ns, (set_ns, number), action, self._count_cancelled)
        heapq.heappush(self._heap, (due_ns, set_ns, number, timer))
        return timer

    def restore_timers(self, saved: Iterable[SavedTimer]) -> list[Timer]:
        """Set saved timers."""
        on_cancel = self._count_cancelled
        made = [
            Timer(due_ns, (set_ns, number), action, on_cancel) for action, due_ns, set_ns, number in saved
        ]
        numbers = (each.order[1] % _AT_START + 1 for each in made)
        self._next_number = max(self._next_number, max(numbers, default=0))
        entries = ((each.due_ns, *each.order, each) for each in made)
        if len(made) > len(self._heap) // _FEW:
            self._heap.extend(entries)
            heapq.heapify(self._heap)
        else:  # the usual case if many queries have a few timers each
            for entry in entries:
                heapq.heappush(self._heap, entry)
        return made

    def run_due(self) -> bool:
        """Fire the next due timer. Returns whether there was one."""
        due_ns = self.next_due_ns
        if due_ns is None or due_ns > self._now_ns:
            return False
        self.event_ns = None
        heapq.heappop(self._heap)[3].fire()
        return True

    def _count_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > max(_CANCELLED_MAX, len(self._heap) // 2):
            self._heap = [each for each in self._heap if not each[3].is_cancelled]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def restore(self, now_ns: int) -> None:
        """Set the clock to a saved time, if that is later."""
        self._now_ns = max(self._now_ns, now_ns)


class VirtualScheduler(Scheduler):
    """A clock that is set by the caller, or by the times of messages: every run is the same.

    `ticks_max`: one call of `advance_to` fires a periodic operator that has nothing to do (an `interval`, a
    window without values) at most about this many times. It fires at the last ticks before the new time.
    """

    def __init__(self, now_ns: int = 0, *, ticks_max: int = TICKS_MAX) -> None:
        super().__init__(now_ns)
        self._ticks_max: Final = check_count(ticks_max, name="ticks_max", least=1)
        self._target_ns = now_ns

    def expect(self, now_ns: int) -> None:
        """Set the time to which the clock advances next. `advance_to` also sets it."""
        self._target_ns = now_ns

    def skip_ns(self, due_ns: int, every_ns: int) -> int:
        ticks = (self._target_ns - due_ns) // every_ns
        return due_ns + every_ns * max(0, ticks - self._ticks_max)

    def advance_to(self, now_ns: int, timers_max: int | None = None) -> bool:
        """Set the clock, and fire each timer that is due until then at its own time. The clock never goes
        back.

        Returns False if `timers_max` timers fired and more are due. Then the clock is at the time of the last
        one. Call it again for the rest.
        """
        left = timers_max
        while self._heap and (due_ns := self.next_due_ns) is not None and due_ns <= now_ns:
            if left is not None:
                if not left:
                    return False
                left -= 1
            if due_ns > self._now_ns:
                # Not earlier, because `run_due` might already have fired the timers of the present time.
                self.expect(now_ns)
                self._now_ns = due_ns
            self.run_due()
        self.expect(now_ns)
        self._now_ns = max(self._now_ns, now_ns)
        return True


class RealScheduler(Scheduler):
    """The system's clock. Timers fire when the engine calls `run_due`.

    If the system's clock is behind, since it was set back or was ahead at the last checkpoint, the time goes
    on from the latest one seen, at the rate of a monotonic clock, until the system's clock has caught up.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(clock_ns())
        self._clock_ns: Final = clock_ns
        self._monotonic_ns: Final = monotonic_ns
        self._offset_ns: int | None = None
        """The difference between the time and the monotonic clock, while the system's clock is behind."""

    @property
    def now_ns(self) -> int:
        """The time. It goes on if the system's clock was set back."""
        system_ns = self._clock_ns()
        if system_ns >= self._now_ns:
            self._offset_ns = None
            self._now_ns = system_ns
        elif self._offset_ns is None:
            self._offset_ns = self._now_ns - self._monotonic_ns()
            self._warn(system_ns)
        else:
            self._now_ns = max(system_ns, self._monotonic_ns() + self._offset_ns)
        return self._now_ns

    def restore(self, now_ns: int) -> None:
        super().restore(now_ns)
        self._offset_ns = None

    def run_due(self) -> bool:
        self._now_ns = self.now_ns
        return super().run_due()

    def _warn(self, system_ns: int) -> None:
        """Log once that the time is now ahead by at least `_AHEAD_S`.

        Less is not logged, because clocks are often set back by a small amount.
        """
        ahead_s = (self._now_ns - system_ns) / NS_PER_S
        if ahead_s >= _AHEAD_S:
            logger.warning("clock_ahead seconds=%.1f", ahead_s)

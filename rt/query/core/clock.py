"""Starts queries, and sets their time before each value.

If the clock follows the values, its time is the lowest watermark of the active sources with `time_of`. A
watermark means that no value with an earlier time is expected from the source. A source that has ended or is
idle does not hold the clock back. If there is no active source, the time is the highest watermark.

The time starts when every active source has its first value. Queries that are started earlier wait for the
time, because otherwise their timers would be due since 1970. Values wait too, so that the time starts at the
same value, no matter which source is first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict

from msgspec import Struct

from rt.errors import InvalidOption
from rt.query.core.errors import Backlogged
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.scheduler import NS_PER_S, Duration, Scheduler, VirtualScheduler, duration_ns

if TYPE_CHECKING:
    from rt.query.core.source import ValueFeed


TIME_END_NS: Final = 1 << 63
"""All times are at least 0 and below this one, which is in the year 2262. The times of messages have the same
range. The clock starts at 0, so all windows of a value with an earlier time would be closed. A later time is
in another unit.
"""


class LateValue(TypedDict):
    """What a late output gets. `clock_ns`: the queries' time when the value came.

    `place`: "query <id>" or "source <name>". `reason`: "late" if what the value belongs to is closed,
    "max_jump_s" if its time is too far ahead.
    """

    value: Any
    time_ns: int
    clock_ns: int
    place: str
    reason: str


def is_worth_logging(count: int) -> bool:
    """Whether this is the first, tenth, hundredth … value: a line for each would fill the log."""
    return str(count).strip("0") == "1"


class EventTime(Struct, frozen=True):
    """The event time of a source. `watermark_ns`: None before its first value.

    `late`: number of values with a time before the clock. `refused`: number of values that were not processed
    because of `max_jump_s`.
    """

    watermark_ns: int | None
    is_idle: bool
    late: int
    refused: int


class SourceTiming(TypedDict, total=False):
    """Options of a source with `time_of`.

    The queries' clock starts with the first value. Timers that are due between two values fire between them.
    The source's watermark is its highest time minus `max_out_of_orderness_s`. The clock is the lowest
    watermark of all such sources. It does not wait for a source that sent nothing for `idle_s` seconds: see
    `EventTimes.check_idle`. A value whose time is more than `max_jump_s` after the highest time so far does
    not advance the clock. It is sent to the sink `late` as a `LateValue`, and to no query. Without `late`,
    `ClockJump` is raised and the value is not accepted.
    """

    max_out_of_orderness_s: Duration
    idle_s: Duration | None
    max_jump_s: Duration | None
    late: str | None


class SourceTime:
    """The times of a source's values. `high_ns`: the highest one, or None. See `SourceTiming`."""

    feed: ValueFeed
    """Set before it is used."""

    def __init__(
        self,
        time_of: Callable[[Any], int],
        *,
        max_out_of_orderness_s: Duration = 0,
        idle_s: Duration | None = None,
        max_jump_s: Duration | None = None,
        late: str | None = None,
    ) -> None:
        self.time_of: Final = time_of
        self.max_jump_ns: Final = None if max_jump_s is None else duration_ns(max_jump_s)
        self.late_output: Final = late
        self.delay_ns: Final = duration_ns(max_out_of_orderness_s)
        self._idle_s: Final = None if idle_s is None else duration_ns(idle_s) / NS_PER_S
        if self._idle_s is not None and self._idle_s <= 0:
            raise InvalidOption(f"idle_s must be more than 0, got {idle_s}")
        if late is not None and max_jump_s is None:
            raise InvalidOption("late is the output for values beyond max_jump_s: set max_jump_s too")
        self.high_ns: int | None = None
        self.is_idle = False
        self.late = 0
        self.refused = 0
        self._last_id: int | None = None
        self._active_at_s = 0.0

    @property
    def is_active(self) -> bool:
        """Whether the clock waits for the source."""
        return not self.is_idle and not self.feed.has_ended

    @property
    def watermark_ns(self) -> int | None:
        return None if self.high_ns is None else self.high_ns - self.delay_ns

    def is_beyond(self, time_ns: int) -> bool:
        """Whether the clock must not follow a value with this time."""
        return (
            self.max_jump_ns is not None
            and self.high_ns is not None
            and time_ns - self.high_ns > self.max_jump_ns
        )

    def check_idle(self, now_s: float, *, is_waiting: bool) -> None:
        """Become idle if no value was accepted for `idle_s`. `is_waiting`: its values may be refused."""
        if self._idle_s is None:
            return
        if is_waiting or self.feed.watermark != self._last_id:
            self._last_id, self._active_at_s = (None if is_waiting else self.feed.watermark), now_s
        elif now_s - self._active_at_s >= self._idle_s:
            self.is_idle = True

    def status(self) -> EventTime:
        return EventTime(self.watermark_ns, self.is_idle, self.late, self.refused)

    def save(self) -> list[Any]:
        return [self.high_ns, self.is_idle, self.late, self.refused]

    def load(self, saved: list[Any]) -> None:
        self.high_ns, self.is_idle, self.late, self.refused = saved


TURN: Final = 1000
"""Number of timers that fire before other threads may use the engine. They take some milliseconds."""


class QueryClock:
    """Not thread-safe. `now_ns`: the saved time; None: time had not started."""

    def __init__(self, scheduler: Scheduler, now_ns: int | None) -> None:
        self._scheduler: Final = scheduler
        self._has_started = now_ns is not None
        self._follows_values = False
        self._sources: dict[str, SourceTime] = {}
        self._waiting: dict[str, tuple[OperatorGroup, dict[str, int] | None]] = {}
        scheduler.restore(now_ns or 0)
        self._target_ns = scheduler.now_ns
        """The time that the values so far allow. The clock may not have reached it yet."""
        self._is_recovered = now_ns is not None
        """Whether `_target_ns` must be computed again: the saved clock may not have reached its target."""

    @property
    def now_ns(self) -> int | None:
        """The time to save."""
        return self._scheduler.now_ns if self.has_time else None

    def follow_values(self) -> None:
        """Let `advance` set the time; `ValueError` unless the scheduler is virtual."""
        if not isinstance(self._scheduler, VirtualScheduler):
            raise ValueError("time_of needs a VirtualScheduler")  # noqa: TRY004
        self._follows_values = True

    def add_source(self, source: SourceTime) -> None:
        """Follow the values of this source."""
        self._sources[source.feed.name] = source

    def drop_source(self, name: str) -> None:
        """Does nothing if the clock does not follow the source."""
        self._sources.pop(name, None)

    def sources_with(self, *, late_output: str) -> list[str]:
        return [name for name, each in self._sources.items() if each.late_output == late_output]

    @property
    def saved_sources(self) -> dict[str, list[Any]]:
        return {name: each.save() for name, each in self._sources.items()}

    @property
    def event_times(self) -> dict[str, EventTime]:
        return {name: each.status() for name, each in self._sources.items()}

    def start(self, group: OperatorGroup, watermarks: dict[str, int] | None) -> None:
        """Start a query now, or when time starts."""
        if self.has_time:
            group.guard(group.start, watermarks)
        else:
            self._waiting[group.id] = group, watermarks

    def see(self, source: SourceTime, time_ns: int) -> int:
        """Take note of the time of a value that comes next. Returns the time to which to `advance` first.

        May be called again for the same value, if the clock was interrupted before it reached this time.
        `Backlogged` if the time cannot start because another source has no value yet.
        """
        high_ns = source.high_ns
        if high_ns is not None and not source.is_idle and self._has_started and not self._is_recovered:
            if time_ns <= high_ns:
                return self._target_ns
            if len(self._sources) == 1:
                source.high_ns = time_ns
                self._target_ns = max(self._target_ns, time_ns - source.delay_ns)
                return self._target_ns
        source.high_ns = time_ns if high_ns is None else max(high_ns, time_ns)
        source.is_idle = self._is_recovered = False
        now_ns = self._event_time()
        if now_ns is None and not self._has_started:
            raise Backlogged(
                "the queries' time has not started",
                where=[
                    name for name, each in self._sources.items() if each.is_active and each.high_ns is None
                ],
                hint="It starts with the first values of all these sources. Give sources that may be silent"
                " idle_s.",
            )
        if now_ns is not None:
            self._target_ns = max(self._target_ns, now_ns) if self._has_started else now_ns
        return self._target_ns

    def advance(self, now_ns: int | None) -> bool:
        """Fire the timers due before a value. `now_ns`: the time; None if the value has none.

        Returns False if `TURN` timers fired and more are due: call it again before the value is processed. In
        real time a value does not wait for these timers.
        """
        self._scheduler.event_ns = None
        if now_ns is None:
            assert not self._waiting
            if not self._scheduler.run_due():  # the usual case: no timer is due
                return True
            return self.run_turn() < TURN or not isinstance(self._scheduler, VirtualScheduler)
        assert isinstance(self._scheduler, VirtualScheduler)
        if not self._has_started:
            self.start_time(now_ns)
        return self._scheduler.advance_to(now_ns, TURN)

    def run_turn(self, is_refused: Callable[[], bool] = lambda: False) -> int:
        """Fire due timers, at most `TURN`, until `is_refused()`. Returns how many fired."""
        for fired in range(TURN):
            if is_refused() or not self._scheduler.run_due():
                return fired
        return TURN

    def process(self, source: SourceTime, time_ns: int) -> None:
        """Take note that a value with this time is processed now, until the next event."""
        self._scheduler.event_ns = time_ns
        if time_ns < self._scheduler.now_ns:
            source.late += 1

    def check_idle(self, now_s: float, *, is_refusing: bool) -> None:
        """Find idle sources, by the time of a monotonic clock. `is_refusing`: an output is full."""
        for each in self._sources.values():
            is_refused = not self._has_started and each.high_ns is not None
            each.check_idle(now_s, is_waiting=is_refusing or is_refused)

    def catch_up(self) -> bool:
        """Advance if a source that ended or became idle held the clock back. Returns the same as
        `advance`.
        """
        if not self._follows_values:
            return True
        now_ns = self._event_time()
        if now_ns is not None:
            if not self._has_started or now_ns > self._scheduler.now_ns:
                self._target_ns = max(self._target_ns, now_ns)
                return self.advance(now_ns)
        elif not self._has_started and all(each.feed.has_ended for each in self._sources.values()):
            self.start_time(self._scheduler.now_ns)
        return True

    @property
    def follows_values(self) -> bool:
        """Whether the values of sources set the time."""
        return self._follows_values

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

    def _event_time(self) -> int | None:
        """The time to which the values allow the clock to advance.

        None if the clock must stay, because an active source has no value yet, or there is no source.
        """
        active = [each.watermark_ns for each in self._sources.values() if each.is_active]
        known = [each for each in active if each is not None]
        if active:
            return min(known) if len(known) == len(active) else None
        ended = [each.watermark_ns for each in self._sources.values()]
        return max((each for each in ended if each is not None), default=None)

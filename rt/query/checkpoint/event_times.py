"""The event time of an engine: `engine.event_time`."""

from __future__ import annotations

from typing import Final

from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.core.clock import EventTime, QueryClock
from rt.query.core.lifecycle import EventLock
from rt.query.core.runtime import QueryRuntime


class EventTimes:
    """Thread-safe."""

    def __init__(self, runtime: QueryRuntime, clock: QueryClock, edges: EdgeTable, lock: EventLock) -> None:
        self._runtime: Final = runtime
        self._clock: Final = clock
        self._edges: Final = edges
        self._lock: Final = lock

    @property
    def sources(self) -> dict[str, EventTime]:
        """By source with `time_of`: its watermark, and how many of its values were late."""
        with self._lock.next():
            return self._clock.event_times

    @property
    def late_values(self) -> dict[str, int]:
        """By query: the number of values that its windows and joins left out because they were late."""
        with self._lock.next():
            return {query_id: count for query_id, count in self._runtime.late.items() if count}

    def check_idle(self, now_s: float) -> None:
        """Find the sources that sent nothing for their `idle_s`. `now_s`: the time of a monotonic clock.

        The queries' clock then no longer waits for them; `run_due` advances it. `EngineRunner` calls this.
        """
        with self._lock:
            self._clock.check_idle(now_s, is_refusing=self._edges.is_backlogged)

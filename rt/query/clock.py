"""When queries begin, and what time it is for them before each value.

Where the clock goes by the values there is no time before the first one: what is started waits for it, as
its timers would be due since 1970.
"""

from __future__ import annotations

from typing import Final

from rt.query.artifact import Artifact
from rt.query.scheduling import Scheduler, VirtualScheduler


class QueryClock:
    """Not thread-safe. `now_ns` is what was saved of it, None: time had not begun."""

    def __init__(self, scheduler: Scheduler, now_ns: int | None) -> None:
        self._scheduler: Final = scheduler
        self._has_begun = now_ns is not None
        self._goes_by_values = False
        self._waiting: dict[str, tuple[Artifact, dict[str, int] | None]] = {}
        scheduler.restore(now_ns or 0)

    @property
    def now_ns(self) -> int | None:
        """To be saved."""
        return self._scheduler.now_ns if self.has_time else None

    def go_by_values(self) -> None:
        """`advance` will be told the times; `ValueError` where the clock goes by itself."""
        if not isinstance(self._scheduler, VirtualScheduler):
            raise ValueError("time_of without a VirtualScheduler: there the clock goes by itself")  # noqa: TRY004
        self._goes_by_values = True

    def begin(self, artifact: Artifact, watermarks: dict[str, int] | None) -> None:
        """Start a query, now or when time begins."""
        if self.has_time:
            artifact.guard(artifact.start, watermarks)
        else:
            self._waiting[artifact.id] = artifact, watermarks

    def advance(self, now_ns: int | None) -> None:
        """Fire what is due, before a value of that time, or of one without."""
        if now_ns is None:
            assert not self._waiting
            while self._scheduler.run_due():
                pass
            return
        assert isinstance(self._scheduler, VirtualScheduler)
        if not self._has_begun:
            self.begin_time(now_ns)
        self._scheduler.advance_to(now_ns)

    @property
    def has_time(self) -> bool:
        """Whether there is a time."""
        return self._has_begun or not self._goes_by_values

    @property
    def is_awaited(self) -> bool:
        """Whether queries wait for the time to begin."""
        return bool(self._waiting)

    def forget(self, query_id: str) -> None:
        """A query is not to begin any more. Nothing if it does not wait."""
        self._waiting.pop(query_id, None)

    def begin_time(self, now_ns: int) -> None:
        """It is that time, and queries begin."""
        self._has_begun = True
        self._scheduler.restore(now_ns)
        waiting, self._waiting = self._waiting, {}
        for artifact, watermarks in waiting.values():
            artifact.mark()
            artifact.guard(lambda each, after: each.start(after, is_new=True), artifact, watermarks)

"""Logs when full outputs stop the sources of an engine, and when the sources continue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from rt.log_limit import LogLimit

logger = logging.getLogger("rt.query")

_LOG_EVERY_S: Final = 60.0


class BacklogLog:
    """Receives the names of the full outputs each time they are checked. Thread-safe.

    A stop is logged at most once a minute. The end of a stop is logged if the stop was logged. `stops` counts
    all stops. A full `map_async` stops the sources too, but does not count here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._limit = LogLimit(_LOG_EVERY_S)
        self._lock = threading.Lock()
        self._since: float | None = None
        self._is_logged = False
        self._ended_s = 0.0
        self.stops = 0

    @property
    def stopped_s(self) -> float:
        """Seconds of all stops, the present one included."""
        with self._lock:
            return self._ended_s + (0.0 if self._since is None else self._clock() - self._since)

    def update(self, full: Collection[str]) -> None:
        if not full and self._since is None:
            return  # Usually. If another thread starts a stop now, the next check ends it.
        with self._lock:
            if full and self._since is None:
                self._since = self._clock()
                self.stops += 1
                left_out = self._limit.admit(self._since)
                self._is_logged = left_out is not None
                if left_out is not None:
                    names = ",".join(sorted(full))
                    logger.warning("sources_stopped full_outputs=%s not_logged=%d", names, left_out)
            elif not full and self._since is not None:
                stopped_s, self._since = self._clock() - self._since, None
                self._ended_s += stopped_s
                if self._is_logged:
                    logger.warning("sources_continue after_s=%.1f", stopped_s)

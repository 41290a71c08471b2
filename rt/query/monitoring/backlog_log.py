"""Logs when full outputs stop the sources of an engine, and when these continue."""

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
    """Called with the names of the full outputs, as often as these are looked at. Thread-safe.

    A stop is logged at most once a minute, and its end if the stop was logged. `stops` counts all stops,
    `stopped_s` is the seconds of the stops that ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._limit = LogLimit(_LOG_EVERY_S)
        self._lock = threading.Lock()
        self._since: float | None = None
        self._is_logged = False
        self.stops = 0
        self.stopped_s = 0.0

    def update(self, full: Collection[str]) -> None:
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
                self.stopped_s += stopped_s
                if self._is_logged:
                    logger.warning("sources_continue after_s=%.1f", stopped_s)

"""Logs why the merger cannot merge: at first, then once a minute. The merger tries five times a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from rt.errors import RtError

LOG_AGAIN_S: Final = 60.0

logger = logging.getLogger("sequencer")


class BlockedLog:
    """For one thread at a time. Another problem, or the same at another place, is logged at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = ""
        self._logged_s = 0.0

    def record(self, error: RtError) -> None:
        now, text = self._clock(), str(error)
        if text != self._last or now >= self._logged_s + LOG_AGAIN_S:
            self._last, self._logged_s = text, now
            logger.warning("merge_blocked error=%r", text)

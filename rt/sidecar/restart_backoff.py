"""What the supervisors of `rt push` and `rt pull` share: restart pauses, environment, garbage collection."""

from __future__ import annotations

import gc
import os
import time
from typing import Final

RESTART_SECONDS_MIN: Final = 0.1
RESTART_SECONDS_MAX: Final = 5.0
SETTLED_SECONDS: Final = 10.0
"""A process that ran this long is restarted soon after it dies."""


class RestartBackoff:
    """Pauses between a child's end and its next start: each twice as long, until a child ran long enough."""

    def __init__(self) -> None:
        self._pause = RESTART_SECONDS_MIN
        self._started_at = 0.0

    def record_start(self) -> None:
        """The child starts now."""
        self._started_at = time.monotonic()

    def record_end(self) -> float:
        """The child has ended. Returns the seconds until its next start."""
        if time.monotonic() - self._started_at > SETTLED_SECONDS:
            self._pause = RESTART_SECONDS_MIN
        pause, self._pause = self._pause, min(2 * self._pause, RESTART_SECONDS_MAX)
        return pause


def environment(command: str) -> dict[str, str]:
    """This process's environment, without options that are meant for the user's own `rt <command>`."""
    prefix = f"RT_{command.upper()}_"
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


def spare_what_is_loaded() -> None:
    """Collect garbage once, then exclude all existing objects from later collections.

    Imports create some 60,000 objects that stay. A full collection, which stops all threads, then takes a few
    ms instead of some 70.
    """
    gc.collect()
    gc.freeze()

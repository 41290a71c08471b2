"""What those who supervise `rt push` and `rt pull` share: its environment, and when it is started again."""

from __future__ import annotations

import os
import time
from typing import Final

RESTART_SECONDS_MIN: Final = 0.1
RESTART_SECONDS_MAX: Final = 5.0
SETTLED_SECONDS: Final = 10.0
"""A process that has run for so long is started again soon, should it die."""


class Restarts:
    """Pauses between a child's end and its next start: twice as long each time, until one has settled."""

    def __init__(self) -> None:
        self._pause = RESTART_SECONDS_MIN
        self._started_at = 0.0

    def note_start(self) -> None:
        """The child starts now."""
        self._started_at = time.monotonic()

    def note_end(self) -> float:
        """The child has ended; the seconds until it may start again."""
        if time.monotonic() - self._started_at > SETTLED_SECONDS:
            self._pause = RESTART_SECONDS_MIN
        pause, self._pause = self._pause, min(2 * self._pause, RESTART_SECONDS_MAX)
        return pause


def environment(command: str) -> dict[str, str]:
    """Ours, without the options that it has for an `rt <command>` of the user's."""
    prefix = f"RT_{command.upper()}_"
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}

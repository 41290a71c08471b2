"""How long a process has been silent while the listener itself was running, and what to do about it. Pure."""

from __future__ import annotations

from typing import Final

HUNG_S: Final = 5.0
"""A process that was silent for longer is stuck or stopped: it reports every two seconds at least."""
_STEP_S_MAX: Final = 2.0
"""If a step is longer, the listener was paused and did not read the messages that arrived meanwhile."""


def next_step(process: str, place: str, pid: int = 0) -> str:
    """What to do about a hung process of a node at `place`. `pid`: its id, if that is known."""
    found = "" if pid else f"find its PID with `pgrep -af 'child_main {process}'`, then look at "
    number = pid or "PID"
    return (
        f"On {place}: {found}`grep State /proc/{number}/status`. If that is T (stopped): "
        f"`kill -CONT {number}`. Otherwise `kill -9 {number}`: the node starts it again, and nothing "
        "acknowledged is lost."
    )


class SilenceDetector:
    """Adds up the time between calls of `update`. Each `record_message` sets it back to 0."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self.is_paused = False
        """Whether the listener reads nothing at the moment. This time does not count."""
        self._updated_s: float | None = None

    def record_message(self) -> None:
        self.silent_s = 0.0

    def update(self, now_s: float) -> float:
        """Returns the seconds of silence. Call it about once a second."""
        if self._updated_s is not None and not self.is_paused:
            self.silent_s += min(max(now_s - self._updated_s, 0.0), _STEP_S_MAX)
        self._updated_s = now_s
        return self.silent_s

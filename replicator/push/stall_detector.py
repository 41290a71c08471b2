"""Measures for how long a push makes no progress although bytes wait. Pure.

Invariants:
- An offset that was reached once is not counted as progress again. A restarted stream may have to start at an
  earlier offset.
- Bytes that came while this process was paused do not count as waiting during the pause.
"""

from __future__ import annotations

from typing import Final

from replicator.protocol.handshake import NOWHERE, PushStatus
from replicator.protocol.messages import LogOffset

STALLED_SECONDS: Final = 10.0
"""A push is stuck if its bytes wait for longer. An election takes less time; a full disk or link takes
more.
"""


class StallDetector:
    """Call `update` every `STATUS_SECONDS`."""

    def __init__(self) -> None:
        self.status = PushStatus()
        self._reached = NOWHERE
        self._moved_s = 0.0

    @property
    def stalled_s(self) -> float:
        return self.status.stalled_ms / 1000

    @property
    def is_stuck(self) -> bool:
        return self.stalled_s >= STALLED_SECONDS

    def update(self, now_s: float, reached: LogOffset, waiting_bytes: int) -> PushStatus:
        """Update the status. `waiting_bytes` is the number of bytes after `reached`."""
        if not (waiting_bytes and self.status.waiting_bytes) or reached > self._reached:
            self._moved_s = now_s
        self._reached = max(reached, self._reached)
        self.status = PushStatus(waiting_bytes, int(1000 * (now_s - self._moved_s)))
        return self.status

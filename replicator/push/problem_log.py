"""Logs why a session cannot reach its nodes: one line at first, then one a minute.

The streams of a session try again each second, so a line for each attempt would flood the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from rt.errors import RtError
from rt.sidecar.protocol import EndpointStatus

logger = logging.getLogger("replicator")

LOG_AGAIN_SECONDS: Final = 60.0


class PushReport(NamedTuple):
    """The connections of a push. `error` blocks it until its cause is fixed. A majority of `members`
    must be connected; 0: of the endpoints.
    """

    error: RtError | None
    endpoints: tuple[EndpointStatus, ...]
    members: int = 0

    @property
    def is_connected(self) -> bool:
        return any(endpoint.is_connected for endpoint in self.endpoints)

    @property
    def reasons(self) -> str:
        """Why each endpoint that is not connected failed."""
        return "; ".join(filter(None, (one.reason for one in self.endpoints)))


class ProblemLog:
    """Logs the problems of the session in `path`. Another event is logged at once."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._event: str | None = None
        """The event that was logged last; None if there is no problem."""
        self._logged_at = 0.0
        self._count = 0
        """Number of problems since that event was logged."""

    def record_report(self, report: PushReport) -> None:
        """Call it after each failed attempt, and each success."""
        is_complete = all(one.is_connected or one.error is not None for one in report.endpoints)
        if not report.reasons:
            self._clear()
        elif report.is_connected or is_complete:  # So that the first line names all endpoints.
            self.record("push_blocked" if report.error is not None else "push_waits", report.reasons)

    def record(self, event: str, reason: object) -> None:
        """Log the event if it is another one than the last, or the last line is old enough."""
        now = self._clock()
        self._count += 1
        if event == self._event and now < self._logged_at + LOG_AGAIN_SECONDS:
            return
        self._event, self._logged_at = event, now
        logger.warning("%s path=%s attempts=%d reason=%s", event, self._path, self._count, reason)
        self._count = 0

    def _clear(self) -> None:
        if self._event is not None:
            logger.info("push_recovered path=%s", self._path)
        self._event, self._count = None, 0

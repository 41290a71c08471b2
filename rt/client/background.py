"""The background thread of a publisher, and its duty to write lingering batches.

A duty is called with the time (of `time.monotonic`). It does the work that is due, and returns the seconds
until its next work. None means: not before it is woken.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, TypeAlias

from rt.errors import DiskFull
from rt.log.write.batcher import PendingBatch

logger = logging.getLogger("rt.client.publisher")

RETRY_SECONDS: Final = 0.1
"""How often to retry a batch after `rt.DiskFull`."""

Duty: TypeAlias = Callable[[float], float | None]


class BackgroundTasks:
    """Runs the `duties`, in order, when one is due or something was put into `wake`.

    Does nothing while `is_idle` returns True. If a duty raises, `on_failed` is called on this thread, the
    other duties of that round are skipped, and the thread continues.
    """

    def __init__(
        self,
        name: str,
        duties: Sequence[Duty],
        *,
        wake: SimpleQueue[None],
        is_idle: Callable[[], bool],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._duties, self._wake, self._is_idle, self._on_failed = duties, wake, is_idle, on_failed
        self.is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.is_stopping = True
        self._wake.put(None)
        if self._thread.is_alive():  # Its start may have failed, or was interrupted.
            self._thread.join()

    def _run(self) -> None:
        wait: float | None = None
        while not self.is_stopping:
            self._sleep(wait)
            if self._is_idle():
                wait = None
                continue
            now = monotonic()
            try:
                waits = [left for duty in self._duties if (left := duty(now)) is not None]
                wait = min(waits, default=None)
            except Exception as error:  # noqa: BLE001 - every failure must reach the publisher
                self._on_failed(error)

    def _sleep(self, seconds: float | None) -> None:
        with contextlib.suppress(Empty):
            self._wake.get(timeout=seconds)
            while True:
                self._wake.get_nowait()


class LingerDuty:
    """Writes the pending batch when it is `seconds` old, and retries while the disk is too full for it.

    `pending` returns the batch. `write` writes a batch, if it is still the pending one.
    """

    def __init__(
        self,
        seconds: float,
        pending: Callable[[], PendingBatch],
        write: Callable[[PendingBatch], None],
        session: str,
    ) -> None:
        self._seconds, self._pending, self._write, self._session = seconds, pending, write, session
        self._seen: tuple[PendingBatch, float] | None = None
        """The batch that was seen last, and when it was seen first."""
        self._told_full = False

    def run(self, now: float) -> float | None:
        """Returns the seconds until the batch has lingered, or until a retry; None if it is empty."""
        batch = self._pending()
        if self._seen is None or batch is not self._seen[0]:
            self._seen = batch, now
        if not batch.values:
            return None
        left = self._seen[1] + self._seconds - now
        if left > 0:
            return left
        try:
            self._write(batch)
        except DiskFull as error:
            if not self._told_full:
                logger.warning("disk_full session=%s path=%s", self._session, error.where)
            self._told_full = True
            return RETRY_SECONDS
        self._told_full = False
        return 0.0

"""The background thread of a publisher.

A duty is called with the time (of `time.monotonic`), does what is due, and returns the seconds until its next
work; None: not before it is woken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TypeAlias

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

"""The background thread of a publisher: does its duties when they are due.

A duty is called with the time (of `time.monotonic`), does what is due, and returns in how many seconds there
is more to do; None: not before it is woken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TypeAlias

Duty: TypeAlias = Callable[[float], float | None]


class Duties:
    """Does the `duties`, in their order, whenever one is due or something was put into `wake`.

    Nothing is done while `is_idle`. `on_failed` hears, on this thread and in the handler, what a duty raised;
    the others of that round are left out, and the thread goes on.
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
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End it; nothing is done any more when this returns. Stopping twice is allowed."""
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
            except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must hear of it
                self._on_failed(error)

    def _sleep(self, seconds: float | None) -> None:
        with contextlib.suppress(Empty):
            self._wake.get(timeout=seconds)
            while True:
                self._wake.get_nowait()

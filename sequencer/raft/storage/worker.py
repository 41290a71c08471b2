"""Work that would hold up the loop, one piece at a time on a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

Work: TypeAlias = Callable[[], Any]
Done: TypeAlias = Callable[[Any], None]
Failed: TypeAlias = Callable[[BaseException], None]


class BackgroundWorker(Protocol):
    """Runs work in order, away from the loop; its outcome comes back in the loop."""

    def run(self, work: Work, done: Done, failed: Failed) -> None:
        """Have `work` done; later `collect` calls `done` with what it returned, or `failed`."""

    def collect(self) -> None:
        """Hand over what has been done since; called in each round of the loop."""

    def close(self) -> None:
        """Return when nothing runs any more. What was not begun is never done."""


class Worker:
    """The real one. `wake` is called when something is to be collected."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._todo: SimpleQueue[tuple[Work, Done, Failed] | None] = SimpleQueue()
        self._finished: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Work, done: Done, failed: Failed) -> None:
        """Queue it."""
        self._todo.put((work, done, failed))

    def collect(self) -> None:
        """Call back, in the order the work was done."""
        while self._finished:
            self._finished.popleft()()

    def close(self) -> None:
        """Wait for what runs."""
        self._is_closing = True
        self._todo.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (task := self._todo.get()) is not None and not self._is_closing:
            work, done, failed = task
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  # whatever it is, the loop decides
                self._finished.append(lambda failed=failed, error=error: failed(error))  # type: ignore[misc]
            else:
                self._finished.append(lambda done=done, result=result: done(result))  # type: ignore[misc]
            self._wake()

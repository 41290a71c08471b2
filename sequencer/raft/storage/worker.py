"""Runs work that would delay the loop on a thread of its own, one piece at a time."""

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
    """Runs work in order, outside the loop. The results are delivered in the loop."""

    def run(self, work: Work, done: Done, failed: Failed) -> None:
        """Run `work`. Later `collect` calls `done` with its result, or `failed` with its error."""

    def collect(self) -> None:
        """Deliver results. Called in each round of the loop."""

    def close(self) -> None:
        """Wait until nothing runs. Work that was not started is dropped."""


class Worker:
    """Implements `BackgroundWorker` with a thread. `wake` is called when a result is ready."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._todo: SimpleQueue[tuple[Work, Done, Failed] | None] = SimpleQueue()
        self._finished: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Work, done: Done, failed: Failed) -> None:
        self._todo.put((work, done, failed))

    def collect(self) -> None:
        while self._finished:
            self._finished.popleft()()

    def close(self) -> None:
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

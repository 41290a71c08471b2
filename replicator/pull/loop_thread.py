"""An event loop in its own thread, for callers that are plain functions in other threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from rt.errors import Closed, closed_in_child

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines for one other thread. A forked child does not have the thread: `run` raises `rt.Closed`
    there.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._under_way: Future[Any] | None = None
        self._interrupted = threading.Event()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """False after `close`, and in a forked child."""
        return self._is_own and not self._loop.is_closed()

    @property
    def _is_own(self) -> bool:
        return self._pid == os.getpid()

    def require_open(self) -> None:
        """Raise `rt.Closed` in a forked child, and after `interrupt`."""
        self._require_own()
        if self._interrupted.is_set():
            raise Closed("another thread has ended the reads from the nodes")

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for the result of `work`. `rt.Closed` after `interrupt`."""
        under_way = self._submit(work)
        self._under_way = under_way
        if self._interrupted.is_set():
            under_way.cancel()
        try:
            return under_way.result()
        except CancelledError:
            self.require_open()
            raise

    def finish(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The same as `run`, but also after `interrupt`: for work that releases something."""
        return self._submit(work).result()

    def wait(self, seconds: float) -> None:
        """Wait for this time. `rt.Closed` after `interrupt`."""
        if self._interrupted.wait(seconds):
            self.require_open()

    def interrupt(self) -> None:
        """Make `run` and `wait` raise, including a call that is running. May be called from any thread."""
        self._interrupted.set()
        if (under_way := self._under_way) is not None:
            under_way.cancel()

    def close(self) -> None:
        """End the thread. Must not be called in a forked child."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        if not self._is_own:
            work.close()  # Else Python warns that it was never awaited.
        self._require_own()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _require_own(self) -> None:
        if not self._is_own:
            raise closed_in_child("the connection to the nodes")

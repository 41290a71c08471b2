"""An event loop in its own thread, for callers that are plain functions in other threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rt.errors import closed_in_child

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines. A forked child does not have the thread: `run` raises `rt.Closed` there."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """False after `close`, and in a forked child."""
        return self._is_own and not self._loop.is_closed()

    @property
    def _is_own(self) -> bool:
        return self._pid == os.getpid()

    def require_own(self) -> None:
        """Raise `rt.Closed` in a forked child."""
        if not self._is_own:
            raise closed_in_child("the connection to the nodes")

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for the result of `work`."""
        if not self._is_own:
            work.close()  # Else Python warns that it was never awaited.
        self.require_own()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the thread. Must not be called in a forked child."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

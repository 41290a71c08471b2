"""The tasks of the data process, and what ends it.

For one event loop. The law: what failed is not followed by anything: the first failure that may not be lived
with is kept, and the process ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from rt.errors import RtError

logger = logging.getLogger("sequencer")


class TaskGroup:
    """Every task of the process that is not somebody's own."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        """Set once the process is to end."""
        self.failure: RtError | None = None
        """What ends it; None if it was asked to."""
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside the rest. An `RtError` ends the work alone, anything else the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it for as long as the process lives: without it the process would only seem to be alive."""
        self.spawn(self._for_ever(work))

    def fail(self, error: RtError) -> None:
        """End the process."""
        if self.failure is None:
            self.failure = error
            logger.critical("data_process_stopping error=%r", str(error))
        self.stopping.set()

    async def cancel(self) -> None:
        """Cancel all; returns when they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _for_ever(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RtError as error:
            self.fail(error)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if isinstance(error, RtError):
            logger.error("task_failed error=%r", str(error))
        else:
            logger.critical("task_failed", exc_info=error)
            self.fail(RtError(f"the data process is broken: {error!r}"))

"""The tasks of the data process, and the failure that ends it.

For one event loop. The first fatal failure is kept, and the process ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from rt.errors import RtError

CANCEL_AGAIN_S: Final = 5.0

logger = logging.getLogger("sequencer")


class TaskGroup:
    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        """Set when the process must end."""
        self.failure: RtError | None = None
        """The fatal failure; None if the process was asked to end."""
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task. An `RtError` ends only the task; any other error ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that the process cannot do without: an `RtError` ends the process, too."""
        self.spawn(self._run_essential(work))

    def fail(self, error: RtError) -> None:
        if self.failure is None:
            self.failure = error
            logger.critical("data_process_stopping error=%r", str(error))
        self.stopping.set()

    async def cancel(self) -> None:
        """Cancel all tasks, repeatedly until they have ended.

        A task may lose a cancellation. For example, it gets an error of its call instead, and tries again.
        """
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=CANCEL_AGAIN_S)

    async def _run_essential(self, work: Coroutine[Any, Any, None]) -> None:
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
            self.fail(RtError(f"a task of the data process failed: {error!r}"))

"""The listeners of a balancer, which serve queues on this host.

Invariant: the failure of one listener does not keep others from being notified, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rt.streams.balancer.balancer import QueueListener
from rt.streams.core.stream_id import QueueId

logger = logging.getLogger("rt.streams")


class Listeners:
    """The listeners of one balancer. A call to stop a queue may take `stop_s` seconds."""

    def __init__(self, host: str, stop_s: float) -> None:
        self._host, self._stop_s = host, stop_s
        self._listeners: list[QueueListener] = []
        self._late: set[asyncio.Task[None]] = set()
        """Calls that did not end in time."""

    def add(self, listener: QueueListener) -> bool:
        if listener in self._listeners:
            return False
        self._listeners.append(listener)
        return True

    def remove(self, listener: QueueListener) -> bool:
        if listener not in self._listeners:
            return False
        self._listeners.remove(listener)
        return True

    def clear(self) -> None:
        self._listeners.clear()

    def notify(self) -> None:
        """Notify all that `my_queues` may have changed."""
        for listener in tuple(self._listeners):
            try:
                listener.queues_changed()
            except Exception:
                logger.exception("listener_failed host=%s", self._host)

    async def release(self, queue: QueueId) -> bool:
        """Release the queue. Returns whether all listeners report in time that the queue is drained and
        nothing of it runs.
        """
        return await self._ask(queue, lambda listener: listener.release(queue))

    async def revoke(self, queue: QueueId) -> bool:
        """Stop at once, without draining. Returns whether all listeners report in time that nothing of the
        queue runs.
        """
        return await self._ask(queue, lambda listener: listener.revoke(queue))

    async def _ask(self, queue: QueueId, ask: Callable[[QueueListener], Awaitable[None]]) -> bool:
        """Listeners added meanwhile may already serve the queue, so they are called too."""
        asked: list[QueueListener] = []
        have_stopped = True
        while new := [one for one in self._listeners if one not in asked]:
            asked += new
            have_stopped &= all(await asyncio.gather(*(self._stops(queue, ask, one) for one in new)))
        return have_stopped

    async def _stops(
        self, queue: QueueId, ask: Callable[[QueueListener], Awaitable[None]], listener: QueueListener
    ) -> bool:
        """Whether the call succeeded in time. A call that does not end even when it is cancelled is
        abandoned.
        """

        async def asked() -> None:
            await ask(listener)

        task = asyncio.get_running_loop().create_task(asked())
        try:
            await asyncio.wait([task], timeout=self._stop_s)
        finally:
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._on_late)
                task.cancel()
        if not task.done():
            logger.error("listener_late queue=%s host=%s limit_s=%g", queue, self._host, self._stop_s)
            return False
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            logger.error("listener_failed queue=%s host=%s", queue, self._host, exc_info=error)
        return error is None

    def _on_late(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("listener_failed host=%s", self._host, exc_info=error)

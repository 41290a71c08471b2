"""Those who serve queues on a host, as a balancer tells them of changes.

Law: what one of them fails at keeps nobody else from being told, and is in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rt.streams.balancing import QueueListener
from rt.streams.ids import QueueId

logger = logging.getLogger("rt.streams")


class Listeners:
    """Those of one balancer. A call to stop a queue may take `stop_s`."""

    def __init__(self, host: str, stop_s: float) -> None:
        self._host, self._stop_s = host, stop_s
        self._listeners: list[QueueListener] = []

    def add(self, listener: QueueListener) -> bool:
        """False if it is there already."""
        if listener in self._listeners:
            return False
        self._listeners.append(listener)
        return True

    def remove(self, listener: QueueListener) -> bool:
        """False if it is not there."""
        if listener not in self._listeners:
            return False
        self._listeners.remove(listener)
        return True

    def clear(self) -> None:
        """Nobody is told anything any more."""
        self._listeners.clear()

    def tell(self) -> None:
        """`my_queues` may say something else."""
        for listener in tuple(self._listeners):
            try:
                listener.queues_changed()
            except Exception:
                logger.exception("listener_failed host=%s", self._host)

    async def release(self, queue: QueueId) -> bool:
        """Whether all of them say in time that the queue is drained and nothing of it runs."""
        return await self._ask(queue, lambda listener: listener.release(queue))

    async def revoke(self, queue: QueueId) -> bool:
        """The same, at once and without draining."""
        return await self._ask(queue, lambda listener: listener.revoke(queue))

    async def _ask(self, queue: QueueId, ask: Callable[[QueueListener], Awaitable[None]]) -> bool:
        async def asked(listener: QueueListener) -> bool:
            try:
                async with asyncio.timeout(self._stop_s):
                    await ask(listener)
            except TimeoutError:
                logger.error("listener_is_late queue=%s host=%s limit_s=%g", queue, self._host, self._stop_s)
                return False
            except Exception:
                logger.exception("listener_failed queue=%s host=%s", queue, self._host)
                return False
            return True

        return all(await asyncio.gather(*(asked(listener) for listener in tuple(self._listeners))))

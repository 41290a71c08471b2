"""The agents of a host: one for each queue that the balancer says is its own.

Laws. There is never more than one agent of a queue here; a queue is released only when its agent has ended.
Changes of a queue are followed one after the other, and only the newest state counts. An agent that broke is
started again, after a wait that grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from rt.errors import DirectoryLocked
from rt.streams.agent import PullingAgent
from rt.streams.balancing import Fence, QueueBalancer
from rt.streams.ids import QueueId
from rt.streams.metrics import QueueCounts, QueueStatus

logger = logging.getLogger("rt.streams")

_AGAIN_MIN_S = 0.5
"""The first wait before a broken agent is started again; each is twice the one before."""
_AGAIN_MAX_S = 30.0
_HEALTHY_S = 60.0
"""An agent that lasted so long begins with the first wait again."""


@dataclass(slots=True)
class _Place:
    """What is known here of a queue."""

    counts: QueueCounts = field(default_factory=QueueCounts)
    agent: PullingAgent | None = None
    starting: asyncio.Task[None] | None = None
    """While `agent` starts."""
    closed_to: Fence | None = None
    """Released or revoked at this fence: not served before it went, or came with a higher one."""
    failed: PullingAgent | None = None
    """The agent that broke, until it is seen to."""
    failures: int = 0
    started_at: float = 0.0
    try_at: float = 0.0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class PullingManager:
    """Follows `balancer` from `start` to `stop`. `make` makes an agent; it is told of what breaks in it."""

    def __init__(
        self,
        balancer: QueueBalancer,
        queues: tuple[QueueId, ...],
        make: Callable[[QueueId, Fence, QueueCounts, Callable[[BaseException], None]], PullingAgent],
        *,
        drain_s: float,
    ) -> None:
        self._balancer = balancer
        self._make = make
        self._drain_s = drain_s
        self._places = {queue: _Place() for queue in queues}
        self._changed = asyncio.Event()
        """Set, and another one, when who serves may have changed."""
        self._following: list[asyncio.Task[None]] = []

    # What the balancer calls

    def queues_changed(self) -> None:
        """Look at `my_queues()` soon."""
        owned = self._balancer.my_queues()
        for queue, place in self._places.items():
            if queue not in owned:
                place.closed_to = None
            place.woken.set()
        self._tell_changed()

    async def release(self, queue: QueueId) -> None:
        """Drain, flush, end."""
        await self._let_go(queue, self._drain_s, keeps_books=True)

    async def revoke(self, queue: QueueId) -> None:
        """End at once."""
        await self._let_go(queue, 0.0, keeps_books=False)

    async def _let_go(self, queue: QueueId, drain_s: float, *, keeps_books: bool) -> None:
        place = self._places.get(queue)
        if place is None:
            return
        fence = self._balancer.my_queues().get(queue) if place.agent is None else place.agent.fence
        place.closed_to = fence
        if place.starting is not None:
            place.starting.cancel()
        if place.agent is not None and place.agent.is_stopping:
            await place.agent.stop(drain_s, keeps_books=keeps_books)  # Perhaps sooner than was asked for.
        await self._end(place, drain_s, keeps_books=keeps_books)

    # Life

    async def start(self) -> None:
        """Begin to follow; agents are started behind it."""
        self._balancer.subscribe(self)
        for queue, place in self._places.items():
            place.woken.set()
            self._following.append(asyncio.create_task(self._follow(queue, place)))

    async def stop(self) -> None:
        """Drain all, and end. The balancer is to be stopped first, so that it can let its rights go."""
        self._balancer.unsubscribe(self)
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(self._following)
        await asyncio.gather(
            *(self._end(place, self._drain_s, keeps_books=True) for place in self._places.values())
        )
        self._tell_changed()

    def agent(self, queue: QueueId) -> PullingAgent | None:
        """Who serves the queue here; None: nobody."""
        place = self._places[queue]
        is_up = place.agent is not None and place.failed is None and place.agent.is_open
        return place.agent if is_up else None

    def agents(self) -> list[PullingAgent]:
        """Of all queues that are served here."""
        return [agent for queue in self._places if (agent := self.agent(queue)) is not None]

    async def changed(self) -> None:
        """Wait until an agent was started or has ended, or is to be, or not."""
        await self._changed.wait()

    def status(self) -> list[tuple[QueueStatus, QueueCounts]]:
        """Every queue of the provider."""
        found = []
        for queue, place in self._places.items():
            agent = self.agent(queue)
            is_failing = place.failed is not None or (place.failures > 0 and agent is None)
            idle = QueueStatus(queue.name, "failed" if is_failing else "elsewhere")
            found.append((idle if agent is None else agent.status(), place.counts))
        return found

    # Following

    async def _follow(self, queue: QueueId, place: _Place) -> None:
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_try(queue, place)):
                        await place.woken.wait()
                place.woken.clear()
                await self._settle(queue, self._balancer.my_queues().get(queue))
            except Exception:
                logger.exception("queue_not_followed queue=%s again_s=%g", queue, _AGAIN_MAX_S)
                await asyncio.sleep(_AGAIN_MAX_S)
                place.woken.set()

    async def _settle(self, queue: QueueId, fence: Fence | None) -> None:
        """Have an agent of that fence, or none."""
        place = self._places[queue]
        if place.failed is not None:
            await self._end(place, 0.0, keeps_books=False)
        if place.agent is not None and place.agent.fence != fence:
            await self._end(place, 0.0, keeps_books=False)
        if fence is None:
            place.failures, place.try_at = 0, 0.0
        elif place.agent is None and _now() >= place.try_at and self._may_serve(place, fence):
            await self._begin(queue, place, fence)

    @staticmethod
    def _may_serve(place: _Place, fence: Fence) -> bool:
        return place.closed_to is None or fence > place.closed_to

    async def _begin(self, queue: QueueId, place: _Place, fence: Fence) -> None:
        async with place.changing:
            if self._balancer.my_queues().get(queue) != fence or not self._may_serve(place, fence):
                return
            agent = self._make(queue, fence, place.counts, lambda error: self._broke(queue, agent, error))
            place.agent, place.started_at = agent, _now()
            place.starting = asyncio.create_task(agent.start())
            try:
                await asyncio.wait([place.starting])
            except asyncio.CancelledError:
                place.starting.cancel()
                await asyncio.wait([place.starting])
                raise
            finally:
                starting, place.starting = place.starting, None
            if starting.cancelled() or (error := starting.exception()) is not None:
                place.agent = None
                if not starting.cancelled() and error is not None:
                    self._note_failure(queue, place, error)
                return
            logger.info("agent_started queue=%s fence=%d", queue, fence)
        self._tell_changed()

    async def _end(self, place: _Place, drain_s: float, *, keeps_books: bool) -> None:
        async with place.changing:
            agent, place.failed = place.agent, None
            if agent is None:
                return
            await agent.stop(drain_s, keeps_books=keeps_books)
            place.agent = None
            logger.info("agent_ended queue=%s fence=%d", agent.queue, agent.fence)
        self._tell_changed()

    def _broke(self, queue: QueueId, agent: PullingAgent, error: BaseException) -> None:
        place = self._places[queue]
        if place.agent is agent:
            place.failed = agent
            self._note_failure(queue, place, error)
            place.woken.set()

    def _note_failure(self, queue: QueueId, place: _Place, error: BaseException) -> None:
        if _now() - place.started_at > _HEALTHY_S:
            place.failures = 0
        is_locked = isinstance(error, DirectoryLocked)  # The owner before us closes it soon.
        wait = _AGAIN_MIN_S if is_locked else min(_AGAIN_MAX_S, _AGAIN_MIN_S * 2.0 ** min(place.failures, 10))
        place.failures += 1
        place.counts.agent_failures += 1
        place.try_at = _now() + wait
        logger.error("agent_failed queue=%s again_s=%.1f error=%r", queue, wait, error)

    def _next_try(self, queue: QueueId, place: _Place) -> float | None:
        """When a broken agent is due; None: there is none."""
        fence = self._balancer.my_queues().get(queue)
        is_due = place.agent is None and place.failures and fence is not None
        return place.try_at if is_due and fence is not None and self._may_serve(place, fence) else None

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _now() -> float:
    return asyncio.get_running_loop().time()

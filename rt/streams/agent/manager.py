"""The agents of a host: one for each queue that the balancer assigns to it.

Invariants:
- A queue has at most one agent here. It is released only after its agent has ended.
- Changes of a queue are applied one at a time, and only the newest state counts.
- A failed agent is restarted after a growing wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from rt.errors import DirectoryLocked
from rt.streams.agent.agent import PullingAgent
from rt.streams.balancer.balancer import Fence, QueueBalancer
from rt.streams.core.metrics import QueueCounts, QueueStatus
from rt.streams.core.stream_id import QueueId

logger = logging.getLogger("rt.streams")

_RESTART_MIN_S = 0.5
"""The first wait before a failed agent is restarted. It doubles each time."""
_RESTART_MAX_S = 30.0
_HEALTHY_S = 60.0
"""An agent that ran this long resets the wait."""


@dataclass(slots=True)
class _QueueState:
    """The local state of a queue."""

    counts: QueueCounts = field(default_factory=QueueCounts)
    agent: PullingAgent | None = None
    starting: asyncio.Task[None] | None = None
    """While `agent` starts."""
    closed_to: Fence | None = None
    """Released or revoked at this fence. Not served until the queue was removed or came with a higher
    fence.
    """
    failed: PullingAgent | None = None
    """The failed agent, until it is handled."""
    failures: int = 0
    started_at: float = 0.0
    try_at: float = 0.0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class PullingManager:
    """Follows `balancer` from `start` to `stop`. `make` makes an agent, with a callback for its failure."""

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
        self._places = {queue: _QueueState() for queue in queues}
        self._changed = asyncio.Event()
        """Set and replaced when the served queues may have changed."""
        self._following: list[asyncio.Task[None]] = []

    # QueueListener

    def queues_changed(self) -> None:
        """Read `my_queues()` soon."""
        owned = self._balancer.my_queues()
        for queue, place in self._places.items():
            if queue not in owned:
                place.closed_to = None
            place.woken.set()
        self._notify_changed()

    async def release(self, queue: QueueId) -> None:
        """Drain, save, end."""
        await self._give_up(queue, self._drain_s, saves_positions=True)

    async def revoke(self, queue: QueueId) -> None:
        """End at once."""
        await self._give_up(queue, 0.0, saves_positions=False)

    async def _give_up(self, queue: QueueId, drain_s: float, *, saves_positions: bool) -> None:
        place = self._places.get(queue)
        if place is None:
            return
        fence = self._balancer.my_queues().get(queue) if place.agent is None else place.agent.fence
        place.closed_to = fence
        if place.starting is not None:
            place.starting.cancel()
        if place.agent is not None and place.agent.is_stopping:
            await place.agent.stop(drain_s, saves_positions=saves_positions)  # May shorten the drain.
        await self._end(place, drain_s, saves_positions=saves_positions)

    # Lifecycle

    async def start(self) -> None:
        """Start to follow the balancer. Agents start in the background."""
        self._balancer.subscribe(self)
        for queue, place in self._places.items():
            place.woken.set()
            self._following.append(asyncio.create_task(self._follow(queue, place)))

    async def stop(self) -> None:
        """Drain all queues, and end. Stop the balancer first, so that it can release its leases."""
        self._balancer.unsubscribe(self)
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(self._following)
        await asyncio.gather(
            *(self._end(place, self._drain_s, saves_positions=True) for place in self._places.values())
        )
        self._notify_changed()

    def agent(self, queue: QueueId) -> PullingAgent | None:
        """The agent that serves the queue here; None if there is none."""
        place = self._places[queue]
        is_up = place.agent is not None and place.failed is None and place.agent.is_open
        return place.agent if is_up else None

    def agents(self) -> list[PullingAgent]:
        """The agents of all queues served here."""
        return [agent for queue in self._places if (agent := self.agent(queue)) is not None]

    async def changed(self) -> None:
        """Wait until an agent was started, was ended, or the balancer changed its queues."""
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

    async def _follow(self, queue: QueueId, place: _QueueState) -> None:
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_try(queue, place)):
                        await place.woken.wait()
                place.woken.clear()
                await self._reconcile(queue, self._balancer.my_queues().get(queue))
            except Exception:
                logger.exception("queue_follow_failed queue=%s again_s=%g", queue, _RESTART_MAX_S)
                await asyncio.sleep(_RESTART_MAX_S)
                place.woken.set()

    async def _reconcile(self, queue: QueueId, fence: Fence | None) -> None:
        """Make the agent match `fence`; None: no agent."""
        place = self._places[queue]
        if place.failed is not None:
            await self._end(place, 0.0, saves_positions=False)
        if place.agent is not None and place.agent.fence != fence:
            await self._end(place, 0.0, saves_positions=False)
        if fence is None:
            place.failures, place.try_at = 0, 0.0
        elif place.agent is None and _now() >= place.try_at and self._may_serve(place, fence):
            await self._start_agent(queue, place, fence)

    @staticmethod
    def _may_serve(place: _QueueState, fence: Fence) -> bool:
        return place.closed_to is None or fence > place.closed_to

    async def _start_agent(self, queue: QueueId, place: _QueueState, fence: Fence) -> None:
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
        self._notify_changed()

    async def _end(self, place: _QueueState, drain_s: float, *, saves_positions: bool) -> None:
        async with place.changing:
            agent, place.failed = place.agent, None
            if agent is None:
                return
            await agent.stop(drain_s, saves_positions=saves_positions)
            place.agent = None
            logger.info("agent_ended queue=%s fence=%d", agent.queue, agent.fence)
        self._notify_changed()

    def _broke(self, queue: QueueId, agent: PullingAgent, error: BaseException) -> None:
        place = self._places[queue]
        if place.agent is agent:
            place.failed = agent
            self._note_failure(queue, place, error)
            place.woken.set()

    def _note_failure(self, queue: QueueId, place: _QueueState, error: BaseException) -> None:
        if _now() - place.started_at > _HEALTHY_S:
            place.failures = 0
        is_locked = isinstance(error, DirectoryLocked)  # The previous owner closes it soon.
        wait = (
            _RESTART_MIN_S
            if is_locked
            else min(_RESTART_MAX_S, _RESTART_MIN_S * 2.0 ** min(place.failures, 10))
        )
        place.failures += 1
        place.counts.agent_failures += 1
        place.try_at = _now() + wait
        logger.error("agent_failed queue=%s again_s=%.1f error=%r", queue, wait, error)

    def _next_try(self, queue: QueueId, place: _QueueState) -> float | None:
        """When a failed agent is due to restart; None if there is none."""
        fence = self._balancer.my_queues().get(queue)
        is_due = place.agent is None and place.failures and fence is not None
        return place.try_at if is_due and fence is not None and self._may_serve(place, fence) else None

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _now() -> float:
    return asyncio.get_running_loop().time()

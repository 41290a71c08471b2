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

from msgspec import Struct, field

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


class _QueueState(Struct):
    """The local state of a queue."""

    counts: QueueCounts = field(default_factory=QueueCounts)
    agent: PullingAgent | None = None
    starting: asyncio.Task[None] | None = None
    """The task that starts `agent`, while it runs."""
    closed_to: Fence | None = None
    """The fence at which the queue was released or revoked. The queue is not served until it was removed or
    came with a higher fence.
    """
    failed: PullingAgent | None = None
    """The failed agent, until it is handled."""
    failures: int = 0
    started_at: float = 0.0
    try_at: float = 0.0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def may_serve(self, fence: Fence) -> bool:
        return self.closed_to is None or fence > self.closed_to


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
        self._states = {queue: _QueueState() for queue in queues}
        self._changed = asyncio.Event()
        """Set and replaced when the served queues may have changed."""
        self._following: list[asyncio.Task[None]] = []

    # QueueListener

    def queues_changed(self) -> None:
        """Read `my_queues()` soon."""
        owned = self._balancer.my_queues()
        for queue, state in self._states.items():
            if queue not in owned:
                state.closed_to = None
            state.woken.set()
        self._notify_changed()

    async def release(self, queue: QueueId) -> None:
        await self._give_up(queue, self._drain_s, saves_positions=True)

    async def revoke(self, queue: QueueId) -> None:
        state = self._states.get(queue)
        if state is not None:
            state.counts.losses += 1
            if state.agent is not None:
                state.agent.interrupt()
        await self._give_up(queue, 0.0, saves_positions=False)

    async def _give_up(self, queue: QueueId, drain_s: float, *, saves_positions: bool) -> None:
        state = self._states.get(queue)
        if state is None:
            return
        fence = self._balancer.my_queues().get(queue) if state.agent is None else state.agent.fence
        state.closed_to = fence
        if state.starting is not None:
            state.starting.cancel()
        if state.agent is not None and state.agent.is_stopping:
            await state.agent.stop(drain_s, saves_positions=saves_positions)  # May shorten the drain.
        await self._end(state, drain_s, saves_positions=saves_positions)

    # Lifecycle

    async def start(self) -> None:
        """Start to follow the balancer. Agents start in the background."""
        self._balancer.subscribe(self)
        for queue, state in self._states.items():
            state.woken.set()
            self._following.append(asyncio.create_task(self._follow(queue, state)))

    async def stop(self) -> None:
        """Drain all queues, and end. Stop the balancer first, so that it can release its leases."""
        self._balancer.unsubscribe(self)
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(self._following)
        await asyncio.gather(
            *(self._end(state, self._drain_s, saves_positions=True) for state in self._states.values())
        )
        self._notify_changed()

    def agent(self, queue: QueueId) -> PullingAgent | None:
        """The agent that serves the queue here; None if there is none."""
        state = self._states[queue]
        is_up = state.agent is not None and state.failed is None and state.agent.queue.is_open
        return state.agent if is_up else None

    def counts(self, queue: QueueId) -> QueueCounts:
        return self._states[queue].counts

    def agents(self) -> list[PullingAgent]:
        return [agent for queue in self._states if (agent := self.agent(queue)) is not None]

    async def changed(self) -> None:
        """Wait until an agent was started, was ended, or the balancer changed its queues."""
        await self._changed.wait()

    def status(self) -> list[tuple[QueueStatus, QueueCounts]]:
        found = []
        for queue, state in self._states.items():
            agent = self.agent(queue)
            is_failing = state.failed is not None or (state.failures > 0 and agent is None)
            idle = QueueStatus(queue.name, "failed" if is_failing else "elsewhere")
            found.append((idle if agent is None else agent.status(), state.counts))
        return found

    # Following

    async def _follow(self, queue: QueueId, state: _QueueState) -> None:
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_try(queue, state)):
                        await state.woken.wait()
                state.woken.clear()
                await self._reconcile(queue, self._balancer.my_queues().get(queue))
            except Exception:
                logger.exception("queue_follow_failed queue=%s again_s=%g", queue, _RESTART_MAX_S)
                await asyncio.sleep(_RESTART_MAX_S)
                state.woken.set()

    async def _reconcile(self, queue: QueueId, fence: Fence | None) -> None:
        """Make the agent match `fence`; None: no agent."""
        state = self._states[queue]
        if state.failed is not None:
            await self._end(state, 0.0, saves_positions=False)
        if state.agent is not None and state.agent.fence != fence:
            await self._end(state, 0.0, saves_positions=False)
        if fence is None:
            state.failures, state.try_at = 0, 0.0
        elif state.agent is None and _now() >= state.try_at and state.may_serve(fence):
            await self._start_agent(queue, state, fence)

    async def _start_agent(self, queue: QueueId, state: _QueueState, fence: Fence) -> None:
        async with state.changing:
            if self._balancer.my_queues().get(queue) != fence or not state.may_serve(fence):
                return
            agent = self._make(queue, fence, state.counts, lambda error: self._broke(queue, agent, error))
            state.agent, state.started_at = agent, _now()
            state.starting = asyncio.create_task(agent.start())
            try:
                await asyncio.wait([state.starting])
            except asyncio.CancelledError:
                state.starting.cancel()
                await asyncio.wait([state.starting])
                raise
            finally:
                starting, state.starting = state.starting, None
            if starting.cancelled() or (error := starting.exception()) is not None:
                state.agent = None
                if not starting.cancelled() and error is not None:
                    self._note_failure(queue, state, error)
                return
            logger.info("agent_started queue=%s fence=%d", queue, fence)
        self._notify_changed()

    async def _end(self, state: _QueueState, drain_s: float, *, saves_positions: bool) -> None:
        async with state.changing:
            agent, state.failed = state.agent, None
            if agent is None:
                return
            await agent.stop(drain_s, saves_positions=saves_positions)
            state.agent = None
            logger.info("agent_ended queue=%s fence=%d", agent.queue.id, agent.fence)
        self._notify_changed()

    def _broke(self, queue: QueueId, agent: PullingAgent, error: BaseException) -> None:
        state = self._states[queue]
        if state.agent is agent:
            state.failed = agent
            self._note_failure(queue, state, error)
            state.woken.set()

    def _note_failure(self, queue: QueueId, state: _QueueState, error: BaseException) -> None:
        if _now() - state.started_at > _HEALTHY_S:
            state.failures = 0
        # The previous owner closes a locked store soon.
        doublings = 0 if isinstance(error, DirectoryLocked) else min(state.failures, 10)
        wait = min(_RESTART_MAX_S, _RESTART_MIN_S * 2.0**doublings)
        state.failures += 1
        state.counts.agent_failures += 1
        state.try_at = _now() + wait
        logger.error("agent_failed queue=%s again_s=%.1f error=%r", queue, wait, error)

    def _next_try(self, queue: QueueId, state: _QueueState) -> float | None:
        """When a failed agent is due to restart; None if there is none."""
        fence = self._balancer.my_queues().get(queue)
        is_waiting = state.agent is None and state.failures > 0
        return state.try_at if is_waiting and fence is not None and state.may_serve(fence) else None

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _now() -> float:
    return asyncio.get_running_loop().time()

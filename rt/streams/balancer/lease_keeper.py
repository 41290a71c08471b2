"""Keeps the leases of a host: renews them, gives them up or loses them, and notifies the listeners.

Invariants:
- A lease is released only when every listener has reported that nothing of the queue runs here. If one never
  does, the lease expires.
- A failed call is retried. Only `end` stops the renewals.
- Releases are batched: one call carries all leases released since the last call started. A host that gives up
  hundreds of queues makes as many calls as one that gives up two.

For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from typing import Any, Final

from msgspec import Struct

from rt.errors import RtError
from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.lease import LeaseProvider, LeaseResult, LeaseTimes, OwnedLease
from rt.streams.balancer.listeners import Listeners
from rt.streams.balancer.owned_queues import OwnedQueues, QueueOwnership
from rt.streams.core.stream_id import QueueId

RETRY_S: Final = 1.0
"""The wait after a renewal with an unknown result."""
CLOCK_LOOK_S: Final = 1.0
"""How often the clock is checked while a lease is held."""

logger = logging.getLogger("rt.streams")


class LeaseKeeper:
    """The leases of one host. `on_free` is called when a queue held here is free, or will be soon."""

    def __init__(
        self, leases: LeaseProvider, host: str, times: LeaseTimes, on_free: Callable[[], None]
    ) -> None:
        self.owned = OwnedQueues(times.margin_s)
        self.listeners = Listeners(host, times.give_up_s)
        self._leases, self._host, self._times, self._on_free = leases, host, times, on_free
        self._returning = LeaseReturns(leases)
        self._changes: set[asyncio.Task[None]] = set()
        self._renewals: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._context = copy_context()
        """The context for tasks that start when a consumer was about to be called: they must not have the
        context variables of the consumer.
        """

    # Lifecycle

    def begin(self) -> None:
        self._renewals = asyncio.get_running_loop().create_task(self._keep_renewed())

    async def give_up_all(self) -> None:
        """Give every queue up, and wait for those already stopping. Failures are logged."""
        self.give_up(list(self.owned.queues))
        while self._changes:
            await asyncio.wait(set(self._changes))

    async def end_renewals(self) -> None:
        """Renew nothing more."""
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.wait([self._renewals])

    def end(self) -> None:
        """Stop renewing. Leases still held expire, and the listeners are notified that the queues are
        lost.
        """
        self._is_over = True
        if self.owned.queues:
            logger.warning("leases_left host=%s queues=%d", self._host, len(self.owned.queues))
            self.owned.queues.clear()
            self.listeners.notify()
        self.listeners.clear()
        self._arm()
        for task in {*self._changes, self._renewals} - {None}:
            assert task is not None
            task.cancel()

    # State

    def served(self) -> Mapping[QueueId, Fence]:
        return {} if self._is_over else self.owned.served(self._leases.now_s())

    def owns(self, queue: QueueId, fence: Fence) -> bool:
        """Whether the lease with this token is valid by the clock. If it is not valid, it is lost from then
        on.

        So a late answer to a renewal does not bring back a queue whose consumers have stopped.
        """
        right = self.owned.queues.get(queue)
        if right is None or right.lease.token != fence or right.is_released or self._is_over:
            return False
        if not self.owned.is_over(right.lease, self._leases.now_s()):
            return True
        self._context.copy().run(self._on_time)
        return False

    def set_host_lease(self, lease: OwnedLease) -> None:
        self.owned.host_lease = lease
        self._arm()

    def add(self, won: Mapping[QueueId, OwnedLease]) -> None:
        for queue, lease in won.items():
            self.owned.queues[queue] = QueueOwnership(lease)
        if won:
            self._arm()
            self.listeners.notify()

    # Renewing

    async def _keep_renewed(self) -> None:
        while True:
            delay_s = self._times.renew_s
            try:
                if not await self._renew():
                    delay_s = min(RETRY_S, delay_s)
            except Exception as error:  # noqa: BLE001 - whatever it was, the leases must be renewed
                log_failure("balancer_cannot_renew", self._host, error)
                delay_s = min(RETRY_S, delay_s)
            await asyncio.sleep(delay_s)

    async def _renew(self) -> bool:
        """Renew all held leases. Returns False if the result of a lease is unknown."""
        rights, place = self.owned.renewable(), self.owned.host_lease
        leases = [right.lease for _, right in rights] + ([place] if place is not None else [])
        answers = list(await self._leases.renew(leases)) if leases else []
        is_known = all(answer.result is not LeaseResult.TRANSIENT_FAILURE for answer in answers)
        if place is not None and self.owned.host_lease is place:
            answer = answers[-1]
            if answer.result is not LeaseResult.TRANSIENT_FAILURE:
                self.owned.host_lease = answer.lease
        for (queue, right), answer in zip(rights, answers, strict=False):
            if self.owned.queues.get(queue) is not right or right.is_released:
                continue
            if answer.lease is not None:
                right.lease = answer.lease
            elif answer.result is not LeaseResult.TRANSIENT_FAILURE:
                self._lose(queue, "it is not held any more")
        self._arm()
        return is_known

    def _arm(self) -> None:
        """Schedule a wake-up for when the first lease is no longer valid."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left_s = None if self._is_over else self.owned.left_s(self._leases.now_s())
        if left_s is not None:
            # The loop's clock may stop while the machine sleeps; the leases' clock does not.
            delay_s = min(max(left_s, 0.0), CLOCK_LOOK_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        for queue in self.owned.expired(self._leases.now_s()):
            self._lose(queue, "it was not renewed in time")
        self._arm()

    # Giving up and losing

    def give_up(self, queues: list[QueueId]) -> None:
        """Start to stop each queue and release its lease while it is valid."""
        for queue in queues:
            right = self.owned.queues.get(queue)
            if right is not None and not right.is_leaving:
                right.is_leaving = True
                self._spawn(self._give_up(queue, right))

    async def _give_up(self, queue: QueueId, right: QueueOwnership) -> None:
        has_stopped = await self.listeners.release(queue)
        if self.owned.queues.get(queue) is not right:
            return  # It was lost meanwhile.
        right.is_released = True
        if not has_stopped:
            logger.error("queue_stop_timed_out queue=%s host=%s; its lease lapses", queue, self._host)
            self._lose(queue, "it was to be given up, and did not stop")
            return
        result = LeaseResult.TRANSIENT_FAILURE
        try:
            result = await self._returning.release(right.lease)
        except RtError as error:  # For example a certificate that an operator can fix.
            logger.error("lease_release_failed queue=%s error=%r", queue, str(error))
        finally:
            if self.owned.queues.get(queue) is right:
                del self.owned.queues[queue]
                self.listeners.notify()
        if result is LeaseResult.TRANSIENT_FAILURE:
            logger.warning("lease_left queue=%s host=%s", queue, self._host)

    def _lose(self, queue: QueueId, why: str) -> None:
        logger.warning("queue_lost queue=%s host=%s why=%r", queue, self._host, why)
        self.owned.lose(queue)
        self._spawn(self._revoke(queue))

    async def _revoke(self, queue: QueueId) -> None:
        has_stopped = False
        try:
            has_stopped = await self.listeners.revoke(queue)
        finally:
            self.owned.on_stopped(queue, has_stopped=has_stopped)
            self.listeners.notify()
            self._on_free()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("balancer_failed host=%s", self._host, exc_info=error)


def log_failure(event: str, host: str, error: Exception) -> None:
    """Log the message of our own errors, and the traceback of any other."""
    shown = None if isinstance(error, RtError) else error
    logger.error("%s host=%s error=%r", event, host, str(error), exc_info=shown)


class _Return(Struct, eq=False):
    lease: OwnedLease
    result: LeaseResult | Exception | None = None
    """None: not sent yet."""


class LeaseReturns:
    """Batches the releases of one owner."""

    def __init__(self, leases: LeaseProvider) -> None:
        self._leases = leases
        self._waiting: list[_Return] = []
        self._turn = asyncio.Lock()

    async def release(self, lease: OwnedLease) -> LeaseResult:
        """Release it. Raises what `LeaseProvider.release` raises, for the whole batch."""
        one = _Return(lease)
        self._waiting.append(one)
        await asyncio.sleep(0)  # Batch the releases of the same moment.
        async with self._turn:
            if one.result is None:
                await self._release_all()
        assert one.result is not None
        if isinstance(one.result, Exception):
            raise one.result
        return one.result

    async def _release_all(self) -> None:
        together, self._waiting = self._waiting, []
        for one in together:
            one.result = LeaseResult.TRANSIENT_FAILURE  # The result if this is cancelled.
        try:
            results = await self._leases.release([one.lease for one in together])
        except Exception as error:  # noqa: BLE001 - raised to the callers
            for one in together:
                one.result = error
            return
        for one, result in zip(together, results, strict=True):
            one.result = result

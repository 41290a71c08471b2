"""Keeping what a host won: its leases are renewed, given up in peace, or lost, and the listeners hear of it.

Laws. A lease is let go of only when every listener has said that nothing of the queue runs here; if one never
says so, it lapses. What goes wrong once is tried again; nothing but `end` ends the renewals. For one event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from rt.errors import RtError
from rt.streams.balancing import Fence
from rt.streams.ids import QueueId
from rt.streams.lease_times import LeaseTimes
from rt.streams.leasing import Lease, LeaseProvider, LeaseResult
from rt.streams.listeners import Listeners
from rt.streams.returning import Returning
from rt.streams.rights import Right, Rights

RETRY_S: Final = 1.0
"""After a renewal of which nothing is known."""
CLOCK_LOOK_S: Final = 1.0
"""How often the clock is looked at while something is held."""

logger = logging.getLogger("rt.streams")


class Keeping:
    """Of one host. `on_free` is called when something that was held here is to be had, or soon will be."""

    def __init__(
        self, leases: LeaseProvider, host: str, times: LeaseTimes, on_free: Callable[[], None]
    ) -> None:
        self.rights = Rights(times.margin_s)
        self.listeners = Listeners(host, times.give_up_s)
        self._leases, self._host, self._times, self._on_free = leases, host, times, on_free
        self._returning = Returning(leases)
        self._changes: set[asyncio.Task[None]] = set()
        self._renewals: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    # Life

    def begin(self) -> None:
        """Renew from now on."""
        self._renewals = asyncio.get_running_loop().create_task(self._keep_renewed())

    async def give_up_all(self) -> None:
        """Give every queue up, and wait for all that stops already; what fails is in the log."""
        self.give_up(list(self.rights.queues))
        while self._changes:
            await asyncio.wait(set(self._changes))

    def end(self) -> None:
        """Renew nothing any more. What is held yet lapses, and its listeners hear that it went."""
        self._is_over = True
        if self.rights.queues:
            logger.warning("leases_left host=%s queues=%d", self._host, len(self.rights.queues))
            self.rights.queues.clear()
            self.listeners.tell()
        self.listeners.clear()
        self._arm()
        for task in {*self._changes, self._renewals} - {None}:
            assert task is not None
            task.cancel()

    # What is served

    def served(self) -> Mapping[QueueId, Fence]:
        """The queues to be served here now, each with its fence."""
        return {} if self._is_over else self.rights.served(self._leases.now_s())

    def settle(self, place: Lease) -> None:
        """This host has a place among the others."""
        self.rights.place = place
        self._arm()

    def add(self, won: Mapping[QueueId, Lease]) -> None:
        """Queues were won."""
        for queue, lease in won.items():
            self.rights.queues[queue] = Right(lease)
        if won:
            self._arm()
            self.listeners.tell()

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
        """Renew what is held; False: of some of it nothing is known."""
        rights, place = self.rights.renewable(), self.rights.place
        leases = [right.lease for _, right in rights] + ([place] if place is not None else [])
        answers = list(await self._leases.renew(leases)) if leases else []
        is_known = all(answer.result is not LeaseResult.TRANSIENT_FAILURE for answer in answers)
        if place is not None and self.rights.place is place:
            answer = answers[-1]
            if answer.result is not LeaseResult.TRANSIENT_FAILURE:
                self.rights.place = answer.lease
        for (queue, right), answer in zip(rights, answers, strict=False):
            if self.rights.queues.get(queue) is not right or right.is_let_go:
                continue
            if answer.lease is not None:
                right.lease = answer.lease
            elif answer.result is not LeaseResult.TRANSIENT_FAILURE:
                self._lose(queue, "it is not held any more")
        self._arm()
        return is_known

    def _arm(self) -> None:
        """Be woken when the first lease cannot be counted on any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left_s = None if self._is_over else self.rights.left_s(self._leases.now_s())
        if left_s is not None:
            # The loop's clock may stand still while the machine sleeps, and the leases' goes on.
            delay_s = min(max(left_s, 0.0), CLOCK_LOOK_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        for queue in self.rights.over(self._leases.now_s()):
            self._lose(queue, "it was not renewed in time")
        self._arm()

    # Giving up, and losing

    def give_up(self, queues: list[QueueId]) -> None:
        """Begin to: have each stopped, let its lease go, and say so; all while it can be counted on."""
        for queue in queues:
            right = self.rights.queues.get(queue)
            if right is not None and not right.is_leaving:
                right.is_leaving = True
                self._spawn(self._give_up(queue, right))

    async def _give_up(self, queue: QueueId, right: Right) -> None:
        has_stopped = await self.listeners.release(queue)
        if self.rights.queues.get(queue) is not right:
            return  # It was lost meanwhile.
        right.is_let_go = True
        if not has_stopped:
            logger.error("queue_does_not_stop queue=%s host=%s; its lease lapses", queue, self._host)
            self._lose(queue, "it was to be given up, and did not stop")
            return
        result = LeaseResult.TRANSIENT_FAILURE
        try:
            result = await self._returning.release(right.lease)
        except RtError as error:  # A certificate, say, that somebody may put right.
            logger.error("lease_cannot_be_let_go queue=%s error=%r", queue, str(error))
        finally:
            if self.rights.queues.get(queue) is right:
                del self.rights.queues[queue]
                self.listeners.tell()
        if result is LeaseResult.TRANSIENT_FAILURE:
            logger.warning("lease_left queue=%s host=%s", queue, self._host)

    def _lose(self, queue: QueueId, why: str) -> None:
        logger.warning("queue_lost queue=%s host=%s why=%r", queue, self._host, why)
        self.rights.lose(queue)
        self._spawn(self._revoke(queue))

    async def _revoke(self, queue: QueueId) -> None:
        has_stopped = False
        try:
            has_stopped = await self.listeners.revoke(queue)
        finally:
            self.rights.on_stopped(queue, has_stopped=has_stopped)
            self.listeners.tell()
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
    """Our own errors say what they are; of any other it is shown where it came from."""
    shown = None if isinstance(error, RtError) else error
    logger.error("%s host=%s error=%r", event, host, str(error), exc_info=shown)

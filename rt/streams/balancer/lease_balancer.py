"""A balancer that serves a queue only while it holds the queue's lease. A policy chooses the queues.

    host/<host>     held by every present host, so that hosts know each other
    queue/<queue>   held by the host that serves the queue; its token is the fence

Invariants:
- `my_queues` names a queue only while its lease is valid by the clock, even if everything else hangs. So no
  two hosts name the same queue at a time.
- A lease acquired without notice, because the answer was lost, is released at the next poll.
- A failed poll is followed by the next one.
- While another host has the same owner, this one acquires and releases nothing: one owner is one host.

For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from rt.errors import Closed
from rt.names import check_lease_owner
from rt.streams.balancer.assignment_policy import AssignmentPolicy, HostView
from rt.streams.balancer.balancer import Fence, QueueListener
from rt.streams.balancer.lease import (
    DEFAULT_TIMES,
    QUEUES,
    LeaseHolder,
    LeaseProvider,
    LeaseResult,
    LeaseTimes,
)
from rt.streams.balancer.lease_keeper import LeaseKeeper, log_failure
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import QueueMapper

HOSTS: Final = "host/"

logger = logging.getLogger("rt.streams")


class LeasedBalancer:
    """A `QueueBalancer`. `host` is this host's unique name. Default: the owner of the leases."""

    def __init__(
        self,
        leases: LeaseProvider,
        policy: AssignmentPolicy,
        *,
        host: str | None = None,
        times: LeaseTimes = DEFAULT_TIMES,
    ) -> None:
        """`leases` must be for the hosts of these queues only. The balancer closes them when it stops."""
        self.host: Final = check_lease_owner(host or leases.owner)
        self.hosts: frozenset[str] = frozenset()
        """The hosts present at the last poll."""
        self.owners: Mapping[str, str] = {}
        """By queue name: the owner of its lease at the last poll."""
        self._leases, self._policy, self._times = leases, policy, times
        self._wake, self._stopping, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._keeper = LeaseKeeper(leases, self.host, times, self._wake.set)
        self._owned = self._keeper.owned
        self._poll_task: asyncio.Task[None] | None = None

    # QueueBalancer

    async def start(self, mapper: QueueMapper) -> None:
        """Start to acquire queues. Call once; `rt.Closed` after `stop`."""
        if self._stopping.is_set():
            raise Closed("the balancer is stopped", where=self.host)
        assert self._poll_task is None, "started twice"
        self._poll_task = asyncio.get_running_loop().create_task(self._poll_loop(mapper))
        self._keeper.begin()

    def my_queues(self) -> Mapping[QueueId, Fence]:
        return self._keeper.served()

    def owns(self, queue: QueueId, fence: Fence) -> bool:
        return self._keeper.owns(queue, fence)

    def valid_until_s(self, queue: QueueId) -> float | None:
        """The time until which this host may serve the queue, by the leases' clock, unless the lease of the
        queue is renewed.
        """
        return self._owned.valid_until_s(queue)

    def subscribe(self, listener: QueueListener) -> bool:
        return self._keeper.listeners.add(listener)

    def unsubscribe(self, listener: QueueListener) -> bool:
        return self._keeper.listeners.remove(listener)

    async def stop(self) -> None:
        """Give up every queue and the lease of this host, then end. May be called twice.

        If cancelled it ends at once; leases still held expire.
        """
        if self._stopping.is_set():
            await self._ended.wait()
            return
        self._stopping.set()
        self._wake.set()
        try:
            await self._keeper.give_up_all()
            if self._poll_task is not None:
                await asyncio.wait([self._poll_task])
            await self._keeper.give_up_all()
            await self._keeper.end_renewals()
            if self._owned.host_lease is not None:
                await self._leases.release([self._owned.host_lease])
        except Exception as error:  # noqa: BLE001 - whatever it was, the lease expires
            log_failure("place_left", self.host, error)
        finally:
            if self._poll_task is not None:
                self._poll_task.cancel()
            self._keeper.end()
            self._ended.set()
            await self._leases.close()

    # Polling

    async def _poll_loop(self, mapper: QueueMapper) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                await self._poll(mapper)
            except Exception as error:  # noqa: BLE001 - of a policy or a provider: the next poll may succeed
                log_failure("balancer_cannot_look", self.host, error)
            try:
                async with asyncio.timeout(self._times.look_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _poll(self, mapper: QueueMapper) -> None:
        """Read the hosts and leases; acquire and give up what the policy says."""
        rows = await self._leases.held("")
        if rows is None or self._stopping.is_set():
            return
        if (other := self._namesake(rows)) is not None:
            # The queues of the other host must not be mistaken for leases that this host acquired without
            # notice.
            logger.error("owner_is_shared owner=%s host=%s other=%s", self._leases.owner, self.host, other)
            return
        await self._release_unknown(rows)
        await self._join(rows)
        if self._owned.host_lease is None or self._stopping.is_set():
            return
        present = {name.removeprefix(HOSTS) for name in rows if name.startswith(HOSTS)}
        self.hosts = frozenset(present | {self.host})
        self.owners = {
            name.removeprefix(QUEUES): row.owner for name, row in rows.items() if name.startswith(QUEUES)
        }
        decision = self._policy.assign(self._view(mapper))
        self._keeper.give_up(list(decision.give_up))
        await self._take([queue for queue in decision.take if self._owned.may_take(queue)])

    def _view(self, mapper: QueueMapper) -> HostView:
        kept = self._owned.kept()
        unavailable = {*self.owners, *self._leases.away()}
        taken = (
            queue for queue in mapper.queues if queue.name in unavailable or not self._owned.may_take(queue)
        )
        reach = {
            queue: frozenset({name.removeprefix(HOSTS) for name in names} | {self.host})
            for queue, names in self._leases.reach().items()
        }
        others = frozenset(taken) - frozenset(kept)
        return HostView(self.host, self.hosts, mapper, kept, others, self._leases.now_s(), reach)

    def _namesake(self, rows: Mapping[str, LeaseHolder]) -> str | None:
        """Another host of the same owner, which may be an earlier process whose lease has not expired."""
        own = f"{HOSTS}{self.host}"
        others = (name for name, row in rows.items() if row.owner == self._leases.owner and name != own)
        return next((name.removeprefix(HOSTS) for name in others if name.startswith(HOSTS)), None)

    async def _release_unknown(self, rows: Mapping[str, LeaseHolder]) -> None:
        """Release leases of this owner that this process does not know."""
        lost = self._owned.unknown(rows, self._leases.owner)
        if lost:
            logger.info("unknown_leases_released host=%s leases=%d", self.host, len(lost))
            if all(one is LeaseResult.OK for one in await self._leases.release(lost)):
                self._wake.set()  # They are available now.

    async def _join(self, rows: Mapping[str, LeaseHolder]) -> None:
        if self._owned.host_lease is not None:
            return
        name = f"{HOSTS}{self.host}"
        (answer,) = await self._leases.acquire([name], self._times.lease_s)
        if answer.lease is not None:
            self._keeper.set_host_lease(answer.lease)
        elif answer.result is LeaseResult.NOT_AVAILABLE and name in rows:
            logger.warning("host_exists host=%s owner=%s", self.host, rows[name].owner)

    async def _take(self, queues: Sequence[QueueId]) -> None:
        if not queues:
            return
        answers = await self._leases.acquire(
            [f"{QUEUES}{queue.name}" for queue in queues], self._times.lease_s
        )
        won = {
            queue: answer.lease
            for queue, answer in zip(queues, answers, strict=True)
            if answer.lease is not None
        }
        if self._stopping.is_set():
            await self._leases.release(list(won.values()))
        else:
            self._keeper.add(won)

"""A balancer that serves a queue only while it holds the queue's lease; which ones, a policy says.

    host/<host>     held by every host that is there: so hosts know of each other
    queue/<queue>   held by the host that serves the queue; its token is the fence

Laws. `my_queues` names a queue only while the lease can be counted on, by the clock, whatever else stands
still: no two hosts ever name the same one. What was got and not noticed, because an answer was lost, is let
go of when the leases that are held are looked at next. A look that fails is followed by the next one. For one
event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from rt.errors import Closed
from rt.names import check_lease_owner
from rt.streams.balancing import Fence, QueueListener
from rt.streams.ids import QueueId
from rt.streams.keeping import Keeping, log_failure
from rt.streams.lease_times import DEFAULT_TIMES, LeaseTimes
from rt.streams.leasing import Holder, LeaseProvider, LeaseResult
from rt.streams.mapping import QueueMapper
from rt.streams.policies import Policy, View

HOSTS: Final = "host/"
QUEUES: Final = "queue/"

logger = logging.getLogger("rt.streams")


class LeasedBalancer:
    """A `QueueBalancer`. `host` names this host among the others, no two at a time; default: the owner."""

    def __init__(
        self,
        leases: LeaseProvider,
        policy: Policy,
        *,
        host: str | None = None,
        times: LeaseTimes = DEFAULT_TIMES,
    ) -> None:
        """`leases` are for the hosts of these queues alone; the balancer closes them when it is stopped."""
        self.host: Final = check_lease_owner(host or leases.owner)
        self.hosts: frozenset[str] = frozenset()
        """Who was there at the last look."""
        self.owners: Mapping[str, str] = {}
        """By name of a queue: the owner of its lease at the last look."""
        self._leases, self._policy, self._times = leases, policy, times
        self._wake, self._stopping, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._keeping = Keeping(leases, self.host, times, self._wake.set)
        self._rights = self._keeping.rights
        self._looking: asyncio.Task[None] | None = None

    # As a balancer

    async def start(self, mapper: QueueMapper) -> None:
        """Begin to win queues. Once; `rt.Closed` behind `stop`."""
        if self._stopping.is_set():
            raise Closed("the balancer was stopped", where=self.host)
        assert self._looking is None, "started twice"
        self._looking = asyncio.get_running_loop().create_task(self._look_around(mapper))
        self._keeping.begin()

    def my_queues(self) -> Mapping[QueueId, Fence]:
        """The queues to be served here now, each with its fence."""
        return self._keeping.served()

    def subscribe(self, listener: QueueListener) -> bool:
        """Have it told of changes; False if it is told already."""
        return self._keeping.listeners.add(listener)

    def unsubscribe(self, listener: QueueListener) -> bool:
        """Tell it nothing any more; False if it was not told."""
        return self._keeping.listeners.remove(listener)

    async def stop(self) -> None:
        """Give every queue up, and this host's place; then end. Twice is allowed.

        Cancelled, it ends at once: what is held yet lapses.
        """
        if self._stopping.is_set():
            await self._ended.wait()
            return
        self._stopping.set()
        self._wake.set()
        try:
            await self._keeping.give_up_all()
            if self._looking is not None:
                await asyncio.wait([self._looking])
            await self._keeping.give_up_all()
            if self._rights.place is not None:
                await self._leases.release([self._rights.place])
        except Exception as error:  # noqa: BLE001 - whatever it was, the place lapses
            log_failure("place_left", self.host, error)
        finally:
            if self._looking is not None:
                self._looking.cancel()
            self._keeping.end()
            self._ended.set()
            await self._leases.close()

    # Looking around

    async def _look_around(self, mapper: QueueMapper) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                await self._look(mapper)
            except Exception as error:  # noqa: BLE001 - a policy's or a provider's: the next look may do
                log_failure("balancer_cannot_look", self.host, error)
            try:
                async with asyncio.timeout(self._times.look_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self, mapper: QueueMapper) -> None:
        """See who is there and who has what; take and give up what the policy says."""
        rows = await self._leases.held("")
        if rows is None or self._stopping.is_set():
            return
        await self._disown(rows)
        await self._join(rows)
        if self._rights.place is None or self._stopping.is_set():
            return
        present = {name.removeprefix(HOSTS) for name in rows if name.startswith(HOSTS)}
        self.hosts = frozenset(present | {self.host})
        self.owners = {
            name.removeprefix(QUEUES): row.owner for name, row in rows.items() if name.startswith(QUEUES)
        }
        wishes = self._policy.wishes(self._view(mapper))
        self._keeping.give_up(list(wishes.give_up))
        await self._take([queue for queue in wishes.take if self._rights.may_take(queue)])

    def _view(self, mapper: QueueMapper) -> View:
        kept = self._rights.kept()
        taken = (
            queue for queue in mapper.queues if queue.name in self.owners or not self._rights.may_take(queue)
        )
        return View(
            self.host, self.hosts, mapper, kept, frozenset(taken) - frozenset(kept), self._leases.now_s()
        )

    async def _disown(self, rows: Mapping[str, Holder]) -> None:
        """Let go of what is this owner's, and nobody here knows of."""
        lost = self._rights.unknown(rows, self._leases.owner)
        if lost:
            logger.info("lets_go_of_unknown_leases host=%s leases=%d", self.host, len(lost))
            if all(one is LeaseResult.OK for one in await self._leases.release(lost)):
                self._wake.set()  # They are to be had.

    async def _join(self, rows: Mapping[str, Holder]) -> None:
        if self._rights.place is not None:
            return
        name = f"{HOSTS}{self.host}"
        (answer,) = await self._leases.acquire([name], self._times.lease_s)
        if answer.lease is not None:
            self._keeping.settle(answer.lease)
        elif answer.result is LeaseResult.NOT_AVAILABLE and name in rows:
            logger.warning("host_is_there_already host=%s owner=%s", self.host, rows[name].owner)

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
            self._keeping.add(won)

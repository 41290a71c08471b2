"""A balancer that serves a queue only while it holds the queue's lease; which ones, a policy says.

    host/<host>     held by every host that is there: so hosts know of each other
    queue/<queue>   held by the host that serves the queue; its token is the fence

Laws. `my_queues` names a queue only while the lease can be counted on, by the clock, whatever else stands
still: no two hosts ever name the same one. A lease is let go of only when every listener has said that
nothing of the queue runs here; if one never says so, it lapses. What was got and not noticed, because an
answer was lost, is let go of when the leases that are held are looked at next. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rt.errors import Closed, InvalidOption, RtError
from rt.names import check_lease_owner
from rt.streams.balancing import Fence, QueueListener
from rt.streams.ids import QueueId
from rt.streams.leasing import Holder, Lease, LeaseProvider, LeaseResult
from rt.streams.listeners import Listeners
from rt.streams.mapping import QueueMapper
from rt.streams.policies import Policy, View

HOSTS: Final = "host/"
QUEUES: Final = "queue/"
RETRY_S: Final = 1.0
"""After a renewal of which nothing is known."""
CLOCK_LOOK_S: Final = 1.0
"""How often the clock is looked at while queues are held."""

logger = logging.getLogger("rt.streams")


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long things take. A dead host's queues are served again after `lease_s`, `look_s` and a bit."""

    lease_s: float = 30.0
    """A lease lasts so long without a renewal; it is renewed three times meanwhile."""
    look_s: float = 2.0
    """Between looks at who is there."""
    give_up_s: float = 20.0
    """Most that a listener may take to stop a queue: above its own bound, `drain_s`."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.lease_s <= 3600.0 or not 0 < self.look_s <= self.lease_s or self.give_up_s <= 0:
            raise InvalidOption("times of a balancer that cannot be", got=str(self), hint="See LeaseTimes.")

    @property
    def renew_s(self) -> float:
        """Between renewals."""
        return self.lease_s / 3

    @property
    def margin_s(self) -> float:
        """So long before a lease ends it is counted on no more: what runs is to stop until then."""
        return self.lease_s / 10


@dataclass(slots=True, eq=False)
class _Right:
    """A queue's lease. `is_leaving`: it is being given up; `is_let_go`: it must not be renewed any more."""

    lease: Lease
    is_leaving: bool = False
    is_let_go: bool = False


class LeasedBalancer:
    """A `QueueBalancer`. `host` names this host among the others, no two at a time; default: the owner."""

    def __init__(
        self,
        leases: LeaseProvider,
        policy: Policy,
        *,
        host: str | None = None,
        times: LeaseTimes = LeaseTimes(),
    ) -> None:
        """`leases` are for the hosts of these queues alone; the balancer closes them when it is stopped."""
        self.host: Final = check_lease_owner(host or leases.owner)
        self.hosts: frozenset[str] = frozenset()
        """Who was there at the last look."""
        self.owners: Mapping[str, str] = {}
        """By name of a queue: the owner of its lease at the last look."""
        self._leases, self._policy, self._times = leases, policy, times
        self._mapper: QueueMapper | None = None
        self._place: Lease | None = None
        """The lease of `host`."""
        self._rights: dict[QueueId, _Right] = {}
        """In the order in which they were won."""
        self._stopping_here: dict[QueueId, int] = {}
        """Tokens of queues that were lost, and are not known to have stopped here yet."""
        self._left: set[int] = set()
        """Tokens of those that never said that they stopped: their leases must lapse."""
        self._listeners = Listeners(self.host, times.give_up_s)
        self._wake, self._stopping, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # As a balancer

    async def start(self, mapper: QueueMapper) -> None:
        """Begin to win queues. Once; `rt.Closed` behind `stop`."""
        if self._stopping.is_set():
            raise Closed("the balancer was stopped", where=self.host)
        assert self._mapper is None, "started twice"
        self._mapper = mapper
        self._spawn(self._look_around(mapper))
        self._spawn(self._keep_renewed())

    def my_queues(self) -> Mapping[QueueId, Fence]:
        """The queues to be served here now, each with its fence."""
        if self._ended.is_set():
            return {}
        end_s = self._leases.now_s() + self._times.margin_s
        return {
            queue: Fence(right.lease.token)
            for queue, right in self._rights.items()
            if right.lease.until_s > end_s and not right.is_let_go
        }

    def subscribe(self, listener: QueueListener) -> bool:
        """Have it told of changes; False if it is told already."""
        return self._listeners.add(listener)

    def unsubscribe(self, listener: QueueListener) -> bool:
        """Tell it nothing any more; False if it was not told."""
        return self._listeners.remove(listener)

    async def stop(self) -> None:
        """Give every queue up, and this host's place; then end. Twice is allowed."""
        if self._stopping.is_set():
            await self._ended.wait()
            return
        self._stopping.set()
        self._wake.set()
        try:
            await asyncio.gather(*(self._give_up(queue) for queue in list(self._rights)))
            while busy := [task for task in self._tasks if task.get_name() != "renewals"]:
                await asyncio.gather(*busy)
            if self._place is not None:
                await self._leases.release([self._place])
        except RtError as error:  # They lapse.
            logger.warning("leases_left host=%s error=%r", self.host, str(error))
        finally:
            self._ended.set()
            self._rights.clear()
            self._listeners.clear()
            self._arm()
            for task in self._tasks:
                task.cancel()
            await self._leases.close()

    # Looking around

    async def _look_around(self, mapper: QueueMapper) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                await self._look(mapper)
            except RtError as error:  # A certificate, say, that somebody may put right.
                logger.error("balancer_cannot_look host=%s error=%r", self.host, str(error))
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
        if self._place is None or self._stopping.is_set():
            return
        present = {name.removeprefix(HOSTS) for name in rows if name.startswith(HOSTS)}
        self.hosts = frozenset(present | {self.host})
        self.owners = {
            name.removeprefix(QUEUES): row.owner for name, row in rows.items() if name.startswith(QUEUES)
        }
        wishes = self._policy.wishes(self._view(mapper))
        for queue in wishes.give_up:
            if queue in self._rights and not self._rights[queue].is_leaving:
                self._spawn(self._give_up(queue))
        await self._take([queue for queue in wishes.take if self._may_take(queue)])

    def _view(self, mapper: QueueMapper) -> View:
        held = [queue for queue, right in self._rights.items() if not right.is_leaving]
        taken = (queue for queue in mapper.queues if queue.name in self.owners or not self._may_take(queue))
        return View(
            self.host,
            self.hosts,
            mapper,
            held,
            frozenset(taken) - frozenset(held),
            self._leases.now_s(),
        )

    def _may_take(self, queue: QueueId) -> bool:
        return queue not in self._rights and queue not in self._stopping_here

    async def _disown(self, rows: Mapping[str, Holder]) -> None:
        """Let go of what is this owner's, and nobody here knows of."""
        known = {right.lease.token for right in self._rights.values()}
        known |= {*self._stopping_here.values(), *self._left}
        if self._place is not None:
            known.add(self._place.token)
        lost = [
            Lease(name, row.token, 0.0, 0.0)
            for name, row in rows.items()
            if row.owner == self._leases.owner and row.token not in known
        ]
        if lost:
            logger.info("lets_go_of_unknown_leases host=%s leases=%d", self.host, len(lost))
            if all(one is LeaseResult.OK for one in await self._leases.release(lost)):
                self._wake.set()  # They are to be had.

    async def _join(self, rows: Mapping[str, Holder]) -> None:
        if self._place is not None:
            return
        name = f"{HOSTS}{self.host}"
        (answer,) = await self._leases.acquire([name], self._times.lease_s)
        if answer.lease is not None:
            self._place = answer.lease
            self._arm()
        elif answer.result is LeaseResult.NOT_AVAILABLE and name in rows:
            logger.warning("host_is_there_already host=%s owner=%s", self.host, rows[name].owner)

    async def _take(self, queues: Iterable[QueueId]) -> None:
        wanted = list(queues)
        if not wanted:
            return
        names = [f"{QUEUES}{queue.name}" for queue in wanted]
        answers = await self._leases.acquire(names, self._times.lease_s)
        won = [
            (queue, answer.lease)
            for queue, answer in zip(wanted, answers, strict=True)
            if answer.lease is not None
        ]
        if self._stopping.is_set():
            await self._leases.release([lease for _, lease in won])
            return
        for queue, lease in won:
            self._rights[queue] = _Right(lease)
        if won:
            self._arm()
            self._listeners.tell()

    # Keeping

    async def _keep_renewed(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("renewals")
        while True:
            delay_s = self._times.renew_s
            try:
                if not await self._renew():
                    delay_s = min(RETRY_S, delay_s)
            except RtError as error:
                logger.error("balancer_cannot_renew host=%s error=%r", self.host, str(error))
                delay_s = min(RETRY_S, delay_s)
            await asyncio.sleep(delay_s)

    async def _renew(self) -> bool:
        """Renew what is held; False: of some of it nothing is known."""
        rights = [(queue, right) for queue, right in self._rights.items() if not right.is_let_go]
        place = self._place
        leases = [right.lease for _, right in rights] + ([place] if place is not None else [])
        answers = list(await self._leases.renew(leases)) if leases else []
        is_known = all(answer.result is not LeaseResult.TRANSIENT_FAILURE for answer in answers)
        if place is not None and self._place is place:
            answer = answers[-1]
            if answer.result is not LeaseResult.TRANSIENT_FAILURE:
                self._place = answer.lease
        for (queue, right), answer in zip(rights, answers, strict=False):
            if self._rights.get(queue) is not right or right.is_let_go:
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
        ends = [right.lease.until_s for right in self._rights.values()]
        if self._place is not None:
            ends.append(self._place.until_s)
        if ends and not self._ended.is_set():
            left_s = min(ends) - self._times.margin_s - self._leases.now_s()
            # The loop's clock may stand still while the machine sleeps, and the leases' goes on.
            delay_s = min(max(left_s, 0.0), CLOCK_LOOK_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_end)

    def _on_end(self) -> None:
        end_s = self._leases.now_s() + self._times.margin_s
        if self._place is not None and self._place.until_s <= end_s:
            self._place = None
        for queue in [queue for queue, right in self._rights.items() if right.lease.until_s <= end_s]:
            self._lose(queue, "it was not renewed in time")
        self._arm()

    # Giving up, and losing

    async def _give_up(self, queue: QueueId) -> None:
        """Have it stopped, let its lease go, and say so; all of it while the lease can be counted on."""
        right = self._rights.get(queue)
        if right is None or right.is_leaving:
            return
        right.is_leaving = True
        has_stopped = await self._listeners.release(queue)
        if self._rights.get(queue) is not right:
            return  # It was lost meanwhile.
        right.is_let_go = True
        if has_stopped:
            result = LeaseResult.TRANSIENT_FAILURE
            try:
                (result,) = await self._leases.release([right.lease])
            finally:
                if self._rights.get(queue) is right:
                    del self._rights[queue]
                    self._listeners.tell()
            if result is LeaseResult.TRANSIENT_FAILURE:
                logger.warning("lease_left queue=%s host=%s", queue, self.host)
            return
        logger.error("queue_does_not_stop queue=%s host=%s; its lease lapses", queue, self.host)
        self._lose(queue, "it was to be given up, and did not stop")

    def _lose(self, queue: QueueId, why: str) -> None:
        logger.warning("queue_lost queue=%s host=%s why=%r", queue, self.host, why)
        self._stopping_here[queue] = self._rights.pop(queue).lease.token
        self._spawn(self._revoke(queue))

    async def _revoke(self, queue: QueueId) -> None:
        has_stopped = False
        try:
            has_stopped = await self._listeners.revoke(queue)
        finally:
            token = self._stopping_here.pop(queue)
            if not has_stopped:
                self._left.add(token)
            self._listeners.tell()
            self._wake.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("balancer_failed host=%s", self.host, exc_info=error)

"""An engine of queries that moves between machines: the host that holds its lease runs it.

    standby ── the lease is free ──► owner: `build` opens the store with the lease's token, makes the engine
       ▲                               │
       └── the lease or the store ─────┘  the engine ends without a checkpoint
           is lost

Invariants:
- The engine processes messages only while this host holds the lease by its clock.
- The store refuses the commits of a host after the next one has opened it. So a host that was paused for
  longer than its lease changes nothing when it continues.
- The lease is released only when nothing of the engine runs here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, TypeAlias

from rt.errors import Fenced, RtError, StorageError
from rt.names import check_lease_name
from rt.query.runner import EngineRunner
from rt.streams.balancer.lease import LeaseProvider, LeaseTimes, OwnedLease
from rt.streams.balancer.lease_keeper import LeaseKeeper
from rt.streams.core.stream_id import QueueId

Build: TypeAlias = Callable[[int, ExitStack], EngineRunner]

TIMES: Final = LeaseTimes(lease_s=5.0, look_s=0.5)
_POLL_S: Final = 0.1
"""Seconds between two calls of `until` while this host waits."""

logger = logging.getLogger("rt.query")


class QueryHost:
    """Runs an engine while this host holds the lease `name`, and waits as a standby while another does.

    `leases`: the leases of this process, such as `rt.streams.ClusterLeases(endpoints, tls, group)`. They are
    closed at the end of `run`. `name` is relative to their group.

    `build(fence, stack)` makes and recovers the engine, in a thread of its own. `fence` is the token of the
    lease: open the store with it. Put everything that must be closed on `stack`, which is closed when the
    engine ends here.

    `times`: after a host was lost, another host continues about `lease_s` + `look_s` later.
    """

    def __init__(self, leases: LeaseProvider, name: str, build: Build, *, times: LeaseTimes = TIMES) -> None:
        check_lease_name(f"group/{name}")
        self._leases, self._build, self._times = leases, build, times
        self._queue: Final = QueueId(0, name)
        self._owner = ""

    @property
    def owner(self) -> str:
        """The owner of the lease at the last poll of this host. Empty if there is none, or it is not
        known.
        """
        return self._owner

    def run(self, until: Callable[[], bool]) -> None:
        """Run the engine whenever the lease is free, until `until()` is true. Call once.

        When `until()` is true, the engine makes a checkpoint and ends. Then the lease is released, so that a
        standby continues immediately. `until` is called in two threads.

        If the lease is lost, the store refuses a commit (`rt.Fenced`), or a store, disk or node fails
        (`rt.StorageError`, or an error that is `retriable`), the engine ends without a checkpoint and this
        host becomes a standby. Any other error of the engine, and of the leases, is raised.
        """
        asyncio.run(self._run(until))

    async def _run(self, until: Callable[[], bool]) -> None:
        keeper = LeaseKeeper(self._leases, self._leases.owner, self._times, lambda: None)
        keeper.begin()
        try:
            while not until():
                pause_s = self._times.look_s
                if (lease := await self._acquire()) is not None and not await self._own(keeper, lease, until):
                    pause_s *= 2  # So that another host acquires the lease first.
                await _pause(pause_s, until)
        finally:
            keeper.end()
            await self._leases.close()

    async def _acquire(self) -> OwnedLease | None:
        """Acquire the lease if it is free. None if it is not."""
        name = self._queue.name
        rows = await self._leases.held(name)
        if rows is None:
            return None
        holder = rows.get(name)
        if holder is None:
            (answer,) = await self._leases.acquire([name], self._times.lease_s)
            return answer.lease
        if holder.owner == self._leases.owner:
            # This host acquired it and the answer was lost, or did not renew it in time.
            await self._leases.release([OwnedLease(name, holder.token, 0.0, 0.0)])
        elif holder.owner != self._owner:
            logger.info("engine_standby lease=%s owner=%s token=%d", name, holder.owner, holder.token)
        self._owner = holder.owner
        return None

    async def _own(self, keeper: LeaseKeeper, lease: OwnedLease, until: Callable[[], bool]) -> bool:
        """Run the engine until the lease is lost or `until()` is true.

        Returns False if another host may succeed where this one failed. The lease is released if it is still
        held.
        """
        logger.info("engine_owner lease=%s owner=%s token=%d", lease.name, self._leases.owner, lease.token)
        self._owner = self._leases.owner
        turn = _Turn(keeper, self._queue, lease.token, self._leases.now_s)
        keeper.listeners.add(turn)
        keeper.add({self._queue: lease})
        work = asyncio.ensure_future(asyncio.to_thread(self._serve, turn, until))
        try:
            await asyncio.wait([work])
        finally:
            turn.is_over = True  # If this task was cancelled, the engine still ends normally.
            await asyncio.wait([work])
            turn.ended.set()
            await keeper.give_up_all()
            keeper.listeners.remove(turn)
            self._owner = ""
        return self._has_succeeded(lease, work.exception())

    def _serve(self, turn: _Turn, until: Callable[[], bool]) -> None:
        def is_over() -> bool:
            turn.require_held()
            return turn.is_over or until()

        with ExitStack() as stack:
            self._build(turn.token, stack).run(is_over)

    def _has_succeeded(self, lease: OwnedLease, error: BaseException | None) -> bool:
        """Whether the engine ended normally. Raises an error that another attempt does not solve."""
        if error is None:
            logger.info("engine_released lease=%s token=%d", lease.name, lease.token)
            return True
        if isinstance(error, Fenced):
            logger.warning("engine_fenced lease=%s token=%d error=%r", lease.name, lease.token, str(error))
            return False
        if isinstance(error, StorageError) or (isinstance(error, RtError) and error.retriable):
            logger.error("engine_failed lease=%s token=%d error=%r", lease.name, lease.token, str(error))
            return False
        raise error


class _Turn:
    """One run of the engine on this host, under one token of the lease. A `QueueListener`."""

    def __init__(self, keeper: LeaseKeeper, queue: QueueId, token: int, now_s: Callable[[], float]) -> None:
        self.token: Final = token
        self.is_over = False
        self.ended: Final = asyncio.Event()
        """Set when nothing of the engine runs."""
        self._keeper, self._queue, self._now_s = keeper, queue, now_s

    def require_held(self) -> None:
        """`rt.Fenced` if another host may already hold the lease. Any thread may call this."""
        until_s = self._keeper.owned.valid_until_s(self._queue)
        if until_s is None or self._now_s() >= until_s:
            raise Fenced("another host may have the lease", where=self._queue.name, got=f"token {self.token}")

    def queues_changed(self) -> None:
        """Do nothing: the engine checks the lease before each round."""

    async def release(self, queue: QueueId) -> None:
        """Do nothing: the lease is released when the engine has ended."""

    async def revoke(self, queue: QueueId) -> None:
        assert queue == self._queue
        await self.ended.wait()


async def _pause(seconds: float, until: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while not until() and (left_s := end_s - loop.time()) > 0:
        await asyncio.sleep(min(_POLL_S, left_s))

"""One member of a group: follows the leases of the partitions, reads the stream, and acknowledges.

Invariants:
- A partition is handled only while its lease is valid by the clock, from the position that the cluster has.
- It is released only after its call under way has ended and its position is acknowledged.
- Without a valid lease nothing is acknowledged: after a pause of this process an operator may have reset or
  deleted the positions.
- The first error that cannot be retried ends the member: it gives up everything it has, then raises.

For one event loop; the subscriber reads in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import islice
from typing import Final, Protocol

from rt.errors import InvalidOption, RtError
from rt.log.scan.message_batch import MessageBatch
from rt.net.lease_client import GroupProgress
from rt.streams.balancer.balancer import Fence, QueueListener
from rt.streams.core.stream_id import QueueId
from rt.streams.group.handlers import TURN_MESSAGES, HandlerCalls
from rt.streams.group.lanes import Lane, Lanes
from rt.streams.group.options import GroupOptions
from rt.streams.group.partitions import Partitions
from rt.streams.queue.mapper import QueueMapper

logger = logging.getLogger("rt.streams.group")

_READ_S: Final = 1.0
_READ_MESSAGES: Final = 1000
_AGAIN_S: Final = 0.5
"""The wait before a failed read of the positions is tried again."""
_LEFT_S: Final = 1.0
"""How long the end of a member waits for cancelled handlers."""
_LEASE_S: Final = 0.05
"""How often a lease that has ended by the clock is checked, until it is renewed or lost."""


class PositionCalls(Protocol):
    """The positions of a group: `rt.net.lease_client.LeaseCalls`."""

    async def acknowledge(self, positions: Mapping[str, int]) -> GroupProgress: ...


class Reader(Protocol):
    """The part of `rt.Subscriber` that a member uses. One thread at a time calls it, except `call_off`."""

    @property
    def position(self) -> int: ...

    def seek(self, position: int) -> None: ...

    def next_batch(self, timeout: float | None, max_messages: int | None) -> MessageBatch | None: ...

    def call_off(self) -> None: ...


class PartitionLeases(Protocol):
    """The part of `rt.streams.LeaseBalancer` that a member uses."""

    async def start(self, mapper: QueueMapper) -> None: ...

    def my_queues(self) -> Mapping[QueueId, Fence]: ...

    def valid_until_s(self, queue: QueueId) -> float | None: ...

    def now_s(self) -> float: ...

    def subscribe(self, listener: QueueListener) -> bool: ...

    async def stop(self) -> None: ...


class _Work:
    """A partition that is handled here, and its task."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.is_stopping = False
        self.fed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Member:
    """Run it once. It is the `QueueListener` of its leases."""

    def __init__(
        self,
        partitions: Partitions,
        options: GroupOptions,
        leases: PartitionLeases,
        positions: PositionCalls,
        reader: Reader,
        calls: HandlerCalls,
    ) -> None:
        self._partitions, self._options = partitions, options
        self._leases, self._positions, self._reader, self._calls = leases, positions, reader, calls
        self._lanes = Lanes(partitions)
        self._work: dict[QueueId, _Work] = {}
        self._opening: dict[QueueId, asyncio.Task[None]] = {}
        self._closed_to: dict[QueueId, Fence] = {}
        """The fences at which partitions were given up. A partition is not handled again before a greater
        fence.
        """
        self._room = asyncio.Event()
        self._over = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def waiting(self) -> int:
        """How many messages wait for their handlers."""
        return self._lanes.waiting

    @property
    def waiting_bytes(self) -> int:
        """The approximate memory that the waiting messages need."""
        return self._lanes.waiting_bytes

    @property
    def _is_full(self) -> bool:
        options = self._options
        return self.waiting >= options.buffer_messages or self.waiting_bytes >= options.buffer_bytes

    def stop(self) -> None:
        """End `run`."""
        self._over.set()
        self._room.set()
        self._reader.call_off()

    async def run(self) -> None:
        """Handle messages until `stop`. Raises the error that ended it; everything is given up by then."""
        self._leases.subscribe(self)
        tasks = [asyncio.create_task(self._read_all()), asyncio.create_task(self._acknowledge_all())]
        for task in tasks:
            task.add_done_callback(self._on_done)
        try:
            await self._leases.start(self._partitions.mapper)
            await self._over.wait()
        finally:
            self.stop()
            tasks[1].cancel()
            await asyncio.wait(tasks)
            try:
                await self._leases.stop()
            finally:
                await self._end_all()
        if self._failure is not None:
            raise self._failure

    async def _end_all(self) -> None:
        """End all work: the leases have ended, so nothing may continue. Work that still runs had the time of
        a lease to end.
        """
        left = {*self._opening.values()}
        for work in self._work.values():
            assert work.task is not None
            work.is_stopping = True
            if not work.task.done():
                logger.error("handler_left partition=%s position=%d", work.lane.queue.name, work.lane.done)
            left.add(work.task)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_LEFT_S)

    # QueueListener

    def queues_changed(self) -> None:
        mine = self._leases.my_queues()
        for queue in [*self._closed_to]:
            if queue not in mine:
                del self._closed_to[queue]
        for queue, fence in mine.items():
            is_closed = queue in self._closed_to and fence <= self._closed_to[queue]
            if is_closed or queue in self._work or queue in self._opening or self._over.is_set():
                continue
            task = self._opening[queue] = asyncio.create_task(self._open(queue))
            task.add_done_callback(self._on_done)

    async def release(self, queue: QueueId) -> None:
        work = await self._close(queue)
        if work is not None and work.lane.done > work.lane.acknowledged:
            name, done = self._partitions.position_name(queue), work.lane.done
            if not self._is_held(queue):  # The next member handles some messages again.
                logger.warning("release_not_acknowledged partition=%s error='the lease ended'", queue.name)
                return
            try:
                await self._positions.acknowledge({name: done})
            except RtError as error:  # The next member handles some messages again.
                logger.warning("release_not_acknowledged partition=%s error=%r", queue.name, str(error))

    async def revoke(self, queue: QueueId) -> None:
        await self._close(queue)

    async def _close(self, queue: QueueId) -> _Work | None:
        self._closed_to[queue] = self._leases.my_queues().get(queue, Fence(0))
        if (opening := self._opening.get(queue)) is not None:
            opening.cancel()
            await asyncio.wait([opening])
        work = self._work.get(queue)
        if work is not None:
            await self._end(work)
        return work

    async def _end(self, work: _Work) -> None:
        """Wait for the call under way."""
        work.is_stopping = True
        work.fed.set()
        assert work.task is not None
        try:
            await asyncio.wait([work.task])
        finally:
            if work.task.done():
                self._forget(work)
            else:  # The call hangs, and the time limit for giving it up has passed.
                work.task.add_done_callback(lambda _: self._forget_late(work))

    def _forget(self, work: _Work) -> None:
        if self._work.get(work.lane.queue) is work:
            del self._work[work.lane.queue]
            self._lanes.close(work.lane)
            self._room.set()
            logger.info("partition_given_up partition=%s position=%d", work.lane.queue.name, work.lane.done)

    def _forget_late(self, work: _Work) -> None:
        self._forget(work)
        self.queues_changed()

    # One partition

    async def _open(self, queue: QueueId) -> None:
        try:
            position = await self._position_of(queue)
            while queue not in self._leases.my_queues():
                # The lease is renewed, or it is lost and this task is cancelled.
                await asyncio.sleep(_LEASE_S)
            work = self._work[queue] = _Work(self._lanes.open(queue, position))
            logger.info("partition_taken partition=%s position=%d", queue.name, position)
            work.task = asyncio.create_task(self._serve(work))
            work.task.add_done_callback(self._on_done)
            self._room.set()
            self._reader.call_off()
        finally:
            del self._opening[queue]

    async def _position_of(self, queue: QueueId) -> int:
        while True:
            try:
                found = self._partitions.positions((await self._positions.acknowledge({})).positions)
            except RtError as error:
                if not error.retriable:
                    raise
                logger.info("positions_not_known error=%r", str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if queue not in found:
                raise InvalidOption(
                    "the position of a partition was removed while the group runs",
                    where=self._partitions.position_name(queue),
                    hint="Start the member again: the partition then begins at the group's start.",
                )
            return found[queue]

    async def _serve(self, work: _Work) -> None:
        lane = work.lane

        def may_handle() -> bool:
            """From any thread."""
            return not work.is_stopping and self._is_held(lane.queue)

        while not work.is_stopping:
            if not lane.waiting:
                work.fed.clear()
                await work.fed.wait()
                continue
            done = await self._calls.handle(tuple(islice(lane.waiting, TURN_MESSAGES)), may_handle)
            lane.handled(done)
            self._room.set()
            if not done and not work.is_stopping:
                await asyncio.sleep(_LEASE_S)  # The lease is renewed, or it is lost and the work is stopped.

    def _is_held(self, queue: QueueId) -> bool:
        """Whether the lease of a partition is valid by the clock. From any thread."""
        until_s = self._leases.valid_until_s(queue)
        return until_s is not None and self._leases.now_s() < until_s

    # All partitions

    async def _read_all(self) -> None:
        while not self._over.is_set():
            self._room.clear()
            wanted = self._lanes.wanted()
            if wanted is None or self._is_full:
                await self._room.wait()
                continue
            batch, end = await asyncio.to_thread(self._read, wanted)
            for lane in self._lanes.feed(wanted, batch, end):
                self._work[lane.queue].fed.set()

    def _read(self, wanted: int) -> tuple[MessageBatch | None, int]:
        """In a thread: the next messages from `wanted` on, and the position up to which they were read."""
        try:
            if self._reader.position != wanted:
                self._reader.seek(wanted)
            batch = self._reader.next_batch(_READ_S, _READ_MESSAGES)
        except (StopIteration, asyncio.CancelledError) as error:
            # If this error is raised unchanged, the future of this thread never ends, or the reading task
            # ends silently.
            raise RuntimeError(f"on_event raised {type(error).__name__}") from error
        return batch, max(wanted, self._reader.position if batch is None else batch.end)

    async def _acknowledge_all(self) -> None:
        while True:
            await asyncio.sleep(self._options.commit_every_s)
            found = self._lanes.unacknowledged().items()
            known = {name: one for name, one in found if self._is_held(one[0].queue)}
            if not known:
                continue
            try:
                await self._positions.acknowledge({name: done for name, (_, done) in known.items()})
            except RtError as error:
                if not error.retriable:
                    raise
                logger.warning("not_acknowledged partitions=%d error=%r", len(known), str(error))
                continue
            for lane, done in known.values():
                lane.acknowledged = max(lane.acknowledged, done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            is_serving = any(one.task is task and not one.is_stopping for one in self._work.values())
            error: BaseException | None = RuntimeError("a handler cancelled its task") if is_serving else None
        else:
            error = task.exception()
        if error is not None:
            if self._failure is None:
                self._failure = error
            else:
                logger.error("member_failed error=%r", error)
            self.stop()

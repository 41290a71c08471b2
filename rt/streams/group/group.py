"""`rt.Client.group`: the members of a group share the messages of one stream.

Each message of a matching topic is handled at least once, by one of the members. Order within a topic: the
first handling of a message starts after the first handling of the topic's previous message has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar, overload

from rt.client.subscriber import Subscriber
from rt.errors import Closed, Gap, InvalidOption, RtError
from rt.events import SkipForward
from rt.log.disk import REAL, storage_errors
from rt.log.read.topic_patterns import check_topics
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import is_log_directory
from rt.log.scan.message_batch import Message
from rt.names import check_name
from rt.net.lease_client import LeaseCalls, LeaseRow
from rt.net.tls import TLS
from rt.serializers import Serializer
from rt.sidecar.pull_settings import copy_directory
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.core.stream_id import QueueId
from rt.streams.group.handlers import Handler, HandlerCalls, TopicHandler
from rt.streams.group.member import Member
from rt.streams.group.options import GroupOptions
from rt.streams.group.partitions import Partitions

logger = logging.getLogger("rt.streams.group")

T = TypeVar("T")

_START: Final = "start/"
_CREATE: Final = "create"
_CREATE_S: Final = 30.0
"""How long the lease of the member that creates a group lasts, if that member dies meanwhile."""
_RELEASE_S: Final = 1.0
"""How long the release of that lease is tried."""


class _Leases(LeaseBalancer):
    """The partitions' leases, with their clock."""

    def __init__(self, leases: ClusterLeases, lease_s: float) -> None:
        times = LeaseTimes(lease_s, look_s=min(1.0, lease_s), give_up_s=lease_s)
        super().__init__(leases, times=times)
        self.now_s = leases.now_s


class Group:
    """A member of group `name`: `subscribe`, then `run` or `serve`, once. `stop` from any thread ends it.

    `name` is the name of the subscriber's certificate, which all members share; it also names the group of
    leases (`rt certs issue … --role subscriber --name workers --lease workers`).

    All members must subscribe to the same patterns with the same number of partitions. Members on one machine
    share one copy of the log, below `path`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        name: str,
        *,
        endpoints: Sequence[str],
        tls: TLS,
        options: GroupOptions | None = None,
    ) -> None:
        self.name: Final = check_name(name, kind="group")
        self.stream: Final = check_name(stream, kind="stream")
        if not isinstance(options, GroupOptions | None):
            raise InvalidOption("not options of a group", where="options", got=repr(options)[:200])
        self.options: Final = options or GroupOptions()
        self._path, self._endpoints, self._tls = path, tuple(endpoints), tls
        self._subscriptions: list[TopicHandler] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._member: Member | None = None
        self._is_stopped = False
        self._starting: asyncio.Task[int] | None = None
        self._presence: LeaseRow | None = None

    @overload
    def subscribe(self, pattern: str, handler: Callable[[Message], Awaitable[object] | object]) -> None: ...

    @overload
    def subscribe(
        self,
        pattern: str,
        handler: Callable[[Message, T], Awaitable[object] | object],
        serializer: Serializer[T],
    ) -> None: ...

    def subscribe(self, pattern: str, handler: Handler, serializer: Serializer[T] | None = None) -> None:
        """Call `handler` for each message whose topic matches `pattern` (`*`, `?`, `[…]`).

        It may be a plain function, called in a thread, or `async`. With `serializer` it gets the message and
        its value. If it raises, it is called again after a wait; see `GroupOptions`. A message goes to the
        first pattern that matches.
        """
        if self._loop is not None:
            raise Closed("the group is running", where=self.name, hint="Call subscribe before run.")
        if not isinstance(pattern, str):
            raise InvalidOption("not a pattern of topics", where=self.name, got=repr(pattern)[:200])
        check_topics(pattern)
        if serializer is not None and not callable(getattr(serializer, "loads", None)):
            raise InvalidOption("not a serializer", where="serializer", got=repr(serializer)[:200])
        if not callable(handler):
            raise InvalidOption("not callable", where="handler", got=repr(handler)[:200])
        if any(one.pattern == pattern for one in self._subscriptions):
            raise InvalidOption("the pattern has a handler already", where=self.name, got=repr(pattern))
        self._subscriptions.append(TopicHandler(pattern, handler, serializer))

    def run(self) -> None:
        """Handle messages until `stop`; then give the partitions to the other members.

        Raises what ended it: `rt.HandlerFailed`, `rt.UndecodableValue`, `rt.Gap`, or what prevents reading.
        """
        asyncio.run(self.serve())

    async def serve(self) -> None:
        """`run`, in this event loop. A plain handler runs in a thread. Cancelling it ends it like `stop`."""
        if self._loop is not None:
            raise Closed("a group runs once", where=self.name, hint="Make another with client.group.")
        if not self._subscriptions:
            raise InvalidOption("the group has no handler", where=self.name, hint="Call subscribe first.")
        self._loop = asyncio.get_running_loop()
        patterns = [one.pattern for one in self._subscriptions]
        partitions = Partitions(self.name, patterns, self.options.partitions)
        leases = ClusterLeases(self._endpoints, self._tls, self.name)
        positions = LeaseCalls(self._endpoints, self._tls)
        handlers = HandlerCalls(self._subscriptions, self.options)
        try:
            start = await self._start_unless_stopped(partitions, positions, leases.owner)
            if start is None:
                return
            reader = self._open(start)
            try:
                balancer = _Leases(leases, self.options.lease_s)
                self._member = Member(partitions, self.options, balancer, positions, reader, handlers)
                if self._is_stopped:
                    return
                await self._member.run()
            finally:
                await asyncio.to_thread(reader.close)
        finally:
            handlers.close()
            if self._presence is not None:
                await _release(positions, self._presence)
            await positions.close()
            await leases.close()

    def stop(self) -> None:
        """End `run` or `serve`, which return when all partitions are handed over. From any thread.

        While the group is being created, within about a second.
        """
        self._is_stopped = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: `run` has returned.
                self._loop.call_soon_threadsafe(self._stop_in_loop)

    def _stop_in_loop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._member is not None:
            self._member.stop()

    async def _start_unless_stopped(
        self, partitions: Partitions, calls: LeaseCalls, owner: str
    ) -> int | None:
        """The result of `_start`; None if the group was stopped."""
        if self._is_stopped:
            return None
        self._starting = asyncio.create_task(self._start(partitions, calls, owner))
        try:
            return await self._starting
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None
        finally:
            self._starting = None

    def _open(self, start: int) -> Subscriber:
        return Subscriber(
            self._path,
            self.stream,
            endpoints=self._endpoints,
            tls=self._tls,
            position=start,
            on_event=self.options.on_event,
            connect_timeout=None,
        )

    async def _start(self, partitions: Partitions, calls: LeaseCalls, owner: str) -> int:
        """Return the lowest position of the group. Creates the positions that do not exist, under a lease, so
        that two members cannot give them different values.

        Until the partitions have their leases, another lease shows operators that the group has a member. So
        the positions are not reset or deleted after they were read.
        """
        name = f"{self.name}/{_START}{owner}"
        (token,) = await calls.acquire(owner, [name], self.options.lease_s)
        self._presence = LeaseRow(name, owner, token)
        found = partitions.positions((await calls.acknowledge({})).positions)
        if len(found) < len(partitions.queues):
            name = f"{self.name}/{_CREATE}"
            end_s = time.monotonic() + 2 * _CREATE_S
            while not (token := (await calls.acquire(owner, [name], _CREATE_S))[0]):
                if time.monotonic() > end_s:
                    raise Closed("another member creates the group and does not end", where=self.name)
                await asyncio.sleep(0.2)
            try:
                found = await self._create(partitions, calls)
            finally:
                await _release(calls, LeaseRow(name, owner, token))
        start = min(found.values())
        await self._check_copy(start, calls)
        return start

    async def _check_copy(self, start: int, calls: LeaseCalls) -> None:
        """Raise `rt.Gap` if the copy on this machine starts after `start`, although the nodes have the
        missing messages.

        A group that was deleted may start again at an earlier position. The pull client only continues a
        copy, so the group would skip the messages before the copy.
        """
        directory = copy_directory(os.fspath(self._path), self.stream, ())
        begin = await asyncio.to_thread(_begin_of, directory)
        if begin > start and begin > max(start, (await calls.acknowledge({})).log_start):
            raise Gap(
                "the copy on this machine begins after the group's position",
                event=SkipForward(start, begin, "not in the copy"),
                where=directory,
                got=f"position {begin}",
                expected=f"{start} or less",
                hint="Stop the members on this machine and remove the directory: it is filled again.",
            )

    async def _create(self, partitions: Partitions, calls: LeaseCalls) -> dict[QueueId, int]:
        known = await calls.acknowledge({})
        found = partitions.positions(known.positions)
        begin = known.log_start if self.options.start == "earliest" else known.log_end
        missing = {partitions.position_name(one): begin for one in partitions.queues if one not in found}
        if missing:
            known = await calls.acknowledge(missing)
        return {**found, **partitions.positions(known.positions)}


def _begin_of(directory: str) -> int:
    """The first position of a copy; 0 if there is none, or the subscriber must repair it first."""
    with contextlib.suppress(RtError), storage_errors(directory, "looking for a copy"):
        if is_log_directory(REAL, directory) and (catalog := read_catalog(REAL, directory)).kept:
            return catalog.start
    return 0


async def _release(calls: LeaseCalls, created: LeaseRow) -> None:
    """Release a lease, so that the next member can create the group. If no node releases the lease in time,
    it ends by itself.
    """
    try:
        await calls.release(created.owner, [created], timeout_s=_RELEASE_S)
    except RtError as error:
        logger.warning("creation_not_released group=%s error=%r", created.name, str(error))

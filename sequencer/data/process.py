"""The data process: push and pull servers, session copies, the merger, and what control hears of them.

One event loop; a thread merges, a few sync, and nothing slow happens in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from replicator.calls import ROLES, Call, replication_service
from replicator.items import Life, Place
from replicator.pull_server import PullServicer
from replicator.push_server import PushServicer
from rt.errors import Damaged, DiskFull, Diverged, NotALog, RtError, StorageFailed
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind
from rt.log.table import Identity
from rt.net.rpc import RpcServer, serve
from rt.net.rpc_errors import Unreachable
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.apply import Closed, Fenced, Joined, Merged, Outcome
from sequencer.commands import Command
from sequencer.config import NodeConfig
from sequencer.data.configuring import Configuring
from sequencer.data.copies import Copies, Copy, consumed_number, consumed_place
from sequencer.data.disk_id import open_disk_id
from sequencer.data.healing import Healing
from sequencer.data.intakes import Intakes
from sequencer.data.link import ControlLink
from sequencer.data.merger import Merger, Missing, Reached
from sequencer.data.peers import catch_up, fetch_session
from sequencer.data.replica import Replica
from sequencer.orders import MergeOrder, SessionEnd
from sequencer.rest.clients import Clients, WatchedStores
from sequencer.rest.servers import Rest, Services
from sequencer.rest.syncs import TimedGroupSync
from sequencer.state import Life as OpenLife
from sequencer.state import Session, State

SYNC_MERGED_S: Final = 0.2
"""How often merged bytes are synced; nobody waits for it, but for the tail of orders to become short."""
DISK_S: Final = 2.0
REPORT_JOIN_S: Final = 0.002
"""Control is told of what became durable at most so often: each time costs all nodes' control a little."""
MIND_S: Final = 0.1
STUCK_S: Final = 1.0
"""So long the merger waits for its input before merged bytes are fetched: a publisher may yet bring it."""
FETCH_AGAIN_S: Final = 0.2
OPEN_AGAIN_S: Final = 2.0
"""How long until a copy that could not be opened is tried again: there may be space by then."""
CONSUMED_MAX: Final = 1 << 16
"""Instructions, not merged durably here yet, of which it is known one by one what they consumed."""
THREADS: Final = 8
"""Twice what opening copies may take."""

logger = logging.getLogger("sequencer")


class Data:
    """One node's data process. `run` serves until `stop`; it raises what ends the process."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._boot = os.urandom(8)
        self._disk = open_disk_id(config.sessions_directory)
        self._tls = TLS(config.ca, config.cert, config.key)
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rt-data")
        self._stopping = asyncio.Event()
        self._failure: RtError | None = None
        self._loop = asyncio.get_running_loop()
        self._sync = TimedGroupSync()
        self.replica = Replica(self._on_snapshot, self._on_applied)
        self.link = ControlLink(config.control_socket, self._hello, self._on_message, self._on_lost)
        self.copies = Copies(
            config.sessions_directory,
            self._sync,
            self._pool,
            on_report=self._report_later,
            on_durable=self._on_durable,
            on_failed=self._fail,
            is_merged_here=self._is_merged_here,
        )
        self.intakes = Intakes(
            self.replica, self.copies, len(config.members), self._propose, lambda: self.link.is_up
        )
        self.healing = Healing(config, self._tls, self._pool, self.replica, self.copies, self._fail)
        self.configuring = Configuring(self.replica, self._propose)
        self.merger: Merger | None = None
        self.server: RpcServer | None = None
        self.rest: Rest | None = None
        self._unreported: list[pb.SegmentReport] = []
        self._reported_s = float("-inf")
        self._reported = Reached(0, 0, 0, 0)
        self._consumed: deque[tuple[int, tuple[SessionEnd, ...]]] = deque()
        """Of instructions that are not merged durably here yet."""
        self._consumed_by: dict[int, int] = {}
        """By session id: the last instruction that consumed of it, or a later one."""
        self._opening: set[int] = set()
        """Sessions whose copies are being opened."""
        self._fetching: set[int] = set()
        """Sessions of which a peer's copy is fetched although they are open."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until `stop`."""
        for work in (
            self.link.run(),
            self._keep_merged_durable(),
            self._tell_disk(),
            self._mind_merging(),
            self.healing.mender.run(),
            self.healing.scrubber.run(),
        ):
            self._spawn(self._for_ever(work))
        clients = Clients()
        push = PushServicer(WatchedStores(self.intakes, clients), self.config.stream)
        pull = PullServicer(NodeLogs(self), self.config.stream, self._pool, disk=self.healing.disk)
        self.server = await serve(
            _address(self.config.listen, self.config.data_port),
            [replication_service(push=push.push, pull=partial(self._pull, pull))],
            roles=ROLES,
            tls=self._tls,
        )
        services = Services(push, pull, clients, self._sync.durations, self.server.refused)
        try:
            self.rest = Rest(self, services, self._tls)
            await self.rest.start()
            await self._stopping.wait()
        finally:
            await self._close()
        if self._failure is not None:
            raise self._failure

    async def _pull(self, servicer: PullServicer, requests: Any, context: Call) -> None:
        """Serve a pull; what it finds damaged is mended."""
        try:
            await servicer.pull(requests, context)
        except Damaged as error:
            self.healing.mender.on_damaged(error)
            raise

    @property
    def failure(self) -> RtError | None:
        """What ends `run`."""
        return self._failure

    def stop(self) -> None:
        """End `run`; in the loop."""
        self._stopping.set()

    async def _close(self) -> None:
        if self.rest is not None:
            await self.rest.close()
        if self.server is not None:
            await self.server.stop(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sync.close()
        if self.merger is not None:
            merger, self.merger = self.merger, None
            if self._failure is None:
                await self._loop.run_in_executor(self._pool, merger.sync)
            await self._loop.run_in_executor(self._pool, merger.close)
        await self.copies.close()
        self._pool.shutdown()

    # From the control process

    def _hello(self) -> pb.DataHello:
        instruction = self.merger.durable.instruction if self.merger is not None else 0
        return pb.DataHello(boot=self._boot, instruction=instruction, disk=self._disk)

    def _on_message(self, message: pb.ToData) -> None:
        self.replica.on_message(message)
        if message.HasField("standing"):
            self.intakes.on_changed()
        elif message.HasField("fetch") and message.fetch.session_id not in self._fetching:
            self._spawn(self._fetch(message.fetch))

    def _on_lost(self) -> None:
        self.intakes.on_changed()

    def _on_snapshot(self, orders: list[MergeOrder] | None) -> None:
        state = self.replica.state
        assert state is not None
        if not any(state.cluster):
            return
        if orders is not None:
            self._begin_merging(state, orders)
        assert self.merger is not None
        self._report_merged(self.merger.durable)  # Control begins anew, and knows nothing.
        for session in state.sessions.values():
            self._report_session(session)
        self._spawn(self._confirm(state.joins))
        self.intakes.on_changed()

    def _begin_merging(self, state: State, orders: list[MergeOrder]) -> None:
        if self.merger is None:
            self._open_merger(state)
        assert self.merger is not None
        self._consumed.clear()
        self._consumed.extend((one.instruction, one.consumed) for one in orders)
        ends = tuple(_consumed_ends(state))
        self._consumed.append((state.instruction, ends))
        self._consumed_by = dict.fromkeys((end.session_id for end in ends), state.instruction)
        merged = state.merged
        end = Place(*merged.segment, merged.offset) if merged.segment is not None else None
        self.merger.begin(
            orders,
            end,
            Reached(state.instruction, merged.chain, merged.total_bytes, state.position),
        )

    def _is_merged_here(self, session_id: int) -> bool:
        """Whether all that the cluster merged of a session is durable in this node's merged log."""
        merger = self.merger
        if merger is None or merger.gap is not None or merger.damage is not None:
            return False
        return self._consumed_by.get(session_id, 0) <= merger.durable.instruction

    def _open_merger(self, state: State) -> None:
        identity = Identity(Kind.MERGED, state.cluster, self.config.stream)
        self.merger = Merger(
            self.config.merged_directory,
            identity,
            self.copies,
            on_failed=self._wake_on_failed,
        )
        if self.merger.damage is not None:
            self._must_be_mended(self.merger.damage)

    def _must_be_mended(self, damage: Damaged) -> None:
        """The merged log cannot be opened: have it mended. `rt.Damaged` if nobody can."""
        if not self._endpoints or not self.healing.mender.on_damaged(damage):
            raise damage

    def _report_session(self, session: Session) -> None:
        """Open the copy of a session that has something to merge, and tell control what is there."""
        copy = self.copies.get(session.id)
        consumed = consumed_place(session)
        if copy is not None:
            if consumed is not None:
                copy.store.note_merged(consumed, consumed_number(session) or 0)
            for report in copy.reports(consumed):
                self._report_later(report)
            for life in session.lives:
                if life.is_fenced and life.end is None and life.x not in copy.finals:
                    self._spawn(self._finish(session.id, life.x))
        elif session.lives:
            self._spawn(self._open_copy(session.id))
        if session.life is not None and session.life.end is not None:
            x, end = session.life.x, session.life.end
            self._spawn(self._complete(session.id, Place(x, end.y, end.offset)))

    async def _open_copy(self, session_id: int) -> None:
        """Open a session's copy, as often as it takes, and say what is final of it."""
        if session_id in self._opening:
            return
        self._opening.add(session_id)
        try:
            copy = await self._opened(session_id)
        finally:
            self._opening.discard(session_id)
        session = self._session(session_id)
        if copy is None or session is None:
            return
        consumed = consumed_place(session)
        if consumed is not None:
            copy.store.note_merged(consumed, consumed_number(session) or 0)
        for life in session.lives:
            if life.is_fenced and life.end is None:
                await self.copies.finish(copy, life.x)

    async def _opened(self, session_id: int) -> Copy | None:
        told = ""
        while (session := self._session(session_id)) is not None:
            try:
                return await self.copies.open_copy(session)
            except RtError as error:
                if isinstance(error, Damaged):
                    self.healing.mender.on_damaged(error)
                if str(error) != told:
                    told = str(error)
                    logger.error(
                        "session_copy_failed session=%s id=%d error=%r", session.name, session_id, told
                    )
            await asyncio.sleep(OPEN_AGAIN_S)
        return None

    def _session(self, session_id: int) -> Session | None:
        state = self.replica.state
        return None if state is None else state.sessions.get(session_id)

    def _on_applied(self, command: Command, outcome: Outcome) -> None:
        match outcome:
            case Merged(order):
                self._note_consumed(order)
                assert self.merger is not None
                self.merger.add(order)
                for end in order.consumed:
                    self._consumed_by[end.session_id] = order.instruction
                    copy = self.copies.get(end.session_id)
                    if copy is not None:
                        copy.store.note_merged(Place(end.x, end.y, end.offset), end.number)
                    elif end.session_id not in self._opening:
                        self._spawn(self._open_copy(end.session_id))
                self.intakes.on_changed()
            case Fenced(session_id, x):
                self._spawn(self._finish(session_id, x))
            case Closed(session_id, x, end):
                self._spawn(self._complete(session_id, Place(x, end.y, end.offset)))
            case Joined():
                assert self.replica.state is not None
                self._spawn(self._confirm(self.replica.state.joins))
        self.configuring.on_applied(command)
        self.intakes.on_applied(command, outcome)

    def _note_consumed(self, order: MergeOrder) -> None:
        """Of very many the older half counts as its last one: what it consumed is let go of later."""
        self._consumed.append((order.instruction, order.consumed))
        if len(self._consumed) > CONSUMED_MAX:
            furthest: dict[int, SessionEnd] = {}
            instruction = 0
            for _ in range(CONSUMED_MAX // 2):
                instruction, ends = self._consumed.popleft()
                furthest.update((end.session_id, end) for end in ends)
            self._consumed.appendleft((instruction, tuple(furthest.values())))

    async def _confirm(self, joins: int) -> None:
        """Say that all was reported which is durable here now that so many disks have joined."""
        unread = set(self._opening)
        while unread & self._opening:
            await asyncio.sleep(MIND_S)
        self._report()
        self.link.send(pb.ToControl(report=pb.DataReport(joins=joins)))

    async def _finish(self, session_id: int, x: int) -> None:
        copy = self.copies.get(session_id)
        if copy is None:
            await self._open_copy(session_id)
        else:
            await self.copies.finish(copy, x)

    async def _complete(self, session_id: int, end: Place) -> None:
        """Have what this node lacks of an X that ends at `end`: a majority must hold it to have it merged."""
        assert self.replica.state is not None
        life = self.replica.state.sessions[session_id].life_of(end.x)
        at = 0
        while life is not None and self._endpoints:
            copy = await self._opened(session_id)
            if copy is None or (end.segment == (end.x, 0) and end.offset <= SEGMENT_HEADER_BYTES):
                return
            endpoint = self._endpoints[at % len(self._endpoints)]
            at += 1
            try:
                # Peers may have let go of what is merged.
                await self.copies.skip_merged(copy, self.replica.state.sessions[session_id])
                place = copy.receiver.place
                if place is not None and place >= end:
                    return
                await fetch_session(
                    self.copies,
                    copy,
                    Life(life.x, life.life),
                    end,
                    self.config.stream,
                    endpoint,
                    self._tls,
                )
            except RtError as error:
                logger.warning(
                    "fetch_failed session_id=%d peer=%s error=%r", session_id, endpoint, str(error)
                )
                await asyncio.sleep(FETCH_AGAIN_S)
            life = self.replica.state.sessions[session_id].life_of(end.x)

    async def _fetch(self, wanted: pb.Fetch) -> None:
        """Get what a peer has of a life that is open and that nobody sends, for as long as nobody does."""
        self._fetching.add(wanted.session_id)
        try:
            await self._fetch_open(wanted)
        except StorageFailed:
            raise
        except RtError as error:  # The leader says it again.
            logger.warning(
                "fetch_failed session_id=%d peer=%s error=%r", wanted.session_id, wanted.holder, str(error)
            )
        finally:
            self._fetching.discard(wanted.session_id)

    async def _fetch_open(self, wanted: pb.Fetch) -> None:
        life, member = self._open_life(wanted), self.config.members.get(wanted.holder)
        copy = None if life is None or member is None else await self._opened(wanted.session_id)
        session = self._session(wanted.session_id)
        if copy is None or session is None or life is None or member is None or copy.has_stream:
            return

        def check() -> None:
            if copy.has_stream or self._open_life(wanted) != life:
                raise Unreachable("its publisher is back, or it is being closed", where=session.name)

        await self.copies.skip_merged(copy, session)
        place, end = copy.receiver.place, Place(wanted.x, wanted.y, wanted.offset)
        if place is not None and place.x < life.x and not copy.receiver.has_ended:
            await self.copies.skip_to(copy, session, Place(life.x, 0, 0), None)
        if place is None or place < end:
            logger.info("fetches session=%s peer=%s up_to=%s", session.name, wanted.holder, end)
            source = self.config.stream, member.data, self._tls
            await fetch_session(self.copies, copy, Life(life.x, life.life), end, *source, check)

    def _open_life(self, wanted: pb.Fetch) -> OpenLife | None:
        """The life as it was opened; None if it takes no more bytes."""
        session = self._session(wanted.session_id)
        life = None if session is None else session.life
        is_open = life is not None and life.x == wanted.x and not life.is_fenced and life.end is None
        return life if is_open else None

    async def _mind_merging(self) -> None:
        """Where the merger cannot go on by itself, get merged bytes from a peer."""
        waiting: Missing | None = None
        since = 0.0
        while True:
            await asyncio.sleep(MIND_S)
            merger = self.merger
            if merger is None or merger.failure is not None or not self._endpoints:
                continue
            if merger.damage is not None:
                await self._open_mended(merger, merger.damage)
                continue
            missing = merger.missing
            if missing != waiting:
                waiting, since = missing, self._loop.time()
            is_stuck = missing is not None and self._loop.time() - since >= STUCK_S
            if merger.gap is not None or is_stuck:
                await self._catch_up(merger)
                waiting = None

    async def _open_mended(self, merger: Merger, damage: Damaged) -> None:
        """Open the merged log once what was damaged is mended; there may be more of it."""
        if damage.path in self.healing.mender.damages:
            return
        await self._loop.run_in_executor(self._pool, merger.resume)
        if merger.damage is not None:
            if merger.damage.path == damage.path:
                raise merger.damage  # All that was synced verifies: it is something else.
            self._must_be_mended(merger.damage)

    async def _catch_up(self, merger: Merger) -> None:
        """Get all that is merged by now: step by step it would never come near a stream that flows."""
        wanted, state = merger.gap, self.replica.state
        assert state is not None
        target = state.position
        logger.info("catches_up from_position=%d to_position=%d place=%s", merger.position, target, wanted)
        await self._loop.run_in_executor(self._pool, merger.hold)
        try:
            await catch_up(
                self.config.merged_directory,
                self.config.stream,
                self._endpoints,
                self._tls,
                lambda place, reached: (wanted is None or place >= wanted) and reached >= target,
            )
        except RtError as error:
            if isinstance(error, Diverged | StorageFailed):
                self._fail(error)
                raise
            logger.warning("catching_up_failed error=%r", str(error))
        finally:
            await self._loop.run_in_executor(self._pool, merger.resume)
        logger.info("caught_up to_position=%d", merger.position)

    # To the control process

    def _propose(self, command: bytes) -> None:
        self.link.send(pb.ToControl(propose=command))

    def _report_later(self, report: pb.SegmentReport) -> None:
        if not self._unreported:
            # Alone at once; what comes soon behind it goes together.
            self._loop.call_at(self._reported_s + REPORT_JOIN_S, self._report)
        self._unreported.append(report)

    def _report(self) -> None:
        segments, self._unreported = self._unreported, []
        if segments:
            self._reported_s = self._loop.time()
            self.link.send(pb.ToControl(report=pb.DataReport(segments=segments)))

    def _on_durable(self) -> None:
        """Input became durable: the merger may go on."""
        if self.merger is not None:
            self.merger.wake()

    def _wake_on_failed(self) -> None:
        """From the merger's thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._on_merger_failed)

    def _on_merger_failed(self) -> None:
        if self.merger is not None and self.merger.failure is not None:
            self._report_merged(self.merger.durable, stopped=str(self.merger.failure))
            self._fail(self.merger.failure)

    async def _keep_merged_durable(self) -> None:
        while True:
            await asyncio.sleep(SYNC_MERGED_S)
            if self.merger is None or self.merger.failure is not None:
                continue
            try:
                durable = await self._loop.run_in_executor(self._pool, self.merger.sync)
            except RtError as error:
                self._fail(error)
                return
            if durable != self._reported:
                self._reported = durable
                self._report_merged(durable)
                await self._let_go(durable.instruction)

    def _report_merged(self, durable: Reached, stopped: str = "") -> None:
        merged = pb.MergedReport(
            instruction=durable.instruction,
            chain=durable.chain,
            bytes=durable.total_bytes,
            position=durable.position,
            stopped=stopped,
        )
        self.link.send(pb.ToControl(report=pb.DataReport(merged=merged)))

    async def _let_go(self, instruction: int) -> None:
        """Whole segments of copies that are merged durably here are not needed any more."""
        furthest: dict[int, SessionEnd] = {}
        while self._consumed and self._consumed[0][0] <= instruction:
            for end in self._consumed.popleft()[1]:
                furthest[end.session_id] = end
        for end in furthest.values():
            copy = self.copies.get(end.session_id)
            if copy is None:
                continue
            try:
                await self.copies.trim(copy, Place(end.x, end.y, end.offset))
            except DiskFull as error:
                logger.warning("trimming_waits session_id=%d error=%r", end.session_id, str(error))
                self._consumed.appendleft((instruction, (end,)))

    async def _tell_disk(self) -> None:
        while True:
            found = os.statvfs(self.config.directory)
            report = pb.DataReport(
                disk_bytes=found.f_blocks * found.f_frsize,
                disk_free_bytes=found.f_bavail * found.f_frsize,
            )
            self.link.send(pb.ToControl(report=report))
            await asyncio.sleep(DISK_S)

    # Tasks

    async def _for_ever(self, work: Coroutine[Any, Any, None]) -> None:
        """Without it the process would only seem to be alive, so it ends with it."""
        try:
            await work
        except RtError as error:
            self._fail(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        if isinstance(error, RtError):
            logger.error("task_failed error=%r", str(error))
        else:
            logger.critical("task_failed", exc_info=error)
            self._fail(RtError(f"the data process is broken: {error!r}"))

    def _fail(self, error: RtError) -> None:
        """The process ends: what failed must not be followed by anything."""
        if self._failure is None:
            self._failure = error
            logger.critical("data_process_stops error=%r", str(error))
        self._stopping.set()


def _consumed_ends(state: State) -> Iterator[SessionEnd]:
    for session in state.sessions.values():
        place = consumed_place(session)
        if place is not None:
            yield SessionEnd(session.id, place.x, place.y, place.offset, consumed_number(session) or 0)


def _address(listen: str, port: int) -> str:
    host = listen or "::"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class NodeLogs:
    """The logs of this node, as the pull server needs them (`replicator.pull_server.Logs`)."""

    def __init__(self, data: Data) -> None:
        self._data = data

    @property
    def cluster(self) -> bytes:
        """See the protocol."""
        return self._data.intakes.cluster

    @property
    def epoch(self) -> int:
        """See the protocol."""
        return self._data.replica.standing.epoch

    @property
    def node(self) -> str:
        """See the protocol."""
        return self._data.config.name

    @property
    def merged(self) -> str:
        """See the protocol."""
        return self._data.config.merged_directory

    def session(self, session_id: int) -> str:
        """See the protocol."""
        path = self._data.copies.path(session_id)
        if not os.path.isdir(path):
            raise NotALog("this node has no copy of that session", where=self.node, got=session_id)
        return path

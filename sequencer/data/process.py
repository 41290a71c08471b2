"""The data process: push and pull servers, session copies, the merger, and what control hears of them.

One event loop; a thread merges, a few sync, and nothing slow happens in the loop. Here is what there is, and
who hears of what; what is done about it is in the modules beside this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from replicator.protocol.grpc_service import ROLES, Call, replication_service
from replicator.protocol.messages import LogOffset
from replicator.pull.server import PullServicer
from replicator.push.server import PushServicer
from rt.cluster_epoch import line_of
from rt.errors import ClusterMismatch, Corrupt, RtError
from rt.net.grpc_channel import RpcServer, serve
from rt.net.memory_guard import MemoryGuard
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig
from sequencer.config.restart_policy import RestartLater
from sequencer.data.command_client import CommandClient
from sequencer.data.epoch_guard import EpochGuard
from sequencer.data.hard_reset import HardResetter
from sequencer.data.hold_tracker import HoldTracker
from sequencer.data.http_servers import HttpServers, Services
from sequencer.data.lease_manager import LeaseManager
from sequencer.data.lease_service import LEASE_METHOD_ROLES, LeaseService
from sequencer.data.phase_reporter import PhaseReporter
from sequencer.data.reset_service import ResetService
from sequencer.data.task_group import TaskGroup
from sequencer.ipc.client import ControlLink
from sequencer.ipc.data_reports import DataReports
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.catch_up import CatchUp
from sequencer.merged.log_provider import NodeLogs
from sequencer.merged.merged_log import MergedLog
from sequencer.merged.merger import Merger
from sequencer.merged.repair import RepairService
from sequencer.rest.base.counters import LeaseCounter, TrimCounter
from sequencer.rest.base.node_snapshot import DamagedSegment
from sequencer.rest.http.tunnel import TUNNEL_ROLES, rest_service
from sequencer.sessions.client_tracker import ClientTracker, TrackedStores
from sequencer.sessions.closed_replicas import ClosedReplicas
from sequencer.sessions.disk_id import open_disk_id
from sequencer.sessions.idle_replicas import IdleReplicas
from sequencer.sessions.ingest import SessionIngest
from sequencer.sessions.opener import Opener
from sequencer.sessions.peer_fetch import PeerFetcher
from sequencer.sessions.replicas import SessionReplicas
from sequencer.sessions.sync_timing import TimedGroupCommit
from sequencer.state.apply_result import (
    ClusterReset,
    DiskJoined,
    Forgotten,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
    SegmentsTrimmed,
)
from sequencer.state.commands import Command
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import WritePlan

THREADS: Final = 8
"""Twice what opening copies may take."""


class DataProcess:
    """One node's data process. `run` serves until `stop`; it raises what ends the process."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._boot = os.urandom(8)
        self._loop = asyncio.get_running_loop()
        self._disk = open_disk_id(config.sessions_directory)
        tls = self._tls = TLS(config.ca, config.cert, config.key)
        pool = self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rt-data")
        self._sync = TimedGroupCommit()
        tasks = self.tasks = TaskGroup()
        replica = self.replica = StateFollower(self._on_snapshot, self._on_applied)
        self.link = ControlLink(config.control_socket, self._hello, self._on_message, self._on_lost)
        self.reports = DataReports(self.link)
        copies = self.copies = SessionReplicas(
            config.sessions_directory,
            self._sync,
            pool,
            on_report=self.reports.segment,
            on_durable=self._on_durable,
            on_failed=tasks.fail,
            is_released=self._is_released,
            on_damaged=self._on_bad_copy,
        )
        self.intakes = SessionIngest(
            replica, copies, len(config.members), self._propose, lambda: self.link.is_up
        )
        self.healing = RepairService(config, tls, pool, replica, copies, tasks.fail)
        mender = self.healing.mender
        self.merging = MergedLog(config, pool, copies, self.reports, mender, tasks.fail)
        self.catching_up = CatchUp(
            config, tls, pool, replica, copies, self.merging, mender.damages, tasks.fail
        )
        self.opener = Opener(replica, copies, self.reports, spawn=tasks.spawn, on_damaged=mender.on_damaged)
        self.idle_copies = IdleReplicas(replica, copies, self._is_released)
        self.closed_copies = ClosedReplicas(
            config.sessions_directory,
            replica,
            copies,
            pool,
            lambda: self.merging.released,
            self.merging.on_copy_removed,
        )
        self.fetcher = PeerFetcher(config, tls, replica, copies, self.opener.opened)
        self.commanding = CommandClient(replica, self._propose)
        self.leasing = LeaseManager(replica, self.commanding.propose, lambda: self.link.is_up)
        self.pull_servicer: PullServicer | None = None
        self.holding = HoldTracker(replica, self.commanding.propose, self._on_hold_refused)
        self.stepping = PhaseReporter(replica, self.merging, self.catching_up, self.reports)
        self.belonging = EpochGuard(
            config.name, self._disk, config.sessions_directory, config.merged_directory
        )
        self.clearing = HardResetter(config.sessions_directory, config.merged_directory, config.stream)
        self.resets = ResetService(config.name, replica, self.clearing, self._propose, tasks.spawn)
        self.trims = TrimCounter()
        self.lease_counts = LeaseCounter()
        self.server: RpcServer | None = None
        self.rest: HttpServers | None = None

    # Serving

    async def run(self) -> None:
        """Serve until `stop`."""
        for work in (
            self.link.run(),
            self.merging.keep_durable(),
            self.reports.keep_reporting_disk(self.config.directory),
            self.catching_up.run(),
            self.healing.mender.run(),
            self.healing.scrubber.run(),
            self.holding.run(),
            self.idle_copies.run(),
            self.closed_copies.run(),
            self.reports.keep_reporting_connected(self.copies.connected),
            self.stepping.run(),
        ):
            self.tasks.keep(work)
        clients = ClientTracker()
        logs = NodeLogs(self.config, self.replica, self.copies, self.intakes)
        push = PushServicer(TrackedStores(self.intakes, clients), self.config.stream)
        pull = self.pull_servicer = PullServicer(
            logs,
            self.config.stream,
            self._pool,
            on_acknowledged=self.holding.on_acknowledged,
            confirm_hold=self.holding.confirm,
            check_reach=self.healing.disk.check_reach,
            disk=self.healing.disk,
        )
        self.server = await serve(
            _address(self.config.listen, self.config.data_port),
            [
                replication_service(push=push.push, pull=partial(self._pull, pull)),
                rest_service(lambda: None if self.rest is None else self.rest.answering["rest"]),
                LeaseService(self.leasing).register,
            ],
            roles={**ROLES, **TUNNEL_ROLES, **LEASE_METHOD_ROLES},
            tls=self._tls,
        )
        self.tasks.keep(MemoryGuard(self.server.calls, self.copies.unfinished.make_room).run())
        services = Services(push, pull, clients, self._sync.durations, self.server.refused)
        try:
            self.rest = HttpServers(self, services, self._tls)
            await self.rest.start()
            await self.tasks.stopping.wait()
        finally:
            await self._close()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End `run`; in the loop."""
        self.tasks.stopping.set()

    @property
    def damaged(self) -> tuple[DamagedSegment, ...]:
        """The segments of the merged log that are damaged."""
        return self.healing.damaged_segments()

    @property
    def failure(self) -> RtError | None:
        """What ends `run`."""
        return self.tasks.failure

    @property
    def merger(self) -> Merger | None:
        """None before the node has joined its cluster."""
        return self.merging.merger

    async def _pull(self, servicer: PullServicer, requests: Any, context: Call) -> None:
        """Serve a pull; what it finds damaged is mended."""
        try:
            await servicer.pull(requests, context)
        except Corrupt as error:
            self.healing.mender.on_damaged(error)
            raise self.healing.told(error) from error

    async def _close(self) -> None:
        if self.rest is not None:
            await self.rest.close()
        if self.server is not None:
            await self.server.stop(1.0)
        await self.tasks.cancel()
        await self.fetcher.close()
        await self._sync.close()
        await self.merging.close(sync=self.failure is None)
        await self.copies.close()
        self._pool.shutdown()

    # From the copies, which are made before what merges them

    def _on_hold_refused(self, name: str, why: str) -> None:
        if self.pull_servicer is not None:
            self.pull_servicer.refuse_hold(name, why)

    def _on_durable(self) -> None:
        self.merging.wake()

    def _on_bad_copy(self, damaged: Corrupt) -> None:
        """From the merger's thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self.healing.mender.on_damaged, damaged)

    def _is_released(self, session_id: int) -> bool:
        return self.merging.is_released(session_id)

    # From and to the control process

    def _hello(self) -> pb.DataHello:
        return pb.DataHello(boot=self._boot, instruction=self.merging.instruction, disk=self._disk)

    def _propose(self, command: bytes) -> None:
        self.link.send(pb.ToControl(propose=command))

    def _on_message(self, message: pb.ToData) -> None:
        if self.failure is not None:
            return  # What control goes on to say may be of another line of epochs than what is known here.
        if message.HasField("snapshot") and self._is_forced_apart(message.snapshot.epoch_id):
            self._end(RestartLater("the cluster was forced to go on: whoever is connected is to come again"))
            return
        self.replica.on_message(message)
        if message.HasField("standing"):
            nodes = message.standing.nodes
            self.merging.on_merged({one.name: one.summary.merged.instruction for one in nodes})
            self.intakes.on_changed()
            self.resets.on_changed()
        elif message.HasField("reset_refused"):
            self.resets.on_refused(message.reset_refused.request, message.reset_refused.why)
        elif message.HasField("fetch"):
            self.tasks.spawn(self.fetcher.fetch(message.fetch))

    def _on_lost(self) -> None:
        self.resets.on_lost()
        self.opener.begin()
        self.intakes.on_changed()

    def _on_snapshot(self, orders: list[WritePlan] | None) -> None:
        state = self.replica.state
        assert state is not None
        if not any(state.cluster) or not self._is_in_place(state):
            return
        if orders is not None:
            self.merging.begin(state, orders)
        self.merging.report()
        self.opener.begin()
        left = [order for order in orders or () if order.instruction > self.merging.instruction]
        needed = {end.session_id for order in left for end in order.consumed}
        for session in state.sessions.values():
            self.opener.take_up(session, is_input=session.id in needed)
            life = session.life
            if life is not None and life.is_fenced and life.end is not None:
                x, end = life.run, life.end
                self.tasks.spawn(self.fetcher.complete(session.id, LogOffset(x, end.roll, end.offset)))
        self.opener.confirm(state.joins)
        self.closed_copies.on_snapshot()
        self.intakes.on_snapshot()

    def _is_forced_apart(self, epoch: int) -> bool:
        """Whether control is in another line of epochs than before.

        Streams that are open have told their publishers and subscribers of the old one.
        """
        return self.replica.epoch != 0 and line_of(epoch) != line_of(self.replica.epoch)

    def _end(self, why: RtError) -> None:
        self.tasks.failure = why
        self.tasks.stopping.set()

    def _is_in_place(self, state: SequencerState) -> bool:
        """Whether what is in the directories is what this state goes on with; else the process ends."""
        try:
            self.belonging.check(state)
        except ClusterMismatch as error:
            self._end(error)
            return False
        return self._is_cleared(state)

    def _is_cleared(self, state: SequencerState) -> bool:
        """Whether nothing is here any more that the last hard reset let go of; else the process ends."""
        if not self.clearing.is_due(state):
            return True
        if self.merger is not None or self.copies.all():
            self._end(RestartLater("the cluster was reset: what it let go of goes at the start"))
            return False
        self.clearing.clear(state)
        return True

    def _on_applied(self, command: Command, outcome: Outcome) -> None:
        match outcome:
            case ClusterReset():
                assert self.replica.state is not None
                self._is_cleared(self.replica.state)
            case RangesMerged(order):
                self.merging.add(order)
                for end in order.consumed:
                    self.opener.on_merged(end)
            case RunOpened(session_id):
                self.opener.on_opened(session_id)
            case RunFenced(session_id, run):
                self.tasks.spawn(self.opener.finish(session_id, run))
            case RunClosed(session_id, run, end):
                self.tasks.spawn(self.fetcher.complete(session_id, LogOffset(run, end.roll, end.offset)))
            case DiskJoined():
                assert self.replica.state is not None
                self.opener.confirm(self.replica.state.joins)
            case SegmentsTrimmed():
                assert self.replica.state is not None
                self.merging.on_trimmed(self.replica.state, outcome)
        self.closed_copies.on_applied(outcome)
        if isinstance(outcome, Forgotten):
            self.merging.forget_sessions(outcome.session_ids)
            self.catching_up.forget_sessions(outcome.session_ids)
        self.trims = self.trims.after(outcome)
        self.lease_counts = self.lease_counts.after(outcome)
        self.commanding.on_applied(command, outcome)
        self.holding.on_applied(command, outcome)
        self.leasing.on_applied(command, outcome)
        self.intakes.on_applied(command, outcome)


def _address(listen: str, port: int) -> str:
    host = listen or "::"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

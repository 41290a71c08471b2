"""The data process: its servers, session replicas and merger, and the wiring between them.

One event loop. A thread merges, a few threads sync, and nothing slow runs in the loop. This module decides
which part handles which message; the modules beside it do the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from replicator.protocol.grpc_service import ROLES, Call, replication_service
from replicator.protocol.known_nodes import NO_NODES
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
from sequencer.data.group_positions import GroupPositions
from sequencer.data.group_service import GROUP_METHOD_ROLES, GroupService
from sequencer.data.hard_reset import HardResetter
from sequencer.data.hold_tracker import HoldTracker
from sequencer.data.http_servers import HttpServers, Services
from sequencer.data.lease_manager import LeaseManager
from sequencer.data.lease_service import LEASE_METHOD_ROLES, LeaseService
from sequencer.data.phase_reporter import PhaseReporter
from sequencer.data.publisher_silence import PublisherSilence
from sequencer.data.reset_service import ResetService
from sequencer.data.table_service import TABLE_METHOD_ROLES, TableService
from sequencer.data.task_group import TaskGroup
from sequencer.ipc.client import ControlLink
from sequencer.ipc.data_reports import DataReports
from sequencer.ipc.peer_addresses import PeerAddresses
from sequencer.ipc.state_follower import StateFollower
from sequencer.ipc.supervisor_link import NO_SUPERVISOR, SupervisorLink
from sequencer.merged.catch_up import CatchUp
from sequencer.merged.log_provider import NodeLogProvider
from sequencer.merged.merged_log import MergedLog
from sequencer.merged.merger import Merger
from sequencer.merged.repair import RepairService
from sequencer.rest.base.node_snapshot import LeaseCounter, TrimCounter
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
from sequencer.state.state_codec import decode_state
from sequencer.state.write_plan import WritePlan

THREADS: Final = 8
"""Twice the number that opening session replicas may use."""


class DataProcess:
    """One node's data process. `run` serves until `stop`, or raises the error that ends the process."""

    def __init__(self, config: NodeConfig, supervisor: SupervisorLink = NO_SUPERVISOR) -> None:
        self.config, self._supervisor = config, supervisor
        self._boot = os.urandom(8)
        self._loop = asyncio.get_running_loop()
        self._disk = open_disk_id(config.sessions_directory)
        tls = self._tls = TLS(config.ca, config.cert, config.key)
        pool = self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rt-data")
        self._sync = TimedGroupCommit()
        tasks = self.tasks = TaskGroup()
        follower = self.follower = StateFollower(self._on_snapshot, self._on_applied)
        self.link = ControlLink(config.control_socket, self._hello, self._on_message, self._on_lost)
        self.reports = DataReports(self.link)
        replicas = self.replicas = SessionReplicas(
            config.sessions_directory,
            self._sync,
            pool,
            on_report=self.reports.segment,
            on_durable=self._on_durable,
            on_failed=tasks.fail,
            is_released=self._is_released,
            on_corrupt=self._on_bad_replica,
        )
        self.ingest = SessionIngest(
            follower, replicas, len(config.members), self._propose, lambda: self.link.is_up
        )
        peers = self._peers = PeerAddresses(config)
        self.repair = RepairService(config, tls, peers, pool, follower, replicas, tasks.fail)
        repairer = self.repair.repairer
        self.merged_log = MergedLog(config, pool, replicas, self.reports, repairer, tasks.fail)
        self.catch_up = CatchUp(
            config, tls, peers, pool, follower, replicas, self.merged_log, repairer.corrupt_files, tasks.fail
        )
        self.opener = Opener(
            follower, replicas, self.reports, spawn=tasks.spawn, on_unopened=self.repair.on_unopened
        )
        self.idle_replicas = IdleReplicas(follower, replicas, self.merged_log.is_released)
        self.closed_replicas = ClosedReplicas(
            config.sessions_directory,
            follower,
            replicas,
            pool,
            lambda: self.merged_log.released,
            self.merged_log.on_replica_removed,
        )
        self.fetcher = PeerFetcher(config, tls, peers, follower, replicas, self.opener.opened)
        self.commands = CommandClient(follower, self._propose)
        self.lease_manager = LeaseManager(follower, self.commands.propose, lambda: self.link.is_up)
        self.group_positions = GroupPositions(self.lease_manager.state, self.commands.propose)
        self.known_nodes = NO_NODES
        """The voters that are reported to clients, once the list has changed."""
        self._members_version = 0  # Version of the list that was reported to this control process.
        self.push_servicer: PushServicer | None = None
        self.pull_servicer: PullServicer | None = None
        self.hold_tracker = HoldTracker(follower, self.commands.propose, self._on_hold_refused)
        self.phase_reporter = PhaseReporter(follower, self.merged_log, self.catch_up, self.reports)
        self.epoch_guard = EpochGuard(
            config.name, self._disk, config.sessions_directory, config.merged_directory
        )
        self.hard_resetter = HardResetter(config.sessions_directory, config.merged_directory, config.stream)
        self.resets = ResetService(config.name, follower, self.hard_resetter, self._propose, tasks.spawn)
        self.trims = TrimCounter()
        self.lease_counts = LeaseCounter()
        self.server: RpcServer | None = None
        self.rest: HttpServers | None = None

    # Serving

    async def run(self) -> None:
        for work in (
            self.link.run(),
            self.merged_log.keep_durable(),
            self.reports.keep_reporting_disk(self.config.directory),
            self.catch_up.run(),
            self.repair.repairer.run(),
            self.repair.scrubber.run(),
            self.hold_tracker.run(),
            self.idle_replicas.run(),
            self.closed_replicas.run(),
            self.reports.keep_reporting_connected(self.replicas.connected),
            self.phase_reporter.run(),
        ):
            self.tasks.keep(work)
        clients = ClientTracker(
            is_queued=lambda uri: self.server is not None and self.server.calls.reading.is_queued(uri)
        )
        self.tasks.keep(self.reports.keep_reporting_clients(clients.connected))
        silence = PublisherSilence(self.follower, self._propose)
        stores = TrackedStores(self.ingest, clients, silence.commit)
        push = self.push_servicer = PushServicer(stores, self.config.stream, nodes=lambda: self.known_nodes)
        pull = self.pull_servicer = PullServicer(
            NodeLogProvider(
                self.config, self.follower, self.replicas, self.ingest, nodes=lambda: self.known_nodes
            ),
            self.config.stream,
            self._pool,
            on_acknowledged=self.hold_tracker.on_acknowledged,
            confirm_hold=self.hold_tracker.confirm,
            check_reach=self.repair.disk.check_reach,
            disk=self.repair.disk,
        )
        self.server = await serve(
            _address(self.config.listen, self.config.data_port),
            [
                replication_service(push=push.push, pull=partial(self._pull, pull)),
                rest_service(lambda: None if self.rest is None else self.rest.answering["rest"]),
                LeaseService(self.lease_manager).register,
                TableService(self.lease_manager).register,
                GroupService(self.group_positions).register,
            ],
            roles={**ROLES, **TUNNEL_ROLES, **LEASE_METHOD_ROLES, **TABLE_METHOD_ROLES, **GROUP_METHOD_ROLES},
            tls=self._tls,
        )
        self.tasks.keep(MemoryGuard(self.server.calls, self.replicas.unfinished.make_room).run())
        services = Services(push, pull, clients, silence, self._sync.durations, self.server.refused)
        try:
            self.rest = HttpServers(self, services, self._tls, self._supervisor.health_socket)
            await self.rest.start()
            self.tasks.keep(self._supervisor.keep_beating())
            await self.tasks.stopping.wait()
        finally:
            await self._close()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End `run`. Called in the event loop."""
        self.tasks.stopping.set()

    def _note_nodes(self) -> None:
        """Pass the members to the clients if they have changed, and report to the leader that the clients
        learn them.
        """
        nodes = self.follower.voters()
        if nodes is None or nodes.version < self.known_nodes.version:
            return  # A restarted control process has not applied the last list yet.
        if nodes != self.known_nodes:
            self.known_nodes = nodes
            for servicer in (self.push_servicer, self.pull_servicer):
                if servicer is not None:
                    servicer.on_nodes_changed()
        if nodes.version != self._members_version:
            self._members_version = nodes.version
            self.reports.members(nodes.version)

    @property
    def failure(self) -> RtError | None:
        """The error that ends `run`."""
        return self.tasks.failure

    @property
    def merger(self) -> Merger | None:
        """None before the node has joined its cluster."""
        return self.merged_log.merger

    async def _pull(self, servicer: PullServicer, requests: Any, context: Call) -> None:
        """Serve a pull. Corruption that it finds is repaired."""
        try:
            await servicer.pull(requests, context)
        except Corrupt as error:
            self.repair.repairer.on_corrupt(error)
            raise self.repair.client_error(error) from error

    async def _close(self) -> None:
        if self.rest is not None:
            await self.rest.close()
        if self.server is not None:
            await self.server.stop(1.0)
        await self.tasks.cancel()
        await self.fetcher.close()
        await self._sync.close()
        await self.merged_log.close(sync=self.failure is None)
        await self.replicas.close()
        self._pool.shutdown()

    # Calls from the session replicas, which are constructed before the parts that merge them

    def _on_hold_refused(self, name: str, why: str) -> None:
        if self.pull_servicer is not None:
            self.pull_servicer.refuse_hold(name, why)

    def _on_durable(self) -> None:
        self.merged_log.wake()

    def _is_released(self, session_id: int) -> bool:
        return self.merged_log.is_released(session_id)

    def _on_bad_replica(self, damaged: Corrupt) -> None:
        """Called by the merger's thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self.repair.repairer.on_corrupt, damaged)

    # Messages from and to the control process

    def _hello(self) -> pb.DataHello:
        return pb.DataHello(boot=self._boot, instruction=self.merged_log.instruction, disk=self._disk)

    def _propose(self, command: bytes) -> None:
        self.link.send(pb.ToControl(propose=command))

    async def _on_message(self, message: pb.ToData) -> None:
        state = None
        if message.HasField("snapshot") and self.failure is None:
            state = decode_state(message.snapshot.state)
            await self._prepare_for(message.snapshot.epoch_id, state)
        if self.failure is not None:
            return  # Later messages may belong to another line of epochs than the state here.
        self.follower.on_message(message, state)
        if message.HasField("standing"):
            self._peers.update(message.standing)
            self.merged_log.on_view(message.standing)
            self.ingest.on_view(message.standing)
            self._note_nodes()
            self.resets.on_changed()
        elif message.HasField("reset_refused"):
            self.resets.on_refused(message.reset_refused.request, message.reset_refused.why)
        elif message.HasField("fetch"):
            self.tasks.spawn(self.fetcher.fetch(message.fetch))

    async def _prepare_for(self, epoch: int, state: SequencerState) -> None:
        """End the process, or open the merged log, before anything uses the state of a snapshot."""
        known = self.follower.epoch
        if known and line_of(epoch) != line_of(known):  # Open streams sent the known epoch to their clients.
            self._end(RestartLater("the cluster was reset by force: clients must connect again"))
        elif self.merger is None and any(state.cluster) and self._is_in_place(state):
            await self.merged_log.open(state.cluster)

    def _on_lost(self) -> None:
        self._members_version = 0
        self.resets.on_lost()
        self.opener.on_control_lost()
        self.ingest.on_changed()

    def _on_snapshot(self, plans: list[WritePlan] | None) -> None:
        state = self.follower.state
        assert state is not None
        if not any(state.cluster) or not self._is_in_place(state):
            return
        if plans is not None:
            self.merged_log.start(state, plans)
        self.merged_log.report()
        self.opener.on_control_lost()
        left = [plan for plan in plans or () if plan.instruction > self.merged_log.instruction]
        needed = {end.session_id for plan in left for end in plan.consumed}
        for session in state.sessions.values():
            self.opener.report_session(session, is_input=session.id in needed)
            opened = session.active
            if opened is not None and opened.is_fenced and opened.end is not None:
                x, end = opened.run, opened.end
                self.tasks.spawn(self.fetcher.complete(session.id, LogOffset(x, end.roll, end.offset)))
        self.opener.confirm(state.joins)
        self.closed_replicas.on_snapshot()
        self.ingest.on_snapshot()

    def _end(self, why: RtError) -> None:
        self.tasks.failure = why
        self.tasks.stopping.set()

    def _is_in_place(self, state: SequencerState) -> bool:
        """Whether this state may continue with the files in the directories. If not, the process ends."""
        try:
            self.epoch_guard.check(state)
        except ClusterMismatch as error:
            self._end(error)
            return False
        return self._is_cleared(state)

    def _is_cleared(self, state: SequencerState) -> bool:
        """Whether everything that the last hard reset dropped is deleted here. If not, the process ends."""
        if not self.hard_resetter.is_due(state):
            return True
        if self.merger is not None or self.replicas.all():
            self._end(RestartLater("the cluster was reset: the dropped data is deleted at the next start"))
            return False
        self.hard_resetter.clear(state)
        return True

    def _on_applied(self, command: Command, outcome: Outcome) -> None:
        match outcome:
            case ClusterReset():
                assert self.follower.state is not None
                self._is_cleared(self.follower.state)
            case RangesMerged(plan):
                self.merged_log.add(plan)
                for end in plan.consumed:
                    self.opener.on_merged(end)
            case RunOpened(session_id):
                self.opener.on_opened(session_id)
            case RunFenced(session_id, run):
                self.tasks.spawn(self.opener.report_final_ends(session_id, (run, *outcome.later)))
            case RunClosed(session_id, run, end):
                self.opener.on_closed(outcome)
                self.tasks.spawn(self.fetcher.complete(session_id, LogOffset(run, end.roll, end.offset)))
            case DiskJoined():
                assert self.follower.state is not None
                self.opener.confirm(self.follower.state.joins)
            case SegmentsTrimmed():
                assert self.follower.state is not None
                self.merged_log.on_trimmed(self.follower.state, outcome)
        self.closed_replicas.on_applied(outcome)
        if isinstance(outcome, Forgotten):
            self.merged_log.forget_sessions(outcome.session_ids)
            self.catch_up.forget_sessions(outcome.session_ids)
        self.trims = self.trims.after(outcome)
        self.lease_counts = self.lease_counts.after(outcome)
        self.commands.on_applied(command, outcome)
        self.hold_tracker.on_applied(command, outcome)
        self.lease_manager.on_applied(command, outcome)
        self.group_positions.on_applied(command, outcome)
        self.ingest.on_applied(command, outcome)


def _address(listen: str, port: int) -> str:
    host = listen or "::"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

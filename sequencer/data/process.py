"""The data process: push and pull servers, session copies, the merger, and what control hears of them.

One event loop; a thread merges, a few sync, and nothing slow happens in the loop. Here is what there is, and
who hears of what; what is done about it is in the modules beside this one.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from replicator.calls import ROLES, Call, replication_service
from replicator.items import Place
from replicator.pull_server import PullServicer
from replicator.push_server import PushServicer
from rt.epochs import line_of
from rt.errors import ClusterMismatch, Damaged, RtError
from rt.net.rpc import RpcServer, serve
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.commands import Command
from sequencer.config import NodeConfig
from sequencer.data.belonging import Belonging
from sequencer.data.catching_up import CatchingUp
from sequencer.data.clearing import Clearing
from sequencer.data.commanding import Commanding
from sequencer.data.copies import Copies
from sequencer.data.disk_id import open_disk_id
from sequencer.data.fetching import Fetcher
from sequencer.data.healing import Healing
from sequencer.data.holding import Holding
from sequencer.data.intakes import Intakes
from sequencer.data.lease_service import LEASE_METHOD_ROLES, LeaseService
from sequencer.data.leasing import Leasing
from sequencer.data.link import ControlLink
from sequencer.data.logs import NodeLogs
from sequencer.data.merger import Merger
from sequencer.data.merging import Merging
from sequencer.data.opening import Opener
from sequencer.data.replica import Replica
from sequencer.data.reports import Reports
from sequencer.data.resetting import Resetting
from sequencer.data.stepping import Stepping
from sequencer.data.tasks import Tasks
from sequencer.orders import MergeOrder
from sequencer.outcomes import Closed, Fenced, Joined, Merged, Opened, Outcome, Trimmed, WasReset
from sequencer.rest.clients import Clients, WatchedStores
from sequencer.rest.lease_counts import NO_LEASES
from sequencer.rest.servers import Rest, Services
from sequencer.rest.syncs import TimedGroupSync
from sequencer.rest.trims import NO_TRIMS
from sequencer.rest.tunnel import TUNNEL_ROLES, rest_service
from sequencer.state import State
from sequencer.supervision import StartAgain

THREADS: Final = 8
"""Twice what opening copies may take."""


class Data:
    """One node's data process. `run` serves until `stop`; it raises what ends the process."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._boot = os.urandom(8)
        self._disk = open_disk_id(config.sessions_directory)
        tls = self._tls = TLS(config.ca, config.cert, config.key)
        pool = self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rt-data")
        self._sync = TimedGroupSync()
        tasks = self.tasks = Tasks()
        replica = self.replica = Replica(self._on_snapshot, self._on_applied)
        self.link = ControlLink(config.control_socket, self._hello, self._on_message, self._on_lost)
        self.reports = Reports(self.link)
        copies = self.copies = Copies(
            config.sessions_directory,
            self._sync,
            pool,
            on_report=self.reports.segment,
            on_durable=self._on_durable,
            on_failed=tasks.fail,
            is_merged_here=self._is_merged_here,
        )
        self.intakes = Intakes(replica, copies, len(config.members), self._propose, lambda: self.link.is_up)
        self.healing = Healing(config, tls, pool, replica, copies, tasks.fail)
        mender = self.healing.mender
        self.merging = Merging(config, pool, copies, self.reports, mender, tasks.fail)
        self.catching_up = CatchingUp(
            config, tls, pool, replica, copies, self.merging, mender.damages, tasks.fail
        )
        self.opener = Opener(replica, copies, self.reports, spawn=tasks.spawn, on_damaged=mender.on_damaged)
        self.fetcher = Fetcher(config, tls, replica, copies, self.opener.opened)
        self.commanding = Commanding(replica, self._propose)
        self.leasing = Leasing(replica, self.commanding.propose, lambda: self.link.is_up)
        self.pull_servicer: PullServicer | None = None
        self.holding = Holding(replica, self.commanding.propose, self._on_hold_refused)
        self.stepping = Stepping(replica, self.merging, self.catching_up, self.reports)
        self.belonging = Belonging(
            config.name, self._disk, config.sessions_directory, config.merged_directory
        )
        self.clearing = Clearing(config.sessions_directory, config.merged_directory, config.stream)
        self.resets = Resetting(config.name, replica, self.clearing, self._propose, tasks.spawn)
        self.trims = NO_TRIMS
        self.lease_counts = NO_LEASES
        self.server: RpcServer | None = None
        self.rest: Rest | None = None

    # Serving

    async def run(self) -> None:
        """Serve until `stop`."""
        for work in (
            self.link.run(),
            self.merging.keep_durable(),
            self.reports.keep_telling_disk(self.config.directory),
            self.catching_up.run(),
            self.healing.mender.run(),
            self.healing.scrubber.run(),
            self.holding.run(),
            self.stepping.run(),
        ):
            self.tasks.keep(work)
        clients = Clients()
        logs = NodeLogs(self.config, self.replica, self.copies, self.intakes)
        push = PushServicer(WatchedStores(self.intakes, clients), self.config.stream)
        pull = self.pull_servicer = PullServicer(
            logs,
            self.config.stream,
            self._pool,
            on_acknowledged=self.holding.on_acknowledged,
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
        services = Services(push, pull, clients, self._sync.durations, self.server.refused)
        try:
            self.rest = Rest(self, services, self._tls)
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
        except Damaged as error:
            self.healing.mender.on_damaged(error)
            raise

    async def _close(self) -> None:
        if self.rest is not None:
            await self.rest.close()
        if self.server is not None:
            await self.server.stop(1.0)
        await self.tasks.cancel()
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

    def _is_merged_here(self, session_id: int) -> bool:
        return self.merging.is_merged_here(session_id)

    # From and to the control process

    def _hello(self) -> pb.DataHello:
        return pb.DataHello(boot=self._boot, instruction=self.merging.instruction, disk=self._disk)

    def _propose(self, command: bytes) -> None:
        self.link.send(pb.ToControl(propose=command))

    def _on_message(self, message: pb.ToData) -> None:
        if self.failure is not None:
            return  # What control goes on to say may be of another line of epochs than what is known here.
        if message.HasField("snapshot") and self._is_forced_apart(message.snapshot.epoch_id):
            self._end(StartAgain("the cluster was forced to go on: whoever is connected is to come again"))
            return
        self.replica.on_message(message)
        if message.HasField("standing"):
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

    def _on_snapshot(self, orders: list[MergeOrder] | None) -> None:
        state = self.replica.state
        assert state is not None
        if not any(state.cluster) or not self._is_in_place(state):
            return
        if orders is not None:
            self.merging.begin(state, orders)
        self.merging.report()
        self.opener.begin()
        for session in state.sessions.values():
            self.opener.take_up(session)
            if session.life is not None and session.life.end is not None:
                x, end = session.life.x, session.life.end
                self.tasks.spawn(self.fetcher.complete(session.id, Place(x, end.y, end.offset)))
        self.opener.confirm(state.joins)
        self.intakes.on_changed()

    def _is_forced_apart(self, epoch: int) -> bool:
        """Whether control is in another line of epochs than before.

        Streams that are open have told their publishers and subscribers of the old one.
        """
        return self.replica.epoch != 0 and line_of(epoch) != line_of(self.replica.epoch)

    def _end(self, why: RtError) -> None:
        self.tasks.failure = why
        self.tasks.stopping.set()

    def _is_in_place(self, state: State) -> bool:
        """Whether what is in the directories is what this state goes on with; else the process ends."""
        try:
            self.belonging.check(state)
        except ClusterMismatch as error:
            self._end(error)
            return False
        return self._is_cleared(state)

    def _is_cleared(self, state: State) -> bool:
        """Whether nothing is here any more that the last hard reset let go of; else the process ends."""
        if not self.clearing.is_due(state):
            return True
        if self.merger is not None or self.copies.all():
            self._end(StartAgain("the cluster was reset: what it let go of goes at the start"))
            return False
        self.clearing.clear(state)
        return True

    def _on_applied(self, command: Command, outcome: Outcome) -> None:
        match outcome:
            case WasReset():
                assert self.replica.state is not None
                self._is_cleared(self.replica.state)
            case Merged(order):
                self.merging.add(order)
                for end in order.consumed:
                    self.opener.on_merged(end)
                self.intakes.on_changed()
            case Opened(session_id):
                self.opener.on_opened(session_id)
            case Fenced(session_id, x):
                self.tasks.spawn(self.opener.finish(session_id, x))
            case Closed(session_id, x, end):
                self.tasks.spawn(self.fetcher.complete(session_id, Place(x, end.y, end.offset)))
            case Joined():
                assert self.replica.state is not None
                self.opener.confirm(self.replica.state.joins)
            case Trimmed():
                assert self.replica.state is not None
                self.merging.on_trimmed(self.replica.state, outcome)
        self.trims = self.trims.after(outcome)
        self.lease_counts = self.lease_counts.after(outcome)
        self.commanding.on_applied(command, outcome)
        self.holding.on_applied(command, outcome)
        self.leasing.on_applied(command, outcome)
        self.intakes.on_applied(command, outcome)


def _address(listen: str, port: int) -> str:
    host = listen or "::"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

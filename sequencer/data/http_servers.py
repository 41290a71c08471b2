"""The two HTTP ports of a node: REST with certificates, and health and metrics without certificates.

For one event loop. `snapshot` copies everything that may change, so that answers can be made in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct, structs

from replicator.pull.server import PullServicer
from replicator.push.server import PushServicer
from rt.errors import CertificateError, RtError
from rt.net.memory_guard import resident_bytes
from rt.net.tls import TLS
from sequencer.config.config import NodeConfig
from sequencer.data.hold_tracker import HoldTracker
from sequencer.data.publisher_silence import PublisherSilence
from sequencer.ipc.client import ControlLink
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.merger import Merger
from sequencer.merged.repair import RepairService
from sequencer.raft.transport.peer_auth import TlsContexts
from sequencer.rest.base.admin_ports import AdminPorts, CommandPort, ResetPort
from sequencer.rest.base.node_snapshot import (
    Counts,
    LeaseCounter,
    MergeStatus,
    NodeSnapshot,
    TrimCounter,
    UnopenedReplica,
)
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.http.listener import HttpListener
from sequencer.rest.views.admin_actions import ACTIONS
from sequencer.rest.views.endpoints import ENDPOINTS
from sequencer.sessions.client_tracker import ClientTracker
from sequencer.sessions.opener import Opener
from sequencer.sessions.sync_timing import Durations
from sequencer.state.forgotten_sessions import ForgottenSessions
from sequencer.state.state import SequencerState

if TYPE_CHECKING:
    from aiohttp import web

POLL_S: Final = 1.0
"""How often clients and certificates are checked."""


class DataView(Protocol):
    """The parts of the data process that these servers need."""

    config: NodeConfig
    follower: StateFollower
    link: ControlLink
    opener: Opener
    repair: RepairService
    trims: TrimCounter
    lease_counts: LeaseCounter

    @property
    def commands(self) -> CommandPort:
        """Executes operators' commands."""

    @property
    def resets(self) -> ResetPort:
        """Resets the cluster."""

    @property
    def hold_tracker(self) -> HoldTracker:
        """The holds of named subscribers."""

    @property
    def merger(self) -> Merger | None:
        """None before the node has joined its cluster."""

    @property
    def failure(self) -> RtError | None:
        """The error that ends the process."""


class Services(Struct, frozen=True):
    """The servicers of streams, and the calls that the gRPC server rejected."""

    push: PushServicer
    pull: PullServicer
    clients: ClientTracker
    silence: PublisherSilence
    syncs: Durations
    refused_calls: Mapping[str, int]
    """Calls that the gRPC server rejected, by class of the error."""


class HttpServers:
    """The two ports, from `start` to `close`."""

    def __init__(
        self, data: DataView, services: Services, tls: TLS, health: socket.socket | None = None
    ) -> None:
        """`health`: the listening socket of the health port. None: it is opened here."""
        self._data, self._services = data, services
        self._listening = {} if health is None else {"health": health}
        self._tls = tls
        self._contexts = TlsContexts(tls, reload_s=POLL_S)
        self._certificate_end_s = 0.0
        self._started_ns = time.time_ns()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rt-rest")
        self._watching: asyncio.Task[None] | None = None
        config = data.config
        public = [endpoint for endpoint in ENDPOINTS if endpoint.is_public]
        self.answering: Final = {
            "rest": Dispatcher(
                ENDPOINTS,
                self.snapshot,
                self._pool,
                stream=config.stream,
                actions=ACTIONS,
                operations=AdminPorts(data.commands, data.resets),
            ),
            "health": Dispatcher(public, self.snapshot, self._pool, stream=None),
        }
        """The dispatcher of each port, by the name of the port."""
        self._runners: list[web.ServerRunner] = []
        self.listeners: Final[dict[str, HttpListener]] = {}
        """The listener of each port, by name: "rest" and "health". If the port is 0, it has no listener."""

    async def start(self) -> None:
        """Serve. A port that is in use is tried again and stops nothing else."""
        config = self._data.config
        for name, port in (("rest", config.rest_port), ("health", config.health_port)):
            if port:
                await self._serve(name, port)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _serve(self, name: str, port: int) -> None:
        from sequencer.rest.http.app import App

        runner = App(self.answering[name]).runner()
        await runner.setup()
        self._runners.append(runner)
        make = runner.server
        assert make is not None
        contexts = self._contexts
        listener = HttpListener(
            name,
            make,
            (self._data.config.listen, port),
            lambda: contexts.loaded.server if name == "rest" else None,
            listening=self._listening.get(name),
        )
        self.listeners[name] = listener
        listener.start()

    async def close(self) -> None:
        """Stop; answers in progress have half a second."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for runner in self._runners:
            await runner.cleanup()
        for listener in self.listeners.values():
            await listener.close()
        self._pool.shutdown()
        self._contexts.close()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        described: ssl.SSLContext | None = None
        while True:
            state = self._data.follower.state
            self._services.clients.update(self._services.pull.pulls, 0 if state is None else state.position)
            control_silent_s = self._data.link.silence.update(loop.time())
            received_ns = self._services.clients.received_ns
            self._services.silence.update(loop.time(), received_ns, control_silent_s)
            self._contexts.refresh(loop.time())
            if self._contexts.loaded.server is not described:
                described = self._contexts.loaded.server
                with contextlib.suppress(CertificateError):  # Loading may fail during a rotation.
                    loaded = await loop.run_in_executor(self._pool, self._tls.load)
                    self._certificate_end_s = loaded.not_after.timestamp()
            await asyncio.sleep(POLL_S)

    def snapshot(self) -> NodeSnapshot:
        """The state of the node now."""
        data, services = self._data, self._services
        services.clients.record_pulls(services.pull.pulls)
        return NodeSnapshot(
            stream=data.config.stream,
            node=data.config.name,
            now_ns=time.time_ns(),
            started_ns=self._started_ns,
            standing=data.follower.standing,
            is_control_up=data.link.is_up,
            control_silent_s=data.link.silence.silent_s,
            applied_index=data.follower.index,
            state=None if data.follower.state is None else _copy(data.follower.state),
            merging=None if data.merger is None else _merge_status(data.merger),
            damaged=data.repair.damaged_segments(),
            unopened=_unopened(data.opener.unopened, data.follower.state),
            failure="" if data.failure is None else str(data.failure),
            reset=data.resets.status(),
            configured=frozenset(data.config.replicated),
            clients=services.clients.clients(),
            silent=services.silence.silent(),
            counts=self._counts(),
        )

    def _counts(self) -> Counts:
        services = self._services
        usage = resource.getrusage(resource.RUSAGE_SELF)
        refused: Counter[tuple[str, str]] = Counter()
        sources = [
            ("push", services.push.refused),
            ("pull", services.pull.refused),
            ("grpc", services.refused_calls),
            *((name, answering.refused) for name, answering in self.answering.items()),
            *((name, listener.refused) for name, listener in self.listeners.items()),
        ]
        for at, counts in sources:
            refused.update({(at, reason): count for reason, count in counts.items()})
        return Counts(
            push_bytes=services.clients.push_bytes,
            pull_bytes=services.clients.pull_bytes,
            push_streams=len(services.push.sessions),
            pull_streams=len(services.pull.pulls),
            refused=refused,
            requests={
                (name, status): count
                for name, answering in self.answering.items()
                for status, count in answering.statuses.items()
            },
            syncs=services.syncs.histogram(),
            cpu_s=usage.ru_utime + usage.ru_stime,
            memory_bytes=resident_bytes(),
            certificate_end_s=self._certificate_end_s,
            trims=self._data.trims,
            damage=self._data.repair.damage,
            overtaken=services.pull.overtaken,
            refused_holds=self._data.hold_tracker.refused,
            leases=self._data.lease_counts,
        )


def _copy(state: SequencerState) -> SequencerState:
    """A copy of the state. Its values are replaced, never changed, so a shallow copy is enough."""
    merged = structs.replace(state.merged, declared=set())
    return replace(
        state,
        merged=merged,
        sessions=dict(state.sessions),
        wanted=dict(state.wanted),
        segments=state.segments.copy(),
        holds=dict(state.holds),
        leases=dict(state.leases),
        tables=state.tables.copy(),
        closed=dict(state.closed),
        forgotten=ForgottenSessions(),
    )


def _unopened(errors: Mapping[int, RtError], state: SequencerState | None) -> tuple[UnopenedReplica, ...]:
    sessions = {} if state is None else state.sessions
    return tuple(
        UnopenedReplica(sessions[one].name, str(error))
        for one, error in sorted(errors.items())
        if one in sessions
    )


def _merge_status(merger: Merger) -> MergeStatus:
    """Read without the merger's lock, which is held while a log is opened."""
    missing, failure, damage = merger.missing, merger.failure, merger.damage
    return MergeStatus(
        instruction=merger.written.instruction,
        position=merger.written.position,
        durable_position=merger.durable.position,
        is_behind_gap=merger.gap is not None,
        damage="" if damage is None else str(damage),
        waits_for=""
        if missing is None
        else f"session {missing.session_id}, {missing.segment} up to offset {missing.end}",
        failure="" if failure is None else str(failure),
    )

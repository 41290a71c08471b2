"""Nodes for tests of REST: a state with a history, views of it, and a node served over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rt.errors import RtError
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.net.identity import Identity
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.data.http_servers import HttpServers, Services
from sequencer.data.publisher_silence import PublisherSilence
from sequencer.localcluster.loopback import free_ports
from sequencer.rest.base.admin_ports import ResetKind, ResetStatus
from sequencer.rest.base.errors import ResetRefused
from sequencer.rest.base.node_snapshot import (
    ClientConnection,
    DamageCounter,
    LeaseCounter,
    MergeStatus,
    NodeSnapshot,
    TrimCounter,
)
from sequencer.sessions.client_tracker import ClientTracker
from sequencer.sessions.sync_timing import Durations
from sequencer.state.apply import apply
from sequencer.state.apply_result import Outcome
from sequencer.state.commands import Operation
from sequencer.state.leases.table_rows import LeaseTable, LeaseTables, PagedRows
from sequencer.state.state import (
    ActiveRun,
    ConsumedEnd,
    End,
    MergedEnd,
    MergedSegment,
    SequencerState,
    Session,
    SubscriberHold,
)

CLUSTER = bytes(range(0x40, 0x50))
SECOND = 10**9
MINUTE = 60 * SECOND
T0 = 1_767_225_600 * SECOND
"""2026-01-01T00:00:00Z."""
NOW = T0 + 60 * MINUTE

OPERATOR = Identity("s", "operator", "op")
PUBLISHER = Identity("s", "publisher", "feed")
SUBSCRIBER = Identity("s", "subscriber", "sub")
OTHER = Identity("s", "subscriber", "other")


def history() -> SequencerState:
    """Ten messages a minute in segments of ten minutes: one trimmed, two sealed, one that grows."""
    segments = [
        MergedSegment(
            SegmentId(0, roll),
            roll * 100,
            roll * 100 + 100,
            1000 + roll,
            at(10 * roll),
            at(10 * roll + 10) - 5,
        )
        for roll in range(3)
    ]
    trimmed = segments[0]
    segments[0] = MergedSegment(
        *(trimmed.id, trimmed.first, trimmed.end, trimmed.size_bytes, trimmed.created_ns, trimmed.sealed_ns),
        trimmed_ns=at(40),
        reason=TrimReason.TIME,
    )
    merged = MergedEnd(SegmentId(0, 3), 640, 300, at(30), {1}, 0xABCD, 5000)
    waiting = Session(
        2, "feed", b"\2" * 16, "d1", waits_for=1, last_run=0, active_runs=(ActiveRun(0, b"\7" * 8),)
    )
    going = Session(
        1,
        "feed",
        b"\1" * 16,
        None,
        is_superseded=True,
        last_run=4,
        active_runs=(ActiveRun(4, b"\4" * 8, is_fenced=True, end=End(1, 128, 50)),),
        consumed=ConsumedEnd(End(1, 64, 40), 7),
        done=(3, End(0, 640, 40)),
        runs_cut_short=2,
    )
    state = SequencerState(
        CLUSTER,
        instruction=17,
        sequenced_ns=at(36),
        position=360,
        merged=merged,
        sessions={2: waiting, 1: going},
        segments=deque(segments),
        next_session_id=3,
        wanted={"d1": 40, "d2": 7},
        runs_cut_short=3,
        holds={"sub": SubscriberHold(250, at(35)), "late": SubscriberHold(50, at(20))},
        tables=LeaseTables({"app/queue/gone": LeaseTable(commits=3, rows=PagedRows([("places", b"7")]))}),
    )
    state.index()
    return state


def at(minutes: int) -> int:
    return T0 + minutes * MINUTE


def standing(**changes: Any) -> pb.Standing:
    fields: dict[str, Any] = {
        "node": "n1",
        "leader": "n2",
        "term": 5,
        "role": "follower",
        "epoch": 1,
        "is_caught_up": True,
    }
    made = pb.Standing(**{**fields, **changes})
    for name in ("n3", "n1", "n2"):
        summary = pb.Summary(
            clock_ns=T0,
            merged=pb.MergedReport(instruction=17, chain=0xABCD, bytes=5000, position=360),
            disk_bytes=1000,
            disk_free_bytes=400,
        )
        made.nodes.add(
            name=name, address=f"{name}:5002", is_connected=name == "n2", is_counted=True, summary=summary
        )
    return made


def node_view(**changes: Any) -> NodeSnapshot:
    """A healthy follower, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "stream": "s",
        "node": "n1",
        "now_ns": NOW,
        "started_ns": T0,
        "standing": standing(),
        "applied_index": 99,
        "state": history(),
        "merging": MergeStatus(17, 360, 350),
        "clients": (
            ClientConnection(SUBSCRIBER, "10.0.0.1:1", None, at(1), 0, at(2), 700, 10.0, 300),
            ClientConnection(PUBLISHER, "", "feed", at(1), 0, at(3), 900, 0.0, 55, 50),
            ClientConnection(OTHER, "10.0.0.2:1", None, at(1), at(5), at(2), 70, 0.0, 30),
        ),
    }
    return NodeSnapshot(**{**fields, **changes})


class FakeCommanding:
    """Applies commands at once."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.ran: list[Operation] = []
        self.failure: RtError | None = None

    async def run(self, operation: Operation) -> Outcome:
        if self.failure is not None:
            raise self.failure
        self.ran.append(operation)
        return apply(self._served.data.follower.state, operation)


class FakeResets:
    """Resets that start but never end."""

    def __init__(self) -> None:
        self.begun: list[tuple[ResetKind, bool]] = []
        self.now = ResetStatus()

    def status(self) -> ResetStatus:
        return self.now

    async def begin(self, kind: ResetKind, *, force: bool) -> ResetStatus:
        if self.now.state == "running":
            raise ResetRefused("a reset runs already", got=self.now.kind)
        self.begun.append((kind, force))
        self.now = ResetStatus("running", kind, 2, NOW)
        return self.now


class Served:
    """A node's two ports, as `HttpServers` opens them, over data that a test may change."""

    def __init__(self, pki: Path, directory: Path, **settings: Any) -> None:
        rest_port, health_port = free_ports(2)
        self.pki = pki
        self.tls = tls_of(pki, "n1")
        self.data = SimpleNamespace(
            config=NodeConfig(
                stream="s",
                name="n1",
                directory=str(directory),
                members={"n1": ClusterMember("127.0.0.1:1", "127.0.0.1:2")},
                ca=str(self.tls.ca),
                cert=str(self.tls.cert),
                key=str(self.tls.key),
                listen="127.0.0.1",
                rest_port=rest_port,
                health_port=health_port,
                **settings,
            ),
            follower=SimpleNamespace(state=history(), standing=standing(), index=99),
            link=SimpleNamespace(is_up=True, silence=SimpleNamespace(silent_s=0.0, update=lambda _: 0.0)),
            merger=SimpleNamespace(
                written=SimpleNamespace(instruction=17, position=360),
                durable=SimpleNamespace(position=350),
                missing=None,
                gap=None,
                damage=None,
                failure=None,
            ),
            failure=None,
            trims=TrimCounter(),
            opener=SimpleNamespace(unopened={}),
            repair=SimpleNamespace(damaged_segments=tuple, damage=DamageCounter()),
            lease_counts=LeaseCounter(),
            hold_tracker=SimpleNamespace(refused={}),
            commands=FakeCommanding(self),
            resets=FakeResets(),
        )
        self.clients = ClientTracker()
        self.push: Any = SimpleNamespace(sessions=[], refused=Counter({"Fenced": 2}))
        self.pull: Any = SimpleNamespace(pulls={}, refused=Counter(), overtaken=0)
        silence = PublisherSilence(self.data.follower, lambda _: None)
        services = Services(self.push, self.pull, self.clients, silence, Durations(), Counter())
        self.rest = HttpServers(self.data, services, self.tls)

    @property
    def rest_port(self) -> int:
        return self.data.config.rest_port  # type: ignore[no-any-return]

    @property
    def health_port(self) -> int:
        return self.data.config.health_port  # type: ignore[no-any-return]

    def context(self, name: str | None, *, ca: Path | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client with that certificate; with None, of a client without one."""
        if name is not None:
            return tls_of(self.pki, name).ssl_client_context()
        context = ssl.create_default_context(cafile=str(ca or self.pki / "ca.crt"))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


@contextlib.asynccontextmanager
async def serving(pki: Path, directory: Path, **settings: Any) -> AsyncIterator[Served]:
    served = Served(pki, directory, **settings)
    await served.rest.start()
    try:
        yield served
    finally:
        await served.rest.close()


def tls_of(pki: Path, name: str) -> TLS:
    return TLS(pki / "ca.crt", pki / f"{name}.crt", pki / f"{name}.key")


async def ask(
    port: int, content: bytes, context: ssl.SSLContext | None = None, *, wait_s: float = 120
) -> bytes:
    """Send the bytes. Return everything received until the other side closes."""
    async with asyncio.timeout(wait_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(content)
            return await reader.read()
        finally:
            writer.transport.abort()

"""A node of one stream for tests of the servers: real stores on real files, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rt
from replicator.protocol.grpc_service import ROLES, replication_service
from replicator.protocol.handshake import PushHello, PushProgress, PushStart, PushStatus
from replicator.protocol.known_nodes import NO_NODES, KnownNodes
from replicator.protocol.messages import Chunk, Run, SegmentSealed, WholeRun
from replicator.pull.memory_budget import PullBudget
from replicator.pull.server import PullServicer
from replicator.push.server import PushServicer
from replicator.receive.batch_boundaries import SegmentBoundaries
from replicator.receive.group_commit import GroupCommit
from replicator.receive.session_receiver import SessionReceiver
from replicator.receive.session_replica import SessionReplicaWriter, UnfinishedBytes
from rt.errors import LogNotFound
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.net.dev_pki import init_ca, issue
from rt.net.grpc_channel import serve
from rt.net.identity import Identity
from rt.net.tls import TLS

CLUSTER = bytes(range(0x40, 0x50))
WAIT_S = 120


def make_pki(directory: Path) -> Path:
    """Make a CA, and certificates of a node, publishers, a subscriber and an operator.

    The publisher `other` has a dedup id. The publisher `stranger` is of another stream.
    """
    init_ca(directory)
    issue(directory, Identity("s", "node", "n1"), loopback=True)
    issue(directory, Identity("s", "publisher", "feed"))
    issue(directory, Identity("s", "publisher", "other", frozenset({"d1"})))
    issue(directory, Identity("s", "subscriber", "sub"))
    issue(directory, Identity("s", "operator", "op"))
    issue(directory, Identity("elsewhere", "publisher", "stranger"))
    return directory


def tls_of(pki: Path, name: str) -> TLS:
    return TLS(pki / "ca.crt", pki / f"{name}.crt", pki / f"{name}.key")


class FakeIntake:
    """Passes one push stream to a store."""

    def __init__(self, node: FakeNode, store: SessionReplicaWriter) -> None:
        self._node = node
        self._store = store
        self.start = PushStart(CLUSTER, 0, 3, node.node, store.receiver.next_offset)

    async def open_run(self, life: Run) -> None:
        self._node.lives.append(life)
        await self._store.start_run(life)

    async def append(self, item: Chunk | SegmentSealed) -> None:
        await self._node.gate.wait()
        await self._store.append(item)

    async def append_runs(self, runs: Sequence[WholeRun]) -> None:
        await self._node.gate.wait()
        self._node.lives += [one.run for one in runs]
        if not await self._store.append_whole(runs):
            for one in runs:
                _, chunk, sealed = one.items
                await self._store.begin(one.run)
                await self._store.append(chunk)
                await self._store.append(sealed)

    def record_status(self, status: PushStatus) -> None:
        self._node.statuses.append(status)

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        return await self._store.next_progress(told)

    async def close(self) -> None:
        await self._store.restart()
        self._node.ended += 1


class FakeNode:
    """`Stores` and `Logs` over a directory. While `gate` is cleared, no data is accepted."""

    cluster = CLUSTER
    epoch = 0
    is_empty = True
    """Whether the cluster has merged nothing so far, as this node reports it."""

    def __init__(self, root: Path, *, node: str = "n1") -> None:
        self.root = root
        self.node = node
        self.merged = str(root / "merged")
        self.stores: dict[str, SessionReplicaWriter] = {}
        self.marks: list[SegmentBoundaries] = []
        self.failures: list[rt.RtError] = []
        self.lives: list[Run] = []
        self.statuses: list[PushStatus] = []
        self.ended = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.pool = ThreadPoolExecutor(4)
        self.sync = GroupCommit()
        self.unfinished = UnfinishedBytes(4 * 2**20)
        self.nodes = NO_NODES
        self.push = PushServicer(self, "s", nodes=lambda: self.nodes)
        self.acknowledged: list[tuple[str, int]] = []
        self.confirmed: list[str] = []
        self.pull = PullServicer(
            self,
            "s",
            self.pool,
            on_acknowledged=self._on_acknowledged,
            confirm_hold=self._confirm_hold,
            budget=PullBudget(per_identity_max=64),
        )
        self.refuses_holds = ""
        self.told: list[int] = []
        self._server: Any = None

    def name_nodes(self, nodes: KnownNodes) -> None:
        """Change the members, and notify the servers."""
        self.nodes = nodes
        self.push.on_nodes_changed()
        self.pull.on_nodes_changed()

    async def accept(self, hello: PushHello, identity: Identity) -> FakeIntake:
        store = self.stores.get(hello.session)
        if store is None:
            identity_of_log = LogIdentity(LogKind.SESSION, hello.incarnation, hello.session, hello.dedup_id)
            path = str(self.root / "sessions" / hello.session)
            receiver = SessionReceiver.open(path, identity_of_log)
            store = SessionReplicaWriter(
                receiver,
                self.sync,
                self.pool,
                on_marks=self.marks.extend,
                on_failed=self.failures.append,
                unfinished=self.unfinished,
            )
            self.stores[hello.session] = store
        await store.restart()
        return FakeIntake(self, store)

    def _on_acknowledged(self, name: str, position: int) -> None:
        self.acknowledged.append((name, position))
        if self.refuses_holds:
            self.pull.refuse_hold(name, self.refuses_holds)

    async def _confirm_hold(self, name: str) -> None:
        self.confirmed.append(name)

    def session(self, session_id: int) -> str:
        path = self.root / "sessions" / "feed"
        if session_id != 1 or not path.exists():
            raise LogNotFound("no such session", got=session_id)
        return str(path)

    @contextlib.asynccontextmanager
    async def serving(self, tls: TLS, port: int = 0) -> AsyncIterator[str]:
        """Serve. Yield the endpoint."""
        service = replication_service(push=self.push.push, pull=self.pull.pull)
        server = await serve(f"127.0.0.1:{port}", [service], roles=ROLES, tls=tls)
        try:
            yield f"localhost:{server.port}"
        finally:
            await server.stop()
            await self.sync.close()
            for store in self.stores.values():
                await store.close()
            self.pool.shutdown()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def silent_endpoint() -> AsyncIterator[str]:
    """An endpoint that accepts connections and never sends anything, like a node that hangs."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    async with server:
        try:
            yield f"localhost:{server.sockets[0].getsockname()[1]}"
        finally:
            for writer in held:
                writer.transport.abort()
            await asyncio.sleep(0)

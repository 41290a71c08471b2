"""Clients of a cluster whose members change: they learn new nodes from any node, over loopback mTLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from log_items import files_of
from receiving_node import CLUSTER, WAIT_S, FakeNode, make_pki, tls_of, until

import rt
from replicator.protocol.codec import PushReply, encode_push_reply
from replicator.protocol.handshake import NOWHERE, PushProgress, PushStart
from replicator.protocol.known_nodes import KnownNode, KnownNodes
from replicator.protocol.messages import LogOffset
from replicator.pull.client import PullClient
from replicator.pull.local_copy import LocalCopy
from replicator.pull.remote_log import RemoteLog
from replicator.push import stream_set
from replicator.push.client import PushClient
from replicator.push.session_source import SessionSource
from replicator.push.stream_set import PushStreams
from rt.client.publisher_status import state_of
from rt.cluster_epoch import epoch_of
from rt.log.disk import REAL
from rt.log.read.projection import EVERYTHING
from rt.net.grpc_errors import Unreachable
from rt.sidecar.progress_file import NO_LEVEL, Level, read_progress
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.loopback import free_port


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


class Cluster:
    """Nodes that start, stop, and report their members. They share the files of the merged log."""

    def __init__(self, root: Path, pki: Path) -> None:
        self._root, self._pki = root, pki
        self.nodes: dict[str, FakeNode] = {}
        self.endpoints: dict[str, str] = {}
        self._serving: dict[str, AsyncExitStack] = {}
        self._log = MergedLogBuilder(root / "merged", cluster_id=CLUSTER, stream="s")
        self.publisher = rt.Publisher(root / "source", "s", publisher_id="feed", linger_ms=0)
        self._sent = 0

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._serving):
            await self.stop(name)
        self.publisher.close()
        self._log.close()

    async def start(self, *names: str) -> None:
        for name in names:
            node = self.nodes[name] = FakeNode(self._root / name, node=name)
            node.merged = self._log.path
            port = free_port()
            self._serving[name] = serving = AsyncExitStack()
            await serving.enter_async_context(node.serving(tls_of(self._pki, "n1"), port))
            self.endpoints[name] = f"localhost:{port}"

    async def stop(self, name: str) -> None:
        await self._serving.pop(name).aclose()
        del self.nodes[name]

    def members(self, version: int, *names: str) -> KnownNodes:
        return KnownNodes(tuple(KnownNode(name, self.endpoints[name]) for name in names), version)

    def change(self, version: int, *names: str, known_by: tuple[str, ...] | None = None) -> None:
        """Make `names` the members. All nodes know it, or only the nodes in `known_by`."""
        members = self.members(version, *names)
        for name in self.nodes if known_by is None else known_by:
            self.nodes[name].name_nodes(members)

    def publish(self, count: int = 10) -> Level:
        """Publish, and merge. Returns the level of what was published."""
        self.publisher.publish_many([b"%d" % self._sent * 50] * count)
        self.publisher.flush()
        self._sent += count
        self._log.merge_all([self.publisher.directory])
        self._log.sync()
        return Level(0, self._sent)

    @property
    def replicated(self) -> Level:
        record = read_progress(self.publisher.directory)
        return NO_LEVEL if record is None else record.replicated

    def has_all(self, *names: str) -> bool:
        files = files_of(REAL, self.publisher.directory)
        paths = [self._root / name / "sessions" / "feed" for name in names]
        return all(path.exists() and files_of(REAL, str(path)) == files for path in paths)

    def is_acknowledged(self, push: PushClient, *names: str) -> bool:
        """Whether the client knows that these nodes have acknowledged everything."""
        assert push._source is not None
        quorum, size = push._source.quorum, Path(self.publisher.directory, "log.0.0").stat().st_size
        return all(quorum.durable(name).offset == size for name in names)

    def is_copied(self, copy: LocalCopy) -> bool:
        return Path(copy.path).exists() and files_of(REAL, copy.path) == files_of(REAL, self._log.path)

    def pushes(self) -> dict[str, int]:
        """The number of sessions with a push stream, by node."""
        return {name: len(node.push.sessions) for name, node in self.nodes.items()}

    @asynccontextmanager
    async def pushing(self, *endpoints: str) -> AsyncIterator[PushClient]:
        client = PushClient(self.publisher.directory, "s", endpoints, tls_of(self._pki, "feed"))
        async with _running(client):
            yield client

    @asynccontextmanager
    async def pulling(self, *endpoints: str) -> AsyncIterator[tuple[PullClient, LocalCopy]]:
        copy = LocalCopy(self._root / "copy", "s")
        client = PullClient(copy, "s", endpoints, tls_of(self._pki, "sub"), draw=lambda low, _: low)
        async with _running(client):
            yield client, copy


@asynccontextmanager
async def _running(client: PushClient | PullClient) -> AsyncIterator[None]:
    running = asyncio.ensure_future(client.run())
    try:
        yield
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.wait([running])


class Proxy:
    """An address that leads to a node, as of a port-forward."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"localhost:{self.port}"
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def lead_to(self, endpoint: str) -> None:
        port = int(endpoint.rpartition(":")[2])

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            node_reader, node_writer = await asyncio.open_connection("127.0.0.1", port)
            self._writers |= {writer, node_writer}
            await asyncio.gather(_copy(reader, node_writer), _copy(node_reader, writer))

        self._server = await asyncio.start_server(forward, "127.0.0.1", self.port)

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def targets(client: PushClient) -> set[str]:
    assert client._streams is not None
    return {stream.target for stream in client._streams.all}


def state(client: PushClient) -> str:
    report = client.report
    return state_of(report.error, report.endpoints, report.members)


def test_push_and_pull_continue_while_cluster_grows_from_three_to_five(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2", "n3")
            seeds = [cluster.endpoints[name] for name in ("n1", "n2", "n3")]
            async with cluster.pushing(*seeds) as push, cluster.pulling(*seeds) as (_, copy):
                level = cluster.publish()
                await until(lambda: cluster.replicated == level and cluster.is_copied(copy))
                await cluster.start("n4", "n5")
                cluster.change(1, "n1", "n2", "n3", "n4")
                cluster.change(2, "n1", "n2", "n3", "n4", "n5")
                await until(lambda: cluster.has_all("n1", "n2", "n3", "n4", "n5"))
                # Replicated messages stay replicated, although two of five nodes are no majority.
                assert cluster.replicated == level
                for name in ("n3", "n4", "n5"):
                    cluster.nodes[name].gate.clear()
                later = cluster.publish()
                await until(lambda: cluster.is_acknowledged(push, "n1", "n2"))
                assert cluster.replicated == level
                cluster.nodes["n5"].gate.set()
                await until(lambda: cluster.replicated == later)
                for name in ("n3", "n4"):
                    cluster.nodes[name].gate.set()
                await until(lambda: cluster.has_all(*cluster.nodes) and cluster.is_copied(copy))
                assert cluster.pushes() == dict.fromkeys(cluster.nodes, 1)
                assert (state(push), len(push.report.endpoints)) == ("replicating", 5)

    asyncio.run(main())


def test_push_and_pull_continue_while_all_seeds_are_replaced_one_by_one(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            members = ["n1", "n2", "n3"]
            await cluster.start(*members)
            seeds = [cluster.endpoints[name] for name in members]
            async with cluster.pushing(*seeds) as push, cluster.pulling(*seeds) as (pull, copy):
                level = cluster.publish()
                await until(lambda: cluster.replicated == level and cluster.is_copied(copy))
                for step in range(3):
                    joining, leaving = f"n{step + 4}", f"n{step + 1}"
                    await cluster.start(joining)
                    members.append(joining)
                    cluster.change(2 * step + 1, *members)
                    await until(lambda: cluster.has_all(*members))
                    members.remove(leaving)
                    cluster.change(2 * step + 2, *members)
                    await cluster.stop(leaving)
                    level = cluster.publish()
                    await until(lambda level=level: cluster.replicated == level)
                    await until(lambda: cluster.has_all(*members) and cluster.is_copied(copy))
                assert cluster.pushes() == {"n4": 1, "n5": 1, "n6": 1}
                await until(lambda: state(push) == "replicating" and not push.report.reasons)
                assert {one.endpoint for one in push.report.endpoints} == {
                    cluster.endpoints[name] for name in members
                }
                assert pull.node in members

    asyncio.run(main())


def test_removed_member_is_pushed_to_but_does_not_count_in_majority(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2", "n3", "n4")
            async with cluster.pushing(*cluster.endpoints.values()) as push:
                cluster.change(1, "n2", "n3", "n4")
                level = cluster.publish()
                await until(lambda: cluster.has_all(*cluster.nodes) and cluster.replicated == level)
                for name in ("n3", "n4"):
                    cluster.nodes[name].gate.clear()
                later = cluster.publish()
                await until(lambda: cluster.is_acknowledged(push, "n1", "n2"))
                # n1 and n2 are two of four nodes, and only one is a member.
                assert cluster.replicated == level
                assert len(push.report.endpoints) == 3
                cluster.nodes["n3"].gate.set()
                await until(lambda: cluster.replicated == later)
                cluster.nodes["n4"].gate.set()

    asyncio.run(main())


def test_node_reached_through_proxy_is_pushed_to_once(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            names = ("n1", "n2", "n3")
            await cluster.start(*names)
            proxies = {name: Proxy() for name in names}
            for name, proxy in proxies.items():
                await proxy.lead_to(cluster.endpoints[name])
            seeds = [proxy.endpoint for proxy in proxies.values()]
            async with cluster.pushing(*seeds) as push:
                level = cluster.publish()
                await until(lambda: cluster.replicated == level)
                await cluster.start("n4")
                cluster.change(1, *names, "n4")
                await until(lambda: cluster.has_all(*names, "n4"))
                assert targets(push) == {*seeds, cluster.endpoints["n4"]}
                # The proxy stops. The client then reaches the node by its address in the member list.
                await proxies["n2"].cut()
                await until(lambda: cluster.endpoints["n2"] in targets(push))
                cluster.publish()
                await until(lambda: cluster.has_all(*names, "n4"))
                assert state(push) == "replicating"
                assert not push.report.reasons
                # The proxy returns, and the session is pushed only through it.
                await proxies["n2"].lead_to(cluster.endpoints["n2"])
                await until(lambda: cluster.endpoints["n2"] not in targets(push))
                level = cluster.publish()
                await until(lambda: cluster.has_all(*names, "n4") and cluster.replicated == level)
                assert cluster.pushes() == dict.fromkeys((*names, "n4"), 1)
            for proxy in proxies.values():
                await proxy.cut()

    asyncio.run(main())


def test_push_with_one_seed_reaches_all_members_and_ignores_older_member_list(
    tmp_path: Path, pki: Path
) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2", "n3", "n4")
            cluster.change(5, "n1", "n2", "n3")
            cluster.change(4, "n1", "n2", "n4", known_by=("n3",))  # n3 was cut off and has an older list.
            async with cluster.pushing(cluster.endpoints["n1"]) as push:
                level = cluster.publish()
                await until(lambda: cluster.replicated == level and cluster.has_all("n1", "n2", "n3"))
                assert targets(push) == {cluster.endpoints[name] for name in ("n1", "n2", "n3")}

    asyncio.run(main())


def test_listed_address_reaching_another_node_is_dropped(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2")
            proxy = Proxy()
            await proxy.lead_to(cluster.endpoints["n1"])
            lie = KnownNodes((*cluster.members(1, "n1", "n2").nodes, KnownNode("n3", proxy.endpoint)), 1)
            for node in cluster.nodes.values():
                node.name_nodes(lie)
            async with cluster.pushing(cluster.endpoints["n1"]) as push:
                level = cluster.publish()
                await until(lambda: cluster.replicated == level and cluster.has_all("n1", "n2"))
                await until(lambda: proxy.endpoint not in targets(push))
                await until(lambda: cluster.pushes() == {"n1": 1, "n2": 1})
                later = cluster.publish()
                await until(lambda: cluster.replicated == later)
                assert targets(push) == {cluster.endpoints["n1"], cluster.endpoints["n2"]}
            await proxy.cut()

    asyncio.run(main())


def test_member_list_changes_cause_no_push_failure_or_reconnect(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2", "n3")
            reports = []
            names = list(cluster.endpoints)
            client = PushClient(
                cluster.publisher.directory,
                "s",
                list(cluster.endpoints.values()),
                tls_of(pki, "feed"),
                on_report=reports.append,
            )
            async with _running(client):
                level = cluster.publish()
                await until(lambda: cluster.replicated == level and state(client) == "replicating")
                await until(lambda: all(one.is_connected for one in client.report.endpoints))
                reports.clear()
                for version in range(1, 4):
                    cluster.change(version, *names)
                    await until(
                        lambda version=version: (
                            client._source is not None and client._source.quorum.known.version == version
                        )
                    )
                    level = cluster.publish()
                    await until(lambda level=level: cluster.replicated == level)
                assert not any(report.reasons for report in reports)
                assert all(one.is_connected for report in reports for one in report.endpoints)
            assert not cluster.nodes["n1"].push.refused

    asyncio.run(main())


def test_pull_continues_with_node_outside_its_configuration(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2")
            cluster.publish()
            async with cluster.pulling(cluster.endpoints["n1"]) as (pull, copy):
                await until(lambda: cluster.is_copied(copy))
                cluster.change(1, "n1", "n2")
                cluster.publish()
                await until(lambda: pull._nodes.known.version == 1 and cluster.is_copied(copy))
                assert (pull.node, pull.switches) == ("n1", 0)
                await cluster.stop("n1")
                cluster.publish()
                await until(lambda: cluster.is_copied(copy))
                assert pull.node == "n2"
                # n2 leaves, and n3 is the only member. The pull must leave n2.
                await cluster.start("n3")
                cluster.change(2, "n3")
                await until(lambda: pull.node == "n3")
                cluster.publish()
                await until(lambda: cluster.is_copied(copy))

    asyncio.run(main())


def test_range_reader_continues_with_node_outside_its_configuration(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2")
            cluster.publish()
            cluster.change(1, "n1", "n2")
            files = {"ca": str(pki / "ca.crt"), "cert": str(pki / "sub.crt"), "key": str(pki / "sub.key")}
            log = await asyncio.to_thread(lambda: RemoteLog([cluster.endpoints["n1"]], "s", **files))
            assert await asyncio.to_thread(log.bounds) == (0, 10)
            await cluster.start("n3")
            cluster.change(2, "n2", "n3")
            cluster.publish()

            def read(start: int, end: int) -> int:
                found = log.read(start, end, EVERYTHING, lambda event: pytest.fail(str(event)))
                return sum(len(batch) for batch in found)

            assert await asyncio.to_thread(read, 0, 20) == 20
            await cluster.stop("n1")
            await cluster.stop("n2")
            cluster.publish()
            assert await asyncio.to_thread(read, 0, 30) == 30
            assert log._nodes.target == cluster.endpoints["n3"]
            await asyncio.to_thread(log.close)

    asyncio.run(main())


def test_publisher_and_subscriber_with_own_processes_follow_member_changes(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path, pki) as cluster:
            await cluster.start("n1", "n2", "n3")
            seeds = list(cluster.endpoints.values())
            cluster.publish()
            publisher = await asyncio.to_thread(
                lambda: rt.Publisher(
                    tmp_path / "own", "s", publisher_id="feed", endpoints=seeds, tls=tls_of(pki, "feed")
                )
            )
            subscriber = await asyncio.to_thread(
                lambda: rt.Subscriber(tmp_path / "sub", "s", endpoints=seeds[:1], tls=tls_of(pki, "sub"))
            )

            async def send() -> None:
                number = publisher.publish(b"x")
                await asyncio.to_thread(lambda: publisher.wait(number, level="replicated", timeout=WAIT_S))

            async def receive(count: int) -> None:
                got = 0
                while got < count:
                    got += len(await asyncio.to_thread(lambda: subscriber.poll(timeout=WAIT_S)))

            await asyncio.gather(send(), receive(10))
            await until(lambda: all(one.is_connected for one in publisher.status().endpoints))
            await cluster.start("n4")
            cluster.change(1, "n1", "n2", "n3", "n4")
            members = {cluster.endpoints[name] for name in ("n2", "n3", "n4")}
            await until(lambda: members < {one.endpoint for one in publisher.status().endpoints})
            cluster.publish()
            await receive(10)
            cluster.change(2, "n2", "n3", "n4")
            await cluster.stop("n1")
            await cluster.stop("n2")
            await send()
            cluster.publish()
            await receive(10)
            status = publisher.status()
            assert {one.endpoint for one in status.endpoints} == members
            assert status.state == "replicating"
            await asyncio.to_thread(lambda: (publisher.close(), subscriber.close()))

    asyncio.run(main())


class NoStream:
    """In place of a `PushStream`: it connects to nothing."""

    def __init__(self, _log: object, target: str, *_: object) -> None:
        self.target, self.is_closed, self.is_serving = target, False, False

    def close(self) -> None:
        self.is_closed = True

    async def run(self) -> None:
        await asyncio.Event().wait()


class NoChannel:
    def __init__(self, _target: str) -> None:
        pass

    async def close(self) -> None:
        pass


def test_stream_to_learned_endpoint_closes_when_seed_reaches_same_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the end of one stream would remove the progress that the other has counted."""
    monkeypatch.setattr(stream_set, "PushStream", NoStream)

    async def main() -> None:
        with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
            log = SessionSource(publisher.directory, "s")
            connect: Any = NoChannel
            streams = PushStreams(log, ["s1:1", "s2:1"], connect, None, lambda: None)
            streams.open()
            s1, s2 = streams.all
            nodes = KnownNodes((KnownNode("n1", "n1:1"), KnownNode("n2", "n2:1"), KnownNode("n3", "n3:1")), 1)
            streams.admit(s1, PushStart(CLUSTER, 0, 3, "n1", nodes=nodes))
            streams.learn(PushStart(CLUSTER, 0, 3, "n1", nodes=nodes))
            assert [one.target for one in streams.all] == ["s1:1", "s2:1"]
            streams.record_failure(s2)
            *_, n2, n3 = streams.all
            assert (n2.target, n3.target) == ("n2:1", "n3:1")
            assert (streams.members, log.quorum.majority) == (3, 2)
            streams.admit(s2, PushStart(CLUSTER, 0, 3, "n2", nodes=nodes))
            assert (n2.is_closed, n3.is_closed) == (True, False)
            with pytest.raises(Unreachable, match="leads to another node"):
                streams.admit(n3, PushStart(CLUSTER, 0, 3, "n1", nodes=nodes))
            assert n3.is_closed
            await streams.close()
            log.close()

    asyncio.run(main())


class Call:
    """A call to a node that answers when the test says so."""

    def __init__(self) -> None:
        self._answers = asyncio.Queue[bytes | Exception]()
        self._cython_call = self
        self.is_read = False
        """Whether an answer is awaited."""

    def say(self, answer: PushReply) -> None:
        self._answers.put_nowait(encode_push_reply(answer))

    def fail(self) -> None:
        self._answers.put_nowait(Unreachable("the node is gone"))

    async def write(self, _: bytes) -> None:
        pass

    async def read(self) -> bytes:
        self.is_read = True
        answer = await self._answers.get()
        self.is_read = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, *_: object) -> None:
        pass


class Calls:
    """A channel whose calls are all `call`."""

    def __init__(self) -> None:
        self.call = Call()

    def get(self) -> Any:
        return self

    def stream_stream(self, _method: str) -> Any:
        return lambda: self.call

    async def close(self) -> None:
        pass


async def turns(count: int = 30) -> None:
    """Let all ready tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_member", [False, True])
def test_progress_arriving_with_new_member_list_counts_only_if_node_stays_member(
    tmp_path: Path, is_member: bool
) -> None:
    """After a forced reset the members differ, and messages merged before it may be lost."""
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish_many([b"v"] * 10)
    old, new = epoch_of(0, 0) + 1, epoch_of(1 << 16, 77)
    nodes = [KnownNode("A", "a:1"), KnownNode("B", "b:1")]
    end = LogOffset(0, 0, 500)

    async def main() -> None:
        log = SessionSource(publisher.directory, "s")
        calls: dict[str, Call] = {}

        def connect(target: str) -> Any:
            calls[target] = (channel := Calls()).call
            return channel

        streams = PushStreams(log, ["b:1"], connect, None, lambda: None)
        streams.open()
        await turns()
        first = KnownNodes(tuple(nodes), 1)
        calls["b:1"].say(PushStart(CLUSTER, old, 2, "B", nodes=first))
        await turns()
        calls["a:1"].say(PushStart(CLUSTER, old, 2, "A", nodes=first))
        await turns()
        calls["b:1"].fail()
        await turns()
        async with asyncio.timeout(WAIT_S):
            while not calls["b:1"].is_read:  # Wait until the stream reconnects.
                await asyncio.sleep(0)
        then = KnownNodes(tuple(nodes if is_member else nodes[1:]), 2)
        calls["b:1"].say(PushStart(CLUSTER, old if is_member else new, len(then.nodes), "B", nodes=then))
        calls["a:1"].say(PushProgress(end, 10, merged=end, merged_run=0, merged_number=10))
        await turns()
        assert set(log.quorum._progress) == ({"A"} if is_member else set())
        assert log.quorum.merged_offset == (end if is_member else NOWHERE)
        await streams.close()
        log.close()

    asyncio.run(main())

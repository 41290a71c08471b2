"""The pull client: it switches to a working node, and its copy equals the log after any failure."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk
from log_items import files_of, messages, publish
from receiving_node import CLUSTER, FakeNode, make_pki, silent_endpoint, tls_of, until

import rt
from replicator.protocol.codec import PullRequest, decode_pull_request, encode_pull_request
from replicator.protocol.grpc_service import ROLES, replication_service
from replicator.protocol.messages import LogOffset
from replicator.pull import client as client_module
from replicator.pull.client import BACKOFF_SECONDS_MIN, PullClient
from replicator.pull.local_copy import LocalCopy
from replicator.pull.sidecar_copy import SidecarCopy
from rt.client.cursor import ACKNOWLEDGED, BEGUN, acknowledged_path, begun_path, write_position
from rt.errors import (
    CertificateError,
    ClusterMismatch,
    Corrupt,
    CorruptRange,
    Diverged,
    InvalidName,
    RtError,
    StorageFailed,
)
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.net.grpc_channel import serve
from rt.testing.merged import MergedLogBuilder
from rt.v1 import replication_pb2 as pb
from sequencer.localcluster.loopback import free_port


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


class Source:
    """Merged logs of several nodes, byte-identical, that grow in step."""

    def __init__(self, tmp_path: Path, names: tuple[str, ...] = ("n1",)) -> None:
        self.root = str(tmp_path / "source")
        self.nodes = [FakeNode(tmp_path / name, node=name) for name in names]
        self.logs = [MergedLogBuilder(node.merged, cluster_id=CLUSTER, stream="s") for node in self.nodes]

    def grow(self, *sizes: int, roll: bool = False, only: int | None = None) -> None:
        if sizes:
            publish(REAL, *sizes, root=self.root, roll_bytes=1 << 20)
        for index, log in enumerate(self.logs):
            if only in {None, index}:
                if roll:
                    log.roll()
                log.merge_all([f"{self.root}/s/sessions/feed"], block_bytes=4096)
                log.sync()

    @property
    def path(self) -> str:
        return self.nodes[0].merged

    def close(self) -> None:
        for log in self.logs:
            log.close()


@asynccontextmanager
async def pulling(
    copy: LocalCopy, endpoints: list[str], pki: Path, name: str = "sub", **options: Any
) -> AsyncIterator[PullClient]:
    client = PullClient(copy, "s", endpoints, tls_of(pki, name), draw=lambda low, _: low, **options)
    running = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()


def same(copy: LocalCopy, path: str) -> Callable[[], bool]:
    return lambda: Path(copy.path).exists() and files_of(REAL, copy.path) == files_of(REAL, path)


def test_copy_follows_log_as_it_grows_rolls_and_is_trimmed(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path), LocalCopy(tmp_path / "copy", "s", name="sub")
        source.grow(100, 2000)
        (node,) = source.nodes
        async with node.serving(tls_of(pki, "n1")) as endpoint, pulling(copy, [endpoint], pki) as client:
            await until(same(copy, source.path))
            assert client.node == "n1"
            for size in (10, 900_000, 2_500_000, 30):
                source.grow(size, roll=size == 30)
                await until(same(copy, source.path))
            (pull,) = node.pull.pulls.values()
            await until(lambda: pull.progress.position == copy.position and pull.progress.is_synced)
            source.logs[0].trim(SegmentId(0, 1))
            await until(same(copy, source.path))
            assert sorted(files_of(REAL, copy.path)) == [SegmentId(0, 1)]
        source.close()

    asyncio.run(main())


def test_new_client_resumes_exactly_at_end_of_its_copy(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        source.grow(100, 2000)
        (node,) = source.nodes
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            for size in (500, 300_000, 20):
                copy = LocalCopy(tmp_path / "copy", "s")
                async with pulling(copy, [endpoint], pki):
                    await until(same(copy, source.path))
                sent = sum(pull.sent_bytes for pull in node.pull.pulls.values())
                source.grow(size, roll=size == 500)
                assert sent <= sum(map(len, files_of(REAL, source.path).values()))
            copy = LocalCopy(tmp_path / "copy", "s")
            async with pulling(copy, [endpoint], pki):
                await until(same(copy, source.path))
        source.close()
        assert messages(copy.path) == messages(source.path)

    asyncio.run(main())


def test_client_switches_nodes_when_one_stops_and_copy_stays_identical(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path, ("n1", "n2")), LocalCopy(tmp_path / "copy", "s")
        source.grow(100, 2000)
        first, second = source.nodes
        ports = [free_port(), free_port()]
        endpoints = [f"localhost:{port}" for port in ports]
        async with pulling(copy, endpoints, pki) as client:
            async with first.serving(tls_of(pki, "n1"), ports[0]):
                await until(same(copy, source.path))
                assert client.node == "n1"
            source.grow(50, 70_000)
            async with second.serving(tls_of(pki, "n1"), ports[1]):
                await until(same(copy, source.path))
                assert client.node == "n2"
                source.grow(10, roll=True)
                await until(same(copy, source.path))
        source.close()

    asyncio.run(main())


def test_client_switches_from_lagging_node_to_complete_one(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path, ("n1", "n2")), LocalCopy(tmp_path / "copy", "s")
        source.grow(100)
        behind, ahead = source.nodes
        source.grow(200, 300, only=1)
        ports = [free_port(), free_port()]
        async with ahead.serving(tls_of(pki, "n1"), ports[1]):
            async with pulling(copy, [f"localhost:{ports[1]}"], pki):
                await until(same(copy, ahead.merged))
            source.grow(400, only=1)
            copy = LocalCopy(tmp_path / "copy", "s")
            async with (
                behind.serving(tls_of(pki, "n1"), ports[0]),
                pulling(copy, [f"localhost:{port}" for port in ports], pki) as client,
            ):
                await until(same(copy, ahead.merged))
                assert client.node == "n2"
                assert client.switches >= 1
        source.close()

    asyncio.run(main())


class Silent:
    """Answers no hello, or sends nothing after its answer."""

    def __init__(self, node: FakeNode | None = None) -> None:
        self.asked = 0
        self._node = node

    async def pull(self, requests: Any, context: Any) -> None:
        self.asked += 1
        decode_pull_request(await context.read())
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["no answer", "no items"])
def test_client_switches_from_silent_node_to_another(tmp_path: Path, pki: Path, kind: str) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path, ("n1", "n2")), LocalCopy(tmp_path / "copy", "s")
        source.grow(100)
        good, still = source.nodes
        source.grow(200, only=0)
        silent = Silent()
        handler = silent.pull if kind == "no answer" else still.pull.pull
        server = await serve(
            "127.0.0.1:0", [replication_service(pull=handler)], roles=ROLES, tls=tls_of(pki, "n1")
        )
        endpoints = [f"localhost:{server.port}"]
        async with good.serving(tls_of(pki, "n1")) as endpoint:
            seconds = {"start_seconds": 0.2} if kind == "no answer" else {"silence_seconds": 0.2}
            async with pulling(copy, [*endpoints, endpoint], pki, **seconds):
                await until(same(copy, good.merged))
        await server.stop()
        source.close()

    asyncio.run(main())


def test_idle_log_causes_no_warning_and_no_longer_backoff(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client logs no warning, and its pauses between two nodes do not grow."""

    async def main() -> None:
        source, copy = Source(tmp_path, ("n1", "n2")), LocalCopy(tmp_path / "copy", "s")
        source.grow(100)
        one, other = source.nodes
        async with one.serving(tls_of(pki, "n1")) as first, other.serving(tls_of(pki, "n1")) as second:
            pauses: list[float] = []
            options = {"silence_seconds": 0.1}
            async with pulling(copy, [first, second], pki, **options) as client:
                client._draw = lambda _, high: pauses.append(high) or 0.01  # type: ignore[func-returns-value]
                await until(lambda: client.switches >= 6)
        assert set(pauses) == {BACKOFF_SECONDS_MIN}
        source.close()

    caplog.set_level("INFO", logger="replicator")
    asyncio.run(main())
    left = [record.levelname for record in caplog.records if "node_left" in record.message]
    assert set(left) == {"INFO"}


def test_unreachable_nodes_are_logged_once_for_each_kind_of_failure(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure is logged once. Later log lines include the number of attempts in between."""
    monkeypatch.setattr(client_module, "LOG_AGAIN_SECONDS", math.inf)

    async def main() -> None:
        away = [f"localhost:{free_port()}" for _ in range(2)]
        copy = LocalCopy(tmp_path / "copy", "s")
        async with pulling(copy, away, pki) as client:
            client._draw = lambda *_: 0.001
            await until(lambda: client.switches >= 30)

    asyncio.run(main())
    left = [message for message in caplog.messages if "node_left" in message]
    kinds = {message.split(" error=")[0] for message in left}
    assert len(kinds) == 2
    assert len(left) < 10, "one for each kind of failure"


async def ended(copy: LocalCopy, endpoints: list[str], pki: Path, name: str = "sub") -> RtError:
    client = PullClient(copy, "s", endpoints, tls_of(pki, name), draw=lambda low, _: low)
    with pytest.raises(RtError) as caught:
        async with asyncio.timeout(120):
            await client.run()
    return caught.value


def test_diverged_copy_ends_client_with_diverged_and_is_unchanged(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        ours, theirs = Source(tmp_path / "a"), Source(tmp_path / "b")
        ours.grow(100, 200)
        theirs.grow(101, 200)
        copy = LocalCopy(tmp_path / "copy", "s")
        async with ours.nodes[0].serving(tls_of(pki, "n1")) as endpoint, pulling(copy, [endpoint], pki):
            await until(same(copy, ours.path))
        before = files_of(REAL, copy.path)
        async with theirs.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            assert isinstance(await ended(LocalCopy(copy.path, "s"), [endpoint], pki), Diverged)
        assert files_of(REAL, copy.path) == before
        ours.close()
        theirs.close()

    asyncio.run(main())


def test_client_ends_when_every_node_rejects_its_certificate_or_cluster(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        source.grow(100)
        async with source.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            copy = LocalCopy(tmp_path / "copy", "s", name="another")
            both = [endpoint, endpoint.replace("localhost", "127.0.0.1")]
            assert isinstance(await ended(copy, both, pki), CertificateError)
            assert not (tmp_path / "copy").exists()
            MergedLogBuilder(tmp_path / "copy", cluster_id=bytes(16), stream="s").close()
            copy = LocalCopy(tmp_path / "copy", "s")
            assert isinstance(await ended(copy, [endpoint], pki), ClusterMismatch)
        source.close()

    asyncio.run(main())


def test_client_ends_without_common_version_and_reports_no_corruption(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(asked: PullRequest) -> bytes:
        message = pb.PullRequest.FromString(encode_pull_request(asked))
        message.hello.version, message.hello.version_latest = 2, 3
        return message.SerializeToString()

    async def main() -> None:
        source = Source(tmp_path)
        source.grow(100)
        async with source.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            copy, corrupt = LocalCopy(tmp_path / "copy", "s"), list[object]()
            monkeypatch.setattr(LocalCopy, "on_corrupt", lambda _self, *found: corrupt.append(found))
            both = [endpoint, endpoint.replace("localhost", "127.0.0.1")]
            error = await ended(copy, both, pki)
        assert isinstance(error, rt.UnknownVersion)
        assert not corrupt
        assert (error.got, error.expected) == ("versions 2 to 3", "version 1")
        source.close()

    monkeypatch.setattr(client_module, "encode_pull_request", newer)
    asyncio.run(main())


def test_failed_disk_ends_client_while_full_disk_is_logged_once_and_retried(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        source.grow(1000, 2000)
        disk = FaultyDisk(REAL)
        async with source.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            copy = LocalCopy(tmp_path / "copy", "s", disk=disk)
            disk.capacity_bytes = 2000
            async with pulling(copy, [endpoint], pki) as client:
                await until(lambda: client.switches >= 3)
                assert [one.levelname for one in caplog.records if "pull_waits" in one.message] == ["WARNING"]
                assert "node_left" not in caplog.text  # The node is not at fault.
                disk.capacity_bytes = None
                await until(same(copy, source.path))
            disk.fail("pwritev", at=1, times=10**6)
            source.grow(10)
            assert isinstance(
                await ended(LocalCopy(copy.path, "s", disk=disk), [endpoint], pki), StorageFailed
            )
        source.close()

    asyncio.run(main())


def test_filtered_copy_keeps_its_topics_and_rejects_others(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        source.grow(10, 20, 30, 40)
        wanted = [message for message in messages(source.path) if message[1] == "t1"]
        async with source.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            copy = LocalCopy(tmp_path / "copy", "s", topics=["t1"])
            async with pulling(copy, [endpoint], pki):
                await until(lambda: copy.position == 4)
            assert messages(copy.path) == wanted
            for topics in (["t2"], []):
                with pytest.raises(InvalidName):
                    LocalCopy(tmp_path / "copy", "s", topics=topics).open()
            again = LocalCopy(tmp_path / "copy", "s", topics=["t1", "t1"])
            source.grow(50, 60, 70, roll=True)
            async with pulling(again, [endpoint], pki):
                await until(lambda: again.position == 7)
        source.close()
        assert messages(copy.path) == [message for message in messages(source.path) if message[1] == "t1"]

    asyncio.run(main())


def test_copy_resuming_after_trim_skips_forward_and_its_reader_gets_gap_event(
    tmp_path: Path, pki: Path
) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path), LocalCopy(tmp_path / "copy", "s")
        source.grow(100, 200)
        async with source.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            async with pulling(copy, [endpoint], pki):
                await until(same(copy, source.path))
            source.grow(300, roll=True)
            source.grow(400, roll=True)
            source.logs[0].trim(SegmentId(0, 2))
            again = LocalCopy(tmp_path / "copy", "s")
            async with pulling(again, [endpoint], pki):
                await until(same(again, source.path))
        source.close()

    asyncio.run(main())
    events: list[object] = []
    with rt.LogReader(tmp_path / "copy", position=0, on_event=events.append) as reader:
        assert [message.position for message in reader] == [3]
    assert [(event.wanted, event.resumed) for event in events] == [(0, 3)]  # type: ignore[attr-defined]


def test_new_copy_at_latest_starts_at_log_end_in_active_segment(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        source.grow(100, 200)
        source.grow(300, roll=True)
        async with source.nodes[0].serving(tls_of(pki, "n1")) as endpoint:
            copy = LocalCopy(tmp_path / "copy", "s", position="latest")
            async with pulling(copy, [endpoint], pki):
                await until(lambda: copy.position == 3)
                assert copy.receiver is not None
                assert copy.receiver.next_offset is not None
                assert copy.receiver.next_offset.segment == LogOffset(0, 1, 0).segment
        source.close()

    asyncio.run(main())


# --- acknowledgements -------------------------------------------------------------------------------------


def attached(path: Path, **options: Any) -> SidecarCopy:
    return SidecarCopy(path, "s", report=lambda _: None, subscriber="sub", **options)


def acknowledge(copy: LocalCopy, position: int, name: str = "sub") -> None:
    write_position(REAL, acknowledged_path(copy.path, name), ACKNOWLEDGED, position)


def test_acknowledgements_reach_node_while_log_is_idle(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ACKNOWLEDGED_SECONDS", 0.01)

    async def main() -> None:
        source, copy = Source(tmp_path), attached(tmp_path / "copy")
        source.grow(100, 2000, 30)
        (node,) = source.nodes
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            async with pulling(copy, [endpoint], pki):
                await until(same(copy, source.path))
                assert node.acknowledged == []
                write_position(REAL, begun_path(copy.path, "sub"), BEGUN, 1)
                await until(lambda: node.acknowledged == [("sub", 1)])
                acknowledge(copy, 3, "another")
                acknowledge(copy, 2)
                await until(lambda: node.acknowledged == [("sub", 1), ("sub", 2)])
            async with pulling(attached(tmp_path / "copy"), [endpoint], pki):
                await until(lambda: len(node.acknowledged) == 3)
        assert node.acknowledged[2] == ("sub", 2)
        source.close()

    asyncio.run(main())


def test_corrupt_acknowledgement_is_logged_once_and_left_out_of_requests(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = attached(tmp_path)
    assert copy.acknowledged() is None
    acknowledge(copy, 5)
    wanted = copy.request().acknowledged
    assert wanted is not None
    assert wanted.position == 5
    path = Path(acknowledged_path(copy.path, "sub"))
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        assert copy.request().acknowledged is None
    assert caplog.text.count("acknowledgement_unreadable") == 1
    acknowledge(copy, 6)
    assert copy.acknowledged() is not None


# Corruption on every node


class Telling(LocalCopy):
    """Records the ranges for which no node has valid bytes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.told: list[tuple[int, int | None, str]] = []

    def on_corrupt(self, start: int, end: int | None, why: str) -> None:
        self.told.append((start, end, why))


@pytest.mark.parametrize(
    ("at", "is_told_where"),
    [(119_150, True), (120_000, True), (120_000, False), (3, True), (3, False)],
    ids=["columns", "values", "values, and not told where", "header", "header, and not told where"],
)
def test_corruption_on_all_nodes_is_reported_once_and_pull_resumes_after_repair(
    tmp_path: Path, pki: Path, at: int, *, is_told_where: bool
) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path, ("n1", "n2")), Telling(tmp_path / "copy", "s")
        source.grow(*[2000] * 100)
        source.grow(*[2000] * 10, roll=True)
        files = [Path(node.merged) / "log.0.0" for node in source.nodes]
        good = files[0].read_bytes()
        for file in files:
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        async with AsyncExitStack() as opened:
            endpoints = []
            for node in source.nodes:
                if is_told_where:
                    node.pull.pull = corrupt_range(node.pull.pull, 100)  # type: ignore[method-assign]
                endpoints.append(await opened.enter_async_context(node.serving(tls_of(pki, "n1"))))
            async with pulling(copy, endpoints, pki) as client:
                # A node learns of corrupt values only when the receiver reconnects.
                await until(lambda: copy.told and (not is_told_where or copy.told[-1][1] == 100))
                told, switches = len(copy.told), client.switches
                await until(lambda: client.switches >= switches + 6)
                start, end, why = copy.told[-1]
                assert {one[0] for one in copy.told} == {copy.position}
                assert (start > 0) == (at > 64)
                assert end == (100 if is_told_where else None)
                assert all(endpoint in why for endpoint in endpoints)
                (tmp_path / "whole").write_bytes(good)  # A rename avoids that a reader sees half of the file.
                (tmp_path / "whole").rename(files[1])
                await until(lambda: copy.position == 110)
            assert len(copy.told) == told <= 2
        source.close()

    asyncio.run(main())


def corrupt_range(pull: Any, end: int) -> Any:
    """Wrap a pull so that it reports corruption as a node does."""

    async def told(requests: Any, context: Any) -> None:
        try:
            await pull(requests, context)
        except Corrupt as error:
            raise CorruptRange("damaged here", start=0, end=end) from error

    return told


def test_corruption_is_not_reported_while_another_node_is_unreachable(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        source, copy = Source(tmp_path), Telling(tmp_path / "copy", "s")
        source.grow(*[2000] * 10)
        file = Path(source.path) / "log.0.0"
        good = file.read_bytes()
        file.write_bytes(good[:9000] + bytes([good[9000] ^ 1]) + good[9001:])
        (node,) = source.nodes
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            pulling(copy, [endpoint, f"localhost:{free_port()}"], pki) as client,
        ):
            await until(lambda: client.switches >= 8)
        assert copy.told == []
        source.close()

    asyncio.run(main())


@pytest.mark.slow
def test_unreached_nodes_are_reported_after_connect_timeout_and_pull_continues(
    tmp_path: Path, pki: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    class Copy(LocalCopy):
        def on_unreached(self, why: str) -> None:
            said.append(why)

    def logged() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if text.startswith("no_node_reached") and silent in text]

    async def main() -> None:
        nonlocal silent
        source, copy = Source(tmp_path), Copy(tmp_path / "copy", "s")
        source.grow(100)
        (node,) = source.nodes
        port = free_port()
        nobody = f"localhost:{port}"
        async with silent_endpoint() as silent:
            # The client asks the silent node first, which delays it for longer than the timeout.
            nodes = [silent, nobody]
            options: dict[str, Any] = {"connect_timeout_s": 0.05, "start_seconds": 1}
            async with pulling(copy, nodes, pki, **options):
                await until(logged)
                assert said
                assert silent in said[0]
                assert nobody in said[0]
                async with node.serving(tls_of(pki, "n1"), port=port):
                    await until(same(copy, source.path))
        source.close()

    silent = ""
    asyncio.run(main())
    assert len(logged()) == 1


def test_connect_timeout_starts_after_copy_is_open(tmp_path: Path, pki: Path) -> None:
    """Opening a large copy on a slow disk takes time, and no node is asked during that time."""
    seen: list[str] = []
    is_said = threading.Event()

    class Copy(LocalCopy):
        def open(self) -> None:
            is_said.wait(0.5)
            super().open()
            seen.append("open")

        def on_unreached(self, why: str) -> None:
            seen.append("said")
            is_said.set()

    async def main() -> None:
        nodes = [f"localhost:{free_port()}", f"localhost:{free_port()}"]
        async with pulling(Copy(tmp_path / "copy", "s"), nodes, pki, connect_timeout_s=0.01):
            await until(lambda: len(seen) > 1)

    asyncio.run(main())
    assert seen[:2] == ["open", "said"]

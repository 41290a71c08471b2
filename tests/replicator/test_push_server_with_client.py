"""The push client and push server together: nodes get the same bytes in spite of interruptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from log_items import files_of, publish
from receiving_node import FakeNode, make_pki, tls_of, until

import rt
from replicator.push.client import PushClient
from rt.log.check.verify import verify
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import read_identity
from rt.log.write.writer import LogWriter
from sequencer.localcluster.loopback import free_port


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@asynccontextmanager
async def pushing(directory: str, endpoints: list[str], pki: Path) -> AsyncIterator[PushClient]:
    client = PushClient(directory, "s", endpoints, tls_of(pki, "feed"))
    running = asyncio.ensure_future(client.run())
    try:
        yield client
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])


def copy_of(root: Path) -> str:
    return str(root / "sessions" / "feed")


def has_all(root: Path, directory: str) -> bool:
    return Path(copy_of(root)).exists() and files_of(REAL, copy_of(root)) == files_of(REAL, directory)


def test_three_nodes_receive_all_runs_of_publisher(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        roots = [tmp_path / name for name in ("n1", "n2", "n3")]
        directory = publish(REAL, 100, 3000, 3000, root=str(tmp_path / "source"))
        async with AsyncExitStack() as opened:
            nodes = [FakeNode(root, node=root.name) for root in roots]
            endpoints = [await opened.enter_async_context(node.serving(tls_of(pki, "n1"))) for node in nodes]
            async with pushing(directory, endpoints, pki) as client:
                for sizes in ((2_500_000, 10), (5,), (4000, 4000)):
                    publish(REAL, *sizes, root=str(tmp_path / "source"))
                    await until(lambda: all(has_all(root, directory) for root in roots))
                await until(lambda: client.is_drained)
            assert [life.number for life in nodes[0].lives] == [0, 1, 2, 3]
        for root in roots:
            assert verify(copy_of(root)).damage == []

    asyncio.run(main())


def test_node_catches_up_after_each_restart(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        root, port = tmp_path / "n1", free_port()
        with rt.Publisher(tmp_path / "source", "s", publisher_id="feed", roll_bytes=200_000) as publisher:
            async with pushing(publisher.directory, [f"localhost:{port}"], pki):
                for _ in range(3):
                    publisher.publish_many([bytes(1000)] * 400)
                    publisher.flush()
                    async with FakeNode(root).serving(tls_of(pki, "n1"), port):
                        publisher.publish_many([bytes(1000)] * 400)
                        publisher.flush()
                        await until(lambda: has_all(root, publisher.directory))
        assert verify(copy_of(root)).damage == []

    asyncio.run(main())


def test_push_continues_to_node_missing_merged_bytes_that_publisher_trimmed(
    tmp_path: Path, pki: Path
) -> None:
    async def main() -> None:
        directory = publish(REAL, 3000, 3000, 3000, root=str(tmp_path / "source"))
        publish(REAL, 10, root=str(tmp_path / "source"))
        before = files_of(REAL, directory)
        kept = sorted(before)[2]
        writer = LogWriter.open(directory, read_identity(REAL, directory))
        writer.trim(kept, TrimReason.MERGED)
        writer.close()
        root = tmp_path / "n1"
        node = FakeNode(root)
        async with node.serving(tls_of(pki, "n1")) as endpoint, pushing(directory, [endpoint], pki):
            await until(lambda: has_all(root, directory))
        assert SegmentId(0, 0) not in files_of(REAL, copy_of(root))

    asyncio.run(main())

"""Repair of a subscriber's corrupt copy from nodes, and the error of the pull if that is impossible."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from log_items import files_of, publish
from receiving_node import CLUSTER, FakeNode, make_pki, tls_of, until

from replicator.pull import copy_repair
from replicator.pull.client import PullClient
from replicator.pull.copy_repair import CopyRepairer, RepairingPull
from replicator.pull.local_copy import LocalCopy
from rt.errors import Corrupt, Diverged, RtError
from rt.log.check.verify import verify
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TABLE_FILE
from rt.log.scan.directory import read_table
from rt.log.write.repair_requests import is_requested, request_repair, requested_repairs
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.loopback import free_port

FIRST, SECOND = SegmentId(0, 0), SegmentId(0, 1)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


class World:
    """Nodes with the same merged log of two segments, and a whole copy of it."""

    def __init__(self, root: Path, pki: Path, nodes: int = 1) -> None:
        self.nodes = [FakeNode(root / f"n{number}") for number in range(nodes)]
        self.logs = [MergedLogBuilder(node.merged, cluster_id=CLUSTER, stream="s") for node in self.nodes]
        self.tls, self.node_tls = tls_of(pki, "sub"), tls_of(pki, "n1")
        self.endpoints: list[str] = []
        self._root = root
        self.grow(100, 2000, 40_000, 900)
        self.grow(300, 3000, 50_000, 700, is_rolled=True)
        self.path = root / "copy"

    def grow(self, *sizes: int, is_rolled: bool = False) -> None:
        publish(REAL, *sizes, root=str(self._root), roll_bytes=1 << 20)
        for log in self.logs:
            if is_rolled:
                log.roll()
            log.merge_all([self._root / "s/sessions/feed"], block_bytes=4096)
            log.sync()

    def client(self, copy: LocalCopy) -> PullClient:
        return PullClient(
            copy,
            "s",
            self.endpoints,
            self.tls,
            raises_damage=True,
            draw=lambda low, _: low,
            silence_seconds=2,
        )

    def copy(self, **options: Any) -> LocalCopy:
        return LocalCopy(self.path, "s", **options)

    def file(self, segment: SegmentId, node: int | None = None) -> Path:
        return (self.path if node is None else Path(self.nodes[node].merged)) / segment.file_name

    @property
    def is_whole(self) -> bool:
        return files_of(REAL, str(self.path)) == files_of(REAL, self.nodes[0].merged)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            self.endpoints = [
                await opened.enter_async_context(node.serving(self.node_tls)) for node in self.nodes
            ]
            yield

    @asynccontextmanager
    async def pulling(self, **options: Any) -> AsyncIterator[asyncio.Future[None]]:
        """Run a pull into the copy until the block ends. The pull may also end earlier by itself."""
        running = asyncio.ensure_future(RepairingPull(self.copy(**options), self.client).run())
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def fill(self, **options: Any) -> None:
        async with self.pulling(**options) as running:
            if options:
                await until(
                    lambda: (
                        self.path.exists() and (table := read_table(REAL, str(self.path))) and table.segments
                    )
                )
                await asyncio.sleep(0)
            else:
                await until(lambda: self.path.exists() and self.is_whole)
                await until(lambda: read_durable(self))
            assert not running.done()


def read_durable(world: World) -> bool:
    """Whether the whole copy is known to be synced."""
    from rt.log.scan.directory import read_durable_end

    durable = read_durable_end(REAL, str(world.path))
    return (
        durable is not None and durable.id == SECOND and durable.offset == world.file(SECOND).stat().st_size
    )


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


@pytest.mark.parametrize(("segment", "at"), [(FIRST, 5000), (FIRST, 3), (FIRST, 70), (SECOND, 9000)])
def test_flipped_bit_is_repaired_on_request_while_pull_continues(
    tmp_path: Path, pki: Path, segment: SegmentId, at: int
) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            async with world.pulling() as running:
                await until(lambda: world.nodes[0].pull.pulls)
                flip(world.file(segment), at)
                request_repair(REAL, str(world.path), segment)
                await until(lambda: world.is_whole and not requested_repairs(REAL, str(world.path)))
                world.grow(20)
                await until(lambda: world.is_whole)
                assert not running.done()
        assert verify(world.path).damage == []
        assert not (world.path / "repair").exists()

    run(main)


@pytest.mark.parametrize("spoil", [partial(flip, at=9000), partial(flip, at=5), Path.unlink])
def test_corrupt_or_missing_last_segment_is_repaired_before_pull_continues(
    tmp_path: Path, pki: Path, spoil: Callable[[Path], None]
) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            spoil(world.file(SECOND))
            async with world.pulling() as running:
                await until(lambda: world.is_whole or running.done())
                world.grow(20)
                await until(lambda: world.is_whole or running.done())
                assert not running.done(), running.exception()
        assert verify(world.path).damage == []

    run(main)


@pytest.mark.parametrize("spoil", [partial(flip, at=5), Path.unlink])
def test_pull_continues_if_segment_table_is_corrupt_or_missing(
    tmp_path: Path, pki: Path, spoil: Callable[[Path], None]
) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            spoil(world.path / TABLE_FILE)
            async with world.pulling() as running:
                world.grow(20)
                await until(lambda: world.is_whole or running.done())
                assert not running.done(), running.exception()
        assert verify(world.path).damage == []

    run(main)


def test_corrupt_last_block_of_sealed_segment_is_repaired(tmp_path: Path, pki: Path) -> None:
    """A pull sends its last block to the node. In a sealed segment it reads that block from the disk."""

    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            for log in world.logs:
                log.roll()
            async with world.pulling():
                await until(lambda: len(files_of(REAL, str(world.path))) == 3)
            world.file(SegmentId(0, 2)).unlink()
            flip(world.file(SECOND), world.file(SECOND).stat().st_size - 300)
            world.grow(50)
            async with world.pulling() as running:
                request_repair(REAL, str(world.path), SECOND)
                await until(lambda: world.is_whole or running.done())
                assert not running.done(), running.exception()

    run(main)


def test_segment_is_repaired_from_parts_of_several_nodes(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki, 2)
        async with world.serving():
            await world.fill()
            flip(world.file(FIRST, node=0), 30_000)
            flip(world.file(FIRST), 5000)
            good = world.file(FIRST, node=1).read_bytes()
            async with world.pulling() as running:
                request_repair(REAL, str(world.path), FIRST)
                await until(lambda: world.file(FIRST).read_bytes() == good or running.done())
                assert not running.done()

    run(main)


def test_repair_waits_until_a_node_is_reachable(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
        flip(world.file(SECOND), 9000)
        port = free_port()
        world.endpoints = [f"localhost:{port}"]
        async with world.pulling() as running:
            await asyncio.wait([running], timeout=0.5)
            assert not running.done()
            async with FakeNode(world.nodes[0].root).serving(world.node_tls, port):
                await until(lambda: world.is_whole or running.done())
                assert not running.done()

    run(main)


@pytest.mark.parametrize("is_slow", [False, True])
def test_corrupt_segment_trimmed_by_nodes_ends_pull_with_file_range_and_hint(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """A slow node reports its log start long before it sends bytes. The pull polls between the two."""
    if is_slow:
        monkeypatch.setattr(copy_repair, "_LOOK_SECONDS", 0)

    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill(retention="own")
            await world.fill()
            flip(world.file(FIRST), 5000)
            size = world.file(FIRST).stat().st_size
            world.logs[0].trim(SECOND)
            request_repair(REAL, str(world.path), FIRST)
            async with world.pulling(retention="own") as running:
                await asyncio.wait([running], timeout=60)
                error = running.exception()
        assert isinstance(error, Corrupt)
        assert error.path == str(world.file(FIRST))
        assert error.offset <= 5000
        assert "the nodes have trimmed that segment" in str(error)
        assert f"bytes {error.offset} to {size}, positions " in str(error.got)
        assert f"Remove the directory {world.path}" in str(error.hint)
        assert is_requested(REAL, str(world.path), FIRST)

    run(main)


def test_corrupt_filtered_copy_ends_pull_with_hint(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            async with world.pulling(topics=["t0", "t2"]):
                await until(
                    lambda: world.file(SECOND).exists() and world.file(SECOND).stat().st_size > 50_000
                )
            # The second pull writes its own declarations. A copy from a single pull does not have them.
            world.grow(60)
            async with world.pulling(topics=["t0", "t2"]):
                size = world.file(SECOND).stat().st_size
                await until(lambda: world.file(SECOND).stat().st_size > size)
                world.grow(50, is_rolled=True)
                await until(lambda: world.file(SegmentId(0, 2)).exists())
            flip(world.file(SECOND), world.file(SECOND).stat().st_size - 30)
            request_repair(REAL, str(world.path), SECOND)
            async with world.pulling(topics=["t0", "t2"]) as running:
                await asyncio.wait([running], timeout=60)
                error = running.exception()
        assert isinstance(error, Corrupt)
        assert "Remove the directory" in str(error)

    run(main)


def test_repair_from_nodes_of_another_log_raises_diverged_and_changes_nothing(
    tmp_path: Path, pki: Path
) -> None:
    async def main() -> None:
        world = World(tmp_path / "one", pki)
        async with world.serving():
            await world.fill()
        other = World(tmp_path / "two", pki)
        flip(world.file(FIRST), 40_000)
        bad = world.file(FIRST).read_bytes()
        async with other.serving():
            world.endpoints = other.endpoints
            repairer = CopyRepairer(world.copy(), world.client)
            with pytest.raises(Diverged):
                await repairer.repair(FIRST, is_patient=False)
            repairer.close()
        assert world.file(FIRST).read_bytes() == bad

    run(main)


def test_repair_all_repairs_whole_copy_during_pull(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            await until(lambda: not world.nodes[0].pull.pulls)
            async with world.pulling():
                await until(lambda: world.nodes[0].pull.pulls)  # This one, which has opened the copy.
                for segment in (FIRST, SECOND):
                    flip(world.file(segment), 8000)
                repairer = CopyRepairer(world.copy(), world.client)
                assert await repairer.repair_all() == {FIRST: 1, SECOND: 1}
                assert await repairer.repair_all() == {}
                repairer.close()
                assert world.is_whole

    run(main)


def test_repair_all_raises_if_no_node_is_reachable(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
        flip(world.file(FIRST), 8000)
        world.endpoints = [f"localhost:{free_port()}"]
        repairer = CopyRepairer(world.copy(), world.client)
        with pytest.raises(RtError, match="not every node could be asked"):
            await repairer.repair_all()
        repairer.close()

    run(main)


def test_leftover_repair_files_of_killed_pull_are_removed(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            left = world.path / "repair" / "log.0.0"
            left.parent.mkdir()
            left.write_bytes(b"half")
            async with world.pulling():
                await until(lambda: not left.parent.exists())

    run(main)


def test_repair_request_for_valid_or_missing_segment_is_completed(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, pki)
        async with world.serving():
            await world.fill()
            for segment in (FIRST, SegmentId(7, 7)):
                request_repair(REAL, str(world.path), segment)
                request_repair(REAL, str(world.path), segment)
            async with world.pulling():
                await until(lambda: not requested_repairs(REAL, str(world.path)))
        shutil.rmtree(world.path / "repairs")
        assert requested_repairs(REAL, str(world.path)) == []

    run(main)

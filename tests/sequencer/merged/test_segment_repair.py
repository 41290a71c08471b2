"""Corrupt segments are not served until they are repaired from a peer with valid bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from log_items import CLUSTER, WHOLE, files_of, give, items_of, publish, session_copy
from receiving_node import FakeNode, make_pki, tls_of, until

from replicator.protocol.messages import Run
from replicator.pull.server import PullServicer
from replicator.receive.batch_boundaries import read_marks
from replicator.receive.group_commit import GroupCommit
from rt.errors import Corrupt, LogNotFound, RtError, TooManyFiles
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_header, read_identity
from rt.net.grpc_errors import Unreachable
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.loopback import free_port
from sequencer.merged.repair import _last_set_aside
from sequencer.merged.repair_queue import CorruptFiles, Fetch, Repairer, VerifiedDisk
from sequencer.merged.scrubber import Scrubber, ScrubTarget
from sequencer.sessions.peer_pull import fetch_replica, fetch_segment
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.state import ActiveRun as OpenLife
from sequencer.state.state import Session

FIRST, SECOND = SegmentId(0, 0), SegmentId(0, 1)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


class Logs:
    """The same merged log of two segments at `count` nodes. The tests repair its first segment."""

    def __init__(self, root: Path, count: int = 3) -> None:
        self.nodes = [FakeNode(root / f"n{number}") for number in range(count)]
        self.path = Path(self.nodes[0].merged)
        logs = [MergedLogBuilder(node.merged, cluster_id=CLUSTER, stream="s") for node in self.nodes]
        self.firsts: dict[SegmentId, int] = {}
        for segment in (FIRST, SECOND):
            self.firsts[segment] = logs[0].position
            publish(REAL, 100, 2000, 40_000, 900, root=str(root), roll_bytes=1 << 20)
            for log in logs:
                if segment == SECOND:
                    log.roll()
                log.merge_all([root / "s/sessions/feed"], block_bytes=4096)
                log.sync()
        for log in logs:
            log.close()
        self.good = files_of(REAL, str(self.path))

    def file(self, segment: SegmentId, node: int = 0) -> Path:
        return Path(segment_path(self.nodes[node].merged, segment))

    def damaged(self, segment: SegmentId = FIRST, at: int = 5000, node: int = 0) -> Corrupt:
        """Flip a bit, and return the error of a reader that finds it."""
        flip(self.file(segment, node), at)
        return Corrupt("a batch fails its checksum", path=str(self.file(segment, node)), offset=at)

    @asynccontextmanager
    async def repairer(self, root: Path, pki: Path, **options: Any) -> AsyncIterator[Repairer]:
        """Yield a repairer that fetches from the other nodes."""
        async with AsyncExitStack() as opened:
            tls = tls_of(pki, "n1")
            endpoints = [await opened.enter_async_context(node.serving(tls)) for node in self.nodes[1:]]

            async def fetch(_directory: str, segment: SegmentId, aside: str, end: int) -> None:
                await fetch_segment(aside, WHOLE, segment, self.firsts[segment], end, endpoints, tls)

            async with running(root, fetch, **options) as repairer:
                yield repairer


@asynccontextmanager
async def running(root: Path, fetch: Fetch, **options: Any) -> AsyncIterator[Repairer]:
    pool = ThreadPoolExecutor(2)
    failures: list[RtError] = []
    aside = str(root / "repair")
    repairer = Repairer(aside, pool, fetch, on_failed=failures.append, again_s=0.01, **options)
    task = asyncio.ensure_future(repairer.run())
    try:
        yield repairer
        assert failures == []
    finally:
        task.cancel()
        await asyncio.wait([task])
        pool.shutdown()


def is_sound(repairer: Repairer) -> Callable[[], bool]:
    return lambda: not len(repairer.corrupt_files)


@pytest.mark.parametrize(("segment", "at"), [(FIRST, 5000), (FIRST, 3), (FIRST, 70), (SECOND, 9000)])
def test_flipped_bit_in_segment_is_repaired_from_peers(
    tmp_path: Path, pki: Path, segment: SegmentId, at: int
) -> None:
    async def main() -> None:
        logs = Logs(tmp_path)
        error = logs.damaged(segment, at)
        repaired: list[tuple[str, SegmentId]] = []

        async def on_repaired(directory: str, segment: SegmentId) -> None:
            repaired.append((directory, segment))
            if len(repaired) == 1:
                raise TooManyFiles("no more open files")

        async with logs.repairer(tmp_path, pki, on_repaired=on_repaired) as repairer:
            assert repairer.on_corrupt(error)
            await until(is_sound(repairer))
            assert repaired == [(str(logs.path), segment)] * 2, "what raised is tried again"
            assert (repairer.found, repairer.repaired) == (1, 1)
            assert repairer.last[0] == f"{error.path} at offset {error.offset}"
        assert files_of(REAL, str(logs.path)) == logs.good
        assert not (tmp_path / "repair").exists()

    asyncio.run(main())


def test_missing_segment_is_restored_from_peers(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        logs = Logs(tmp_path)
        logs.file(FIRST).unlink()
        async with logs.repairer(tmp_path, pki) as repairer:
            repairer.on_corrupt(Corrupt("missing", path=str(logs.file(FIRST)), offset=0))
            await until(is_sound(repairer))
        assert files_of(REAL, str(logs.path)) == logs.good

    asyncio.run(main())


def test_repair_succeeds_although_one_peer_is_corrupt_too(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        logs = Logs(tmp_path)
        logs.damaged(node=1, at=5100)
        error = logs.damaged()
        async with logs.repairer(tmp_path, pki) as repairer:
            repairer.on_corrupt(error)
            await until(is_sound(repairer))
        assert files_of(REAL, str(logs.path)) == logs.good

    asyncio.run(main())


def test_corrupt_bytes_stay_unchanged_and_unserved_while_no_peer_has_valid_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    async def fetch(_directory: str, _segment: SegmentId, _aside: str, end: int) -> None:
        if len(asked) == 3:
            await asyncio.Event().wait()
        asked.append(end)
        raise RtError("nobody has it")

    async def main() -> None:
        logs = Logs(tmp_path, 1)
        error = logs.damaged()
        bad = logs.file(FIRST).read_bytes()
        async with running(tmp_path, fetch) as repairer:
            repairer.on_corrupt(error)
            await until(lambda: repairer.corrupt_segments[0].tries == 3)
            disk, path = VerifiedDisk(repairer.corrupt_files), str(logs.file(FIRST))
            (patient,) = repairer.corrupt_segments
            assert (patient.path, patient.segment, patient.tries) == (path, FIRST, 3)
            sound = patient.offset
            assert 64 < sound <= 5000  # Sound up to the corrupt block.
            file = disk.open(path)
            assert file.pread(2**20, 0) == bad[:sound]
            assert (file.size(), file.is_linked()) == (len(bad), True)
            for offset in (sound, 5000, len(bad) - 1):
                with pytest.raises(Corrupt, match="is being repaired") as caught:
                    file.pread(1, offset)
                assert caught.value.offset == sound
            file.close()
            disk.check_reach(path, sound)
            with pytest.raises(Corrupt, match="is being repaired"):
                disk.check_reach(path, sound + 1)
            repairer.corrupt_files.record_valid_end(path, 8)
            with pytest.raises(Corrupt, match="is being repaired"):
                disk.open(path)
            disk.open(str(logs.file(SECOND))).close()
        assert logs.file(FIRST).read_bytes() == bad

    asyncio.run(main())
    assert sum("segment_corrupt" in one.getMessage() for one in caplog.records) == 1
    assert sum("segment_repair_failed" in one.getMessage() for one in caplog.records) == 1


@pytest.mark.slow
def test_nodes_with_corruption_at_different_offsets_repair_each_other(tmp_path: Path, pki: Path) -> None:
    """Each node serves the bytes before its own corruption. That is enough to repair a node with corruption
    at an earlier offset.
    """

    async def main() -> None:
        logs = Logs(tmp_path)
        places = [300, 30_000, 30_000]
        errors = [logs.damaged(FIRST, at, node) for node, at in enumerate(places)]
        async with AsyncExitStack() as opened:
            tls = tls_of(pki, "n1")
            menders: list[Repairer] = []
            endpoints: list[str] = []
            for number, node in enumerate(logs.nodes):
                others = [each for each in range(3) if each != number]

                async def fetch(
                    _directory: str, segment: SegmentId, aside: str, end: int, others: list[int] = others
                ) -> None:
                    asked = [endpoints[each] for each in others]
                    await fetch_segment(aside, WHOLE, segment, logs.firsts[segment], end, asked, tls)

                root = tmp_path / f"repairer{number}"
                repairer = await opened.enter_async_context(running(root, fetch))
                disk = VerifiedDisk(repairer.corrupt_files)
                node.pull = PullServicer(node, "s", node.pool, check_reach=disk.check_reach, disk=disk)
                endpoints.append(await opened.enter_async_context(node.serving(tls)))
                menders.append(repairer)
            for repairer, error in zip(menders, errors, strict=True):
                repairer.on_corrupt(error)
            await until(lambda: not any(len(repairer.corrupt_files) for repairer in menders))
        for node in logs.nodes:
            assert files_of(REAL, node.merged) == logs.good

    asyncio.run(main())


def test_segment_reported_corrupt_but_valid_is_served_again(tmp_path: Path) -> None:
    async def fetch(*_: object) -> None:
        raise AssertionError

    async def main() -> None:
        logs = Logs(tmp_path, 1)
        async with running(tmp_path, fetch) as repairer:
            repairer.on_corrupt(Corrupt("a hiccup", path=str(logs.file(FIRST)), offset=70))
            assert str(logs.file(FIRST)) in repairer.corrupt_files
            await until(is_sound(repairer))

    asyncio.run(main())


def test_repair_ends_once_its_directory_is_given_up(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    async def fetch(*_: object) -> None:
        raise RtError("nobody has it")

    def give_up(directory: str, tries: int) -> bool:
        told.append((directory, tries))
        return tries == 3

    async def main() -> None:
        logs = Logs(tmp_path, 1)
        error = logs.damaged()
        async with running(tmp_path, fetch, give_up=give_up) as repairer:
            repairer.on_corrupt(error)
            await until(is_sound(repairer))
        assert told == [(str(logs.path), tries) for tries in (1, 2, 3)]

    asyncio.run(main())


def test_repair_counts_no_try_while_peers_are_unreachable(tmp_path: Path) -> None:
    told: list[int] = []

    async def fetch(*_: object) -> None:
        raise Unreachable("nobody listens")

    def give_up(_directory: str, tries: int) -> bool:
        told.append(tries)
        return len(told) == 3

    async def main() -> None:
        logs = Logs(tmp_path, 1)
        error = logs.damaged()
        async with running(tmp_path, fetch, give_up=give_up) as repairer:
            repairer.on_corrupt(error)
            await until(is_sound(repairer))
        assert told == [0, 0, 0]

    asyncio.run(main())


def test_repairer_rejects_file_other_than_segment(tmp_path: Path) -> None:
    corrupt_files = CorruptFiles()
    assert not len(corrupt_files)

    async def main() -> None:
        async def fetch(*_: object) -> None:
            raise AssertionError

        async with running(tmp_path, fetch) as repairer:
            assert not repairer.on_corrupt(Corrupt("bad", path=str(tmp_path / "segments"), offset=0))

    asyncio.run(main())


# --- session copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, 3000])
def test_flipped_bit_in_session_replica_is_repaired_from_peer(tmp_path: Path, pki: Path, at: int) -> None:
    source = publish(REAL, 500, 600, 3000, 700, root=str(tmp_path), roll_bytes=1 << 20)

    def copy_to(path: Path) -> None:
        with_items = session_copy(REAL, str(path), source)
        give(with_items, items_of(REAL, source))
        with_items.record_synced(point := with_items.sync_point())
        if point is not None:
            with_items.sync_to(point)
        with_items.close()

    async def main() -> None:
        peer, mine = FakeNode(tmp_path / "peer"), tmp_path / "mine" / "1"
        copy_to(tmp_path / "peer" / "sessions" / "feed")
        copy_to(mine)
        good = files_of(REAL, str(mine))
        flip(mine / "log.0.0", at)
        identity, header = read_identity(REAL, source), read_header(REAL, source, FIRST)
        assert header is not None
        session = Session(1, "feed", identity.origin, None, active_runs=(OpenLife(0, header.run_id),))
        pool = ThreadPoolExecutor(4)
        sync = GroupCommit()
        replicas = SessionReplicas(
            str(tmp_path / "mine"),
            sync,
            pool,
            on_report=lambda _: None,
            on_durable=lambda: None,
            on_failed=lambda _: None,
            is_released=lambda _: False,
            on_corrupt=lambda _: None,
        )
        tls = tls_of(pki, "n1")
        async with peer.serving(tls) as endpoint:
            endpoints = [f"localhost:{free_port()}", endpoint]

            async def fetch(_directory: str, segment: SegmentId, aside: str, end: int) -> None:
                active = Run(0, header.run_id)
                await fetch_replica(replicas, aside, session, active, segment, end, "s", endpoints, tls)

            async with running(tmp_path, fetch) as repairer:
                with pytest.raises(Corrupt) as caught:
                    await replicas.open_replica(session)
                repairer.on_corrupt(caught.value)
                await until(is_sound(repairer))
                replica = await replicas.open_replica(session)
                assert files_of(REAL, replica.receiver.path) == good
                assert replica.unmerged == [FIRST]
                planted = tmp_path / "planted"
                planted.symlink_to(tmp_path / "peer", target_is_directory=True)
                with pytest.raises(LogNotFound, match="is a symbolic link"):
                    await replicas.open_aside(session, str(planted), FIRST)
                assert (
                    replica.end_of(0).chain
                    == replica.receiver.chain
                    == read_marks(REAL, source, FIRST)[-1].chain
                )
                flip(mine / "log.0.0", 3500)  # While the file is open.
                repairer.on_corrupt(Corrupt("it fails", path=str(mine / "log.0.0"), offset=64))
                await until(is_sound(repairer))
                assert files_of(REAL, replica.receiver.path) == good
        await replicas.close()
        await sync.close()
        pool.shutdown()

    asyncio.run(main())


# --- scrubbing --------------------------------------------------------------------------------------------


@asynccontextmanager
async def scrubbing(targets: list[ScrubTarget], found: list[Corrupt]) -> AsyncIterator[Scrubber]:
    pool = ThreadPoolExecutor(1)
    scrubber = Scrubber(lambda: targets, found.append, pool, bytes_s=1 << 30, round_s=0.001)
    task = asyncio.ensure_future(scrubber.run())
    try:
        yield scrubber
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
        pool.shutdown()


def test_scrubber_rereads_segments_and_reports_flipped_bit(tmp_path: Path) -> None:
    async def main() -> None:
        logs, found = Logs(tmp_path, 1), list[Corrupt]()
        targets = [ScrubTarget(str(logs.path), segment) for segment in (FIRST, SECOND)]
        async with scrubbing(targets, found) as scrubber:
            await until(lambda: scrubber.rounds >= 3)
            assert found == []
            logs.damaged(SECOND, 9000)
            await until(lambda: found)
        assert {one.path for one in found} == {str(logs.file(SECOND))}
        assert found[0].offset <= 9000

    asyncio.run(main())


@pytest.mark.parametrize("left", [0, 100, None])
def test_scrubber_reports_truncated_or_missing_segment(tmp_path: Path, left: int | None) -> None:
    async def main() -> None:
        logs, found = Logs(tmp_path, 1), list[Corrupt]()
        file = logs.file(FIRST)
        if left is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:left])
        async with scrubbing([ScrubTarget(str(logs.path), FIRST)], found):
            await until(lambda: found)
        assert {one.path for one in found} == {str(file)}

    asyncio.run(main())


def test_scrubber_ignores_unknown_segments_and_unsynced_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        logs, found = Logs(tmp_path, 1), list[Corrupt]()
        with logs.file(SECOND).open("ab") as file:
            file.write(b"half a block")
        targets = [ScrubTarget(str(logs.path), SegmentId(7, 7)), ScrubTarget(str(logs.path), SECOND)]
        async with scrubbing(targets, found) as scrubber:
            await until(lambda: scrubber.rounds >= 2)
        assert found == []

    asyncio.run(main())


def test_last_quarantine_is_found_among_directories_of_earlier_process(tmp_path: Path) -> None:
    kept = tmp_path / "damaged"
    assert _last_set_aside(str(kept)) == ("", 0)
    for name in ("7.200", "12.1000", "3.999", "notes.txt"):
        (kept / name).mkdir(parents=True)
    assert _last_set_aside(str(kept)) == (str(kept / "12.1000"), 1000)

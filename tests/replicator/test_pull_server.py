"""The pull server over loopback mTLS: whole, filtered and session pulls, and what it rejects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disks import MemoryDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from log_items import (
    COPY,
    FILTERED,
    MERGED,
    SESSION,
    WHOLE,
    files_of,
    give,
    items_of,
    messages,
    publish,
    recut,
)
from msgspec.structs import replace
from receiving_node import CLUSTER, FakeNode, make_pki, tls_of, until

import replicator.pull.server as server_module
import replicator.pull.source as source_module
import rt.log.disk as disk_module
from replicator.protocol.codec import (
    PULL_METHOD,
    PullReply,
    decode_pull_reply,
    encode_pull_request,
)
from replicator.protocol.handshake import (
    Acknowledged,
    HoldRejected,
    LogOutline,
    PullHello,
    PullMerged,
    PullProgress,
    PullRange,
    PullSession,
    PullStart,
)
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    PULLED_CHUNK_BYTES_MAX,
    Chunk,
    CompleteUpTo,
    Item,
    LogOffset,
    LogTrimmed,
    SegmentSealed,
)
from replicator.pull.memory_budget import BudgetGrant
from replicator.pull.negotiation import plan_filtered, plan_merged, plan_session
from replicator.pull.node_call import pull_channel
from replicator.pull.server import check_puller
from replicator.pull.source import PullSource, SourceOpener
from replicator.receive.batch_boundaries import read_marks
from replicator.receive.merged_receiver import MergedReceiver
from replicator.send.sender import Sender
from replicator.send.topic_filter import FilteredScan
from rt.errors import CertificateError, ClusterMismatch, Diverged, ProtocolViolation, RtError
from rt.log.check.verify import verify
from rt.log.disk import REAL, Disk
from rt.log.format.segment import SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_table
from rt.net.grpc_errors import Unreachable, asking
from rt.net.identity import Identity
from rt.testing.merged import MergedLogBuilder

# isort: split
import grpc.aio


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


class Grown:
    """A merged log that grows by rounds of two sessions' messages, one segment for each round."""

    def __init__(self, disk: Disk, root: str = "", path: str = MERGED) -> None:
        self.disk, self.root = disk, root or "/data"
        self.log = MergedLogBuilder(path, cluster_id=CLUSTER, stream="s", disk=disk)
        self.is_first = True

    def grow(self, *sizes: int, rolls: bool = True, **options: object) -> None:
        if rolls and not self.is_first:
            self.log.roll()
        self.is_first = False
        sessions = [
            publish(self.disk, *sizes, root=self.root, **options),
            publish(self.disk, *sizes[:2], root=self.root, name="other", **options),
        ]
        self.log.merge_all(sessions, block_bytes=2048)
        self.log.sync()


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def grown(disk: MemoryDisk) -> Grown:
    grown = Grown(disk)
    grown.grow(100, 2000, 300)
    grown.grow(50, 50)
    grown.grow(700, 20, 3000)
    return grown


# --- where a pull begins ----------------------------------------------------------------------------------


def known(receiver: MergedReceiver, **changes: Any) -> PullMerged:
    """What a receiver reports about its copy."""
    receiver.drop_unfinished()
    said = {
        "cluster": CLUSTER,
        "offset": receiver.next_offset,
        "end": receiver.end,
        "chain": receiver.last_checksum,
    }
    return PullMerged(**(said | changes))  # type: ignore[arg-type]


def whole_copy(disk: Disk, path: str = COPY) -> MergedReceiver:
    return MergedReceiver.open(path, WHOLE, disk=disk)


def test_new_copy_starts_with_segment_containing_its_position(disk: MemoryDisk, grown: Grown) -> None:
    table = read_table(disk, MERGED)
    assert table is not None
    first, second = table.segments
    begins = {
        "earliest": (LogOffset(0, 0, 0), 0),
        "latest": (LogOffset(0, 2, 0), second.end),
        0: (LogOffset(0, 0, 0), 0),
        first.end: (LogOffset(0, 1, 0), first.end),
        second.end - 1: (LogOffset(0, 1, 0), second.first),
        10**6: (LogOffset(0, 2, 0), second.end),
    }
    for position, expected in begins.items():
        assert plan_merged(disk, MERGED, PullMerged(position=position)) == expected  # type: ignore[arg-type]


def test_copy_resumes_at_its_end_only_if_its_last_block_matches(disk: MemoryDisk, grown: Grown) -> None:
    receiver = whole_copy(disk)
    for item in items_of(disk, MERGED):
        give(receiver, [item])
        if isinstance(item, Chunk):
            assert plan_merged(disk, MERGED, known(receiver)) == (receiver.next_offset, receiver.end)
    wanted = known(receiver)
    place = wanted.offset
    assert place is not None
    for changes in (
        {"chain": wanted.chain ^ 1},
        {"end": wanted.end + 1},
        {"offset": place._replace(offset=place.offset - 8)},
        {"offset": LogOffset(0, 1, 64), "chain": 5, "end": 5},
    ):
        with pytest.raises(Diverged, match=r"copy differs from .*: got .*, expected .*Move the copy away"):
            plan_merged(disk, MERGED, known(receiver, **changes))
    for changes in ({"offset": place._replace(offset=place.offset + 800)}, {"offset": LogOffset(0, 9, 64)}):
        with pytest.raises(Unreachable):
            plan_merged(disk, MERGED, known(receiver, **changes))
    receiver.close()


def test_copy_resumes_after_any_block_including_declaration(disk: MemoryDisk, grown: Grown) -> None:
    receiver = whole_copy(disk)
    seen = set()
    for item in recut(items_of(disk, MERGED), itertools.repeat(40)):
        give(receiver, [item])
        place, end, chain = receiver.next_offset, receiver.end, receiver.last_checksum
        if place is not None and place not in seen:
            seen.add(place)
            assert bool(chain) == (place.offset > 64)
            wanted = PullMerged(CLUSTER, place, end, chain)
            assert plan_merged(disk, MERGED, wanted) == (place, end)
    assert len(seen) > 12
    receiver.close()


def test_copy_ending_before_log_start_resumes_at_log_start(disk: MemoryDisk, grown: Grown) -> None:
    receiver = whole_copy(disk)
    give(receiver, items_of(disk, MERGED)[:1])
    grown.log.trim(SegmentId(0, 2))
    table = read_table(disk, MERGED)
    assert table is not None
    start = table.segments[-1].end
    assert plan_merged(disk, MERGED, known(receiver)) == (LogOffset(0, 2, 0), start)
    beginning, middle = plan_filtered(disk, MERGED, known(receiver, topics=("t1",)))
    assert (beginning, middle) == ((LogOffset(0, 2, 0), start), None)
    receiver.close()


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_copy_longer_than_node_in_earlier_epoch_raises_diverged(
    disk: MemoryDisk, grown: Grown, is_trimmed: bool
) -> None:
    """The copy followed a node that was lost. The cluster was forced to continue without that node, in the
    next run.
    """
    receiver = whole_copy(disk)
    give(receiver, items_of(disk, MERGED))
    other = Grown(disk, root="/other", path="/forced")
    other.grow(100, 2000, 300)
    fork = other.log.position
    other.log.roll(run=1)
    other.is_first = True
    other.grow(50, 50)
    other.grow(1000, 1000, 1000)
    if is_trimmed:
        other.log.trim(SegmentId(1, 1))
    place = LogOffset(0, 1, 64)
    for begin in (plan_merged, plan_filtered):
        for end in (fork + 1, fork + 3):
            with pytest.raises(Diverged, match=f"log.0 ends at position {fork}"):
                begin(disk, "/forced", known(receiver, topics=("t1",), offset=place, end=end))
    beginning, _ = plan_filtered(disk, "/forced", known(receiver, topics=("t1",), offset=place, end=fork))
    assert beginning.first >= fork
    receiver.close()


def test_pull_of_missing_log_raises_unreachable(disk: MemoryDisk) -> None:
    with pytest.raises(Unreachable):
        plan_merged(disk, "/nowhere", PullMerged())
    with pytest.raises(Unreachable):
        plan_session(disk, "/nowhere", PullSession(1))


def test_session_copy_is_checked_against_running_checksum(disk: MemoryDisk, grown: Grown) -> None:
    for segment in files_of(disk, SESSION):
        for mark in read_marks(disk, SESSION, segment):
            place = LogOffset(*segment, mark.offset)
            found = plan_session(disk, SESSION, PullSession(1, place, mark.chain))
            assert found == (place, mark.number)
            for wrong in (
                PullSession(1, place, mark.chain ^ 1),
                PullSession(1, LogOffset(*segment, mark.offset - 8), 1),
            ):
                with pytest.raises(Diverged):
                    plan_session(disk, SESSION, wrong)
    with pytest.raises(Unreachable):
        plan_session(disk, SESSION, PullSession(1, LogOffset(99, 0, 64), 1))


def damaged(disk: MemoryDisk, path: str, end: int) -> Iterator[MemoryDisk]:
    """Variants of the disk in which a file is cut, has zeros, or has a flipped bit, at a place before
    `end`.
    """
    good = disk.read(path)
    for place in range(0, end, 23):
        for worse in (good[:place], good[:place] + bytes(len(good) - place)):
            disk.write(path, worse)
            yield disk
        disk.write(path, good)
        disk.flip_bit(path, place, 3)
        yield disk
        disk.write(path, good)


def test_corrupt_merged_segment_of_node_never_raises_diverged(disk: MemoryDisk, grown: Grown) -> None:
    """The rest of the segment ends before the receiver does. Another node may have the whole segment."""
    receiver = whole_copy(disk)
    give(receiver, itertools.takewhile(lambda item: isinstance(item, Chunk), items_of(disk, MERGED)))
    wanted = known(receiver)
    assert wanted.offset is not None
    assert plan_merged(disk, MERGED, wanted) == (wanted.offset, wanted.end)
    found = Counter[str]()
    for each in damaged(disk, segment_path(MERGED, wanted.offset.segment), wanted.offset.offset):
        try:
            plan_merged(each, MERGED, wanted)
        except RtError as error:
            found[type(error).__name__] += 1
    assert found.keys() == {"Corrupt", "Unreachable"}  # An empty file was trimmed.
    assert found["Corrupt"] > wanted.offset.offset // 23
    receiver.close()


def test_corrupt_session_segment_of_node_never_raises_diverged(disk: MemoryDisk, grown: Grown) -> None:
    table = read_table(disk, SESSION)
    assert table is not None
    for segment in table.segments:
        end, found = read_marks(disk, SESSION, segment.id)[-1], Counter[str]()
        place = LogOffset(*segment.id, end.offset)
        for each in damaged(disk, segment_path(SESSION, segment.id), end.offset):
            try:
                plan_session(each, SESSION, PullSession(1, place, end.chain))
            except RtError as error:
                found[type(error).__name__] += 1
        assert found.keys() == {"Corrupt", "Unreachable"}


def test_session_pull_needs_node_role_and_name_needs_matching_certificate() -> None:
    node, sub = Identity("s", "node", "n2"), Identity("s", "subscriber", "sub")
    check_puller(node, PullHello("s", PullSession(1)), "s")
    check_puller(sub, PullHello("s", PullMerged(name="sub")), "s")
    check_puller(Identity("s", "operator", "op"), PullHello("s", PullMerged()), "s")
    for identity, log in (
        (sub, PullSession(1)),
        (Identity("s", "operator", "op"), PullSession(1)),
        (sub, PullMerged(name="sub2")),
        (Identity("s", "publisher", "feed"), PullMerged()),
        (sub, PullMerged(acknowledged=Acknowledged("sub2", 0))),
        (node, PullMerged(acknowledged=Acknowledged("n2", 0))),
        (Identity("s", "operator", "op"), PullMerged(acknowledged=Acknowledged("op", 0))),
    ):
        with pytest.raises(CertificateError):
            check_puller(identity, PullHello("s", log), "s")
    with pytest.raises(ClusterMismatch, match="`rt certs show` names its stream"):
        check_puller(sub, PullHello("t", PullMerged()), "s")


# --- filtered ---------------------------------------------------------------------------------------------


def filtered_items(disk: Disk, wanted: PullMerged, *, limit: int = 1 << 20) -> tuple[PullStart, list[Item]]:
    """Return everything that a node sends for a filtered log."""

    class Logs:
        cluster, epoch, node, merged = CLUSTER, 0, "n1", MERGED

        def session(self, session_id: int) -> str:
            raise AssertionError(session_id)

    source = SourceOpener(Logs(), disk, lambda *_: None).open(wanted)  # type: ignore[arg-type]
    found: list[Item] = []
    while True:
        items = source.items(BudgetGrant(limit, CHUNK_BYTES_MAX))
        found += items
        if source.is_idle and not items:
            source.sender.close()
            return source.start, found


def dumb_filter(disk: Disk, topics: Iterable[str]) -> list[tuple[int, str, bytes]]:
    wanted = set(topics)
    return [
        message for message in messages(MERGED, disk) if any(fnmatchcase(message[1], one) for one in wanted)
    ]


@settings(max_examples=25)
@given(
    rounds=st.lists(st.lists(st.integers(0, 2500), min_size=1, max_size=6), min_size=1, max_size=3),
    topics=st.sets(st.sampled_from(["t0", "t1", "t2", "none", "t[01]", "?2", "n*"]), min_size=1),
    stops=st.lists(st.integers(0, 12), max_size=3),
    compression=st.sampled_from([None, "zstd"]),
)
def test_filtered_copy_has_exactly_messages_of_its_topics_after_any_interruptions(
    rounds: list[list[int]], topics: set[str], stops: list[int], compression: str | None
) -> None:
    disk = MemoryDisk()
    grown = Grown(disk)
    names = tuple(sorted(topics))
    receiver = MergedReceiver.open(COPY, FILTERED, disk=disk)
    for index, sizes in enumerate(rounds):
        grown.grow(*sizes, compression=compression)
        for stop in [*stops, None]:
            place = receiver.next_offset
            wanted = known(receiver, topics=names) if place else PullMerged(topics=names)
            start, items = filtered_items(disk, wanted)
            receiver.start_at(start.offset, start.first)
            give(receiver, items[:stop])
            if index % 2:
                if receiver.sync_point():
                    receiver.writer.sync()
                receiver.close()
                receiver = MergedReceiver.open(COPY, FILTERED, disk=disk)
    assert receiver.end == grown.log.position
    receiver.close()
    grown.log.close()
    assert messages(COPY, disk, topics=names) == dumb_filter(disk, topics)
    assert verify(COPY, disk=disk).damage == []


def test_filtered_copy_follows_growing_log_and_records_complete_position(disk: MemoryDisk) -> None:
    grown = Grown(disk)
    grown.grow(10, 10)
    with contextlib.closing(Sender(MERGED, LogOffset(0, 0, 0), disk=disk)) as sender:
        filtering = FilteredScan(["t2"], scanner=None, header=None, offset=None, end=0)
        receiver = MergedReceiver.open(COPY, FILTERED, disk=disk)

        def step() -> list[Item]:
            items = filtering.items(sender.items())
            give(receiver, items)
            return items

        assert [type(item) for item in step()] == [Chunk]
        assert receiver.end == 0
        assert step() == [CompleteUpTo(4)]
        assert step() == []
        assert receiver.end == 4
        grown.grow(10, 10, 10, rolls=False)
        step()
        step()
        assert receiver.end == grown.log.position
        assert [message[1] for message in messages(COPY, disk)] == ["t2"] * len(dumb_filter(disk, ["t2"]))
        receiver.close()
        receiver = MergedReceiver.open(COPY, FILTERED, disk=disk)
        receiver.close()


def test_filtered_pull_reports_progress_while_no_message_matches(disk: MemoryDisk) -> None:
    """Otherwise a receiver would see no progress while only other topics arrive, and would keep the log from
    being trimmed.
    """
    grown = Grown(disk)
    grown.grow(*[100] * 50, rolls=False)
    with contextlib.closing(Sender(MERGED, LogOffset(0, 0, 0), disk=disk)) as sender:
        filtering = FilteredScan(["none"], scanner=None, header=None, offset=None, end=0)
        ends = list[int]()
        while items := sender.items(1, chunk_bytes=4096):
            ends += [item.position for item in filtering.items(items) if isinstance(item, CompleteUpTo)]
    assert len(ends) > 1
    assert ends == sorted(set(ends))
    assert ends[-1] == grown.log.position


def test_filtered_pull_reports_trim_of_log(disk: MemoryDisk, grown: Grown) -> None:
    grown.log.trim(SegmentId(0, 1))
    start, items = filtered_items(disk, PullMerged(topics=("t1",)))
    assert start.offset == LogOffset(0, 1, 0)
    assert isinstance(items[0], LogTrimmed)
    receiver = MergedReceiver.open(COPY, FILTERED, disk=disk)
    receiver.start_at(start.offset, start.first)
    give(receiver, items)
    assert sorted(files_of(disk, COPY)) == [SegmentId(0, 1), SegmentId(0, 2)]
    receiver.close()


def test_filtered_copy_starts_with_whole_segment_containing_its_position(
    disk: MemoryDisk, grown: Grown
) -> None:
    """Otherwise a reader with an earlier position would miss messages, and no gap would show it."""
    everything = dumb_filter(disk, ["t1"])
    start, items = filtered_items(disk, PullMerged(topics=("t1",), position=3))
    receiver = MergedReceiver.open(COPY, FILTERED, disk=disk)
    receiver.start_at(start.offset, start.first)
    give(receiver, items)
    receiver.close()
    assert everything[0][0] < 3
    assert messages(COPY, disk) == everything


# --- over the wire ----------------------------------------------------------------------------------------


class Puller:
    """A pull client controlled by the test."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def ask(self, log: PullMerged | PullSession, stream: str = "s") -> None:
        # A later read reports the error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(encode_pull_request(PullHello(stream, log)))

    async def hear(self) -> PullReply:
        with asking("node"):
            data = await asyncio.wait_for(self.call.read(), 120)
            if not isinstance(data, bytes):
                await self.call
            assert isinstance(data, bytes), "it ended well"
        return decode_pull_reply(data)

    async def hear_until(self, end: LogOffset) -> list[Item]:
        found: list[Item] = []
        while not (found and isinstance(found[-1], Chunk) and found[-1].end == end):
            answer = await self.hear()
            assert not isinstance(answer, PullStart)
            found.append(answer)
        return found

    async def failure(self) -> RtError:
        with pytest.raises(RtError) as caught:
            while True:
                await self.hear()
        return caught.value


@asynccontextmanager
async def puller_of(endpoint: str, pki: Path, name: str = "sub") -> AsyncIterator[Puller]:
    async with pull_channel(endpoint, tls_of(pki, name)) as channel:
        call = channel.get().stream_stream(PULL_METHOD)()
        try:
            yield Puller(call)
        finally:
            call.cancel()


def end_of(path: str) -> LogOffset:
    segment, content = max(files_of(REAL, path).items())
    return LogOffset(*segment, len(content))


def test_pull_receives_log_and_later_merged_messages(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(100, 2000, 300)
        async with node.serving(tls_of(pki, "n1")) as endpoint, puller_of(endpoint, pki) as puller:
            await puller.ask(PullMerged(name="sub"))
            start = await puller.hear()
            assert isinstance(start, PullStart)
            assert replace(start, end=0) == PullStart(CLUSTER, 0, "n1", LogOffset(0, 0, 0), 0)
            assert start.end == messages(node.merged)[-1][0] + 1
            receiver = whole_copy(REAL, str(tmp_path / "copy"))
            give(receiver, await puller.hear_until(end_of(node.merged)))
            for sizes in ([10, 10], [700_000, 2_000_000]):
                grown.grow(*sizes)
                give(receiver, await puller.hear_until(end_of(node.merged)))
            assert files_of(REAL, receiver.path) == files_of(REAL, node.merged)
            (pull,) = node.pull.pulls.values()
            await puller.call.write(encode_pull_request(PullProgress(receiver.end, True)))
            await until(lambda: pull.progress == PullProgress(receiver.end, True))
            assert pull.identity.name == "sub"
            assert pull.sent_bytes == sum(map(len, files_of(REAL, node.merged).values()))
            receiver.close()
            puller.call.cancel()
            await until(lambda: node.pull.pulls == {})
        grown.log.close()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "largest"), [("sub", PULLED_CHUNK_BYTES_MAX), ("n1", CHUNK_BYTES_MAX)])
def test_subscriber_receives_larger_chunks_than_node(
    tmp_path: Path, pki: Path, name: str, largest: int
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(*[2**20] * 6)
        async with node.serving(tls_of(pki, "n1")) as endpoint, puller_of(endpoint, pki, name) as puller:
            await puller.ask(PullMerged())
            await puller.hear()
            found = await puller.hear_until(end_of(node.merged))
        sizes = [len(item.data) for item in found if isinstance(item, Chunk)]
        assert largest // 2 < max(sizes) <= largest
        grown.log.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["recent", "old", "costly", "not in memory"])
def test_recently_merged_cached_bytes_are_read_in_event_loop_if_quick(
    tmp_path: Path, pki: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "old":
        monkeypatch.setattr(source_module, "RECENT_BYTES", 0)
    monkeypatch.setattr(disk_module._RealFile, "is_cached", lambda *_: how != "not in memory")
    monkeypatch.setattr(server_module, "LOOP_S_MAX", -1.0 if how == "costly" else 3600.0)
    threads: list[str] = []
    read = PullSource.items

    def record(self: PullSource, grant: BudgetGrant) -> list[Item | LogOutline]:
        items = read(self, grant)
        if sum(len(item.data) for item in items if isinstance(item, Chunk)) >= server_module.TAIL_BYTES:
            threads.append(threading.current_thread().name)
        return items

    monkeypatch.setattr(PullSource, "items", record)

    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(*[2**20] * 16)
        async with node.serving(tls_of(pki, "n1")) as endpoint, puller_of(endpoint, pki) as puller:
            await puller.ask(PullMerged())
            await puller.hear()
            await puller.hear_until(end_of(node.merged))
        grown.log.close()

    asyncio.run(main())
    is_in_loop = [name == threading.main_thread().name for name in threads]
    assert len(is_in_loop) >= 3
    assert sum(is_in_loop) == {"recent": len(is_in_loop) - 1, "costly": 1}.get(how, 0)


def test_session_pull_of_node_receives_whole_session(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        source = publish(REAL, 2000, 2000, 2000, root=str(tmp_path / "source"))
        path = tmp_path / "node" / "sessions" / "feed"
        path.parent.mkdir(parents=True)
        Path(source).rename(path)
        async with node.serving(tls_of(pki, "n1")) as endpoint, puller_of(endpoint, pki, "n1") as puller:
            await puller.ask(PullSession(1))
            start = await puller.hear()
            assert isinstance(start, PullStart)
            assert (start.session, start.first) == ("feed", 0)
            items = await puller.hear_until(end_of(str(path)))
            sent = b"".join(bytes(item.data) for item in items if isinstance(item, Chunk))
            assert sent == b"".join(content for _, content in sorted(files_of(REAL, str(path)).items()))
            assert any(isinstance(item, SegmentSealed) for item in items)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "log", "error"),
    [
        ("sub", PullSession(1), CertificateError),
        ("feed", PullMerged(), CertificateError),
        ("sub", PullMerged(name="another"), CertificateError),
        ("sub", PullMerged(cluster=bytes(16), offset=LogOffset(0, 0, 64)), ClusterMismatch),
        ("sub", PullMerged(cluster=CLUSTER, offset=LogOffset(0, 0, 64), end=7), Diverged),
        ("sub", PullMerged(cluster=CLUSTER, offset=LogOffset(7, 0, 64)), Unreachable),
    ],
)
def test_unauthorized_or_mismatched_pull_is_rejected_with_its_error(
    tmp_path: Path, pki: Path, name: str, log: PullMerged | PullSession, error: type[RtError]
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(10, 10)
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            refusal: RtError = Unreachable("Internal error from Core")
            # gRPC reports this if a write meets the end of the call.
            while "Internal error from Core" in refusal.what:
                async with puller_of(endpoint, pki, name) as puller:
                    await puller.ask(log)
                    refusal = await puller.failure()
            assert isinstance(refusal, error)
        grown.log.close()

    asyncio.run(main())


def test_second_hello_raises_protocol_violation(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(10, 10)
        async with node.serving(tls_of(pki, "n1")) as endpoint, puller_of(endpoint, pki) as puller:
            await puller.ask(PullMerged())
            await puller.ask(PullMerged())
            assert isinstance(await puller.failure(), ProtocolViolation)
        grown.log.close()

    asyncio.run(main())


def test_hold_rejection_is_sent_only_to_its_subscriber(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(10, 10)
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            puller_of(endpoint, pki) as sub,
            puller_of(endpoint, pki, "n1") as peer,
        ):
            for puller in (sub, peer):
                await puller.ask(PullMerged(offset=None))
                assert isinstance(await puller.hear(), PullStart)
            node.pull.refuse_hold("other", "no room")
            node.pull.refuse_hold("n1", "no room")
            node.pull.refuse_hold("sub", "no room")  # The rejection arrives although the copies are complete.
            while not isinstance(heard := await sub.hear(), HoldRejected):
                pass
            assert heard == HoldRejected("sub", "no room")
            grown.grow(10)
            while not isinstance(heard := await peer.hear(), Chunk) or heard.start.offset == 0:
                assert not isinstance(heard, HoldRejected)
        grown.log.close()

    asyncio.run(main())


def test_acknowledgement_in_hello_or_later_is_accepted_only_for_own_name(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(10, 10)
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            async with puller_of(endpoint, pki) as puller:
                await puller.ask(PullMerged(name="sub", acknowledged=Acknowledged("sub", 1)))
                await puller.hear()
                assert node.acknowledged == [("sub", 1)]
                await puller.call.write(encode_pull_request(Acknowledged("sub", 3)))
                await until(lambda: node.acknowledged == [("sub", 1), ("sub", 3)])
                await puller.call.write(encode_pull_request(Acknowledged("other", 4)))
                assert isinstance(await puller.failure(), CertificateError)
            async with puller_of(endpoint, pki, "n1") as puller:
                await puller.ask(PullMerged())
                await puller.hear()
                await puller.call.write(encode_pull_request(Acknowledged("n1", 5)))
                assert isinstance(await puller.failure(), CertificateError)
        assert len(node.acknowledged) == 2
        grown.log.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "copy",
    [
        PullMerged(cluster=bytes(16), offset=LogOffset(0, 0, 64)),
        PullMerged(cluster=CLUSTER, offset=LogOffset(0, 0, 64), end=7),
        PullMerged(cluster=CLUSTER, offset=LogOffset(7, 0, 64)),
        PullMerged(cluster=bytes(16), position=0, range=PullRange(9)),
    ],
    ids=["another cluster", "other messages", "a later line", "a range of another cluster"],
)
def test_acknowledgement_of_mismatched_copy_moves_no_hold(
    tmp_path: Path, pki: Path, copy: PullMerged
) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(10, 10)
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            async with puller_of(endpoint, pki) as puller:
                await puller.ask(replace(copy, name="sub", acknowledged=Acknowledged("sub", 1000)))
                await puller.failure()
            assert node.acknowledged == []
            async with puller_of(endpoint, pki) as puller:
                await puller.ask(PullMerged(name="sub", acknowledged=Acknowledged("sub", 0)))
                await puller.hear()
            assert node.acknowledged == [("sub", 0)]
        grown.log.close()

    asyncio.run(main())


def test_concurrent_pulls_share_one_watch_and_all_receive_new_bytes(tmp_path: Path, pki: Path) -> None:
    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        grown = Grown(REAL, str(tmp_path / "source"), node.merged)
        grown.grow(10, 10)
        async with (
            node.serving(tls_of(pki, "n1")) as endpoint,
            pull_channel(endpoint, tls_of(pki, "sub")) as channel,
        ):
            pullers = [Puller(channel.get().stream_stream(PULL_METHOD)()) for _ in range(40)]
            for puller in pullers:
                await puller.ask(PullMerged())
                await puller.hear()
                await puller.hear_until(end_of(node.merged))
            grown.grow(10, 10, rolls=False)
            end = end_of(node.merged)
            await asyncio.gather(*(puller.hear_until(end) for puller in pullers))
            assert len(node.pull._hub._watched) == 1
            for puller in pullers:
                puller.call.cancel()
            await until(lambda: not node.pull._hub._watched)
        grown.log.close()

    asyncio.run(main())


def test_pull_cancelled_before_hold_confirmation_leaves_no_state() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def confirm(_: str) -> None:
            asked.set()
            await asyncio.Event().wait()

        reader = Identity("s", "subscriber", "u")
        logs = SimpleNamespace(cluster=CLUSTER)
        servicer = server_module.PullServicer(
            *(logs, "s", ThreadPoolExecutor(1)), identify=lambda: reader, confirm_hold=confirm
        )
        log = PullMerged(name="u", acknowledged=Acknowledged("u", 5), position=5, range=PullRange(9))
        context = Context(encode_pull_request(PullHello("s", log)))
        pulling = asyncio.create_task(servicer.pull(None, context))
        await asked.wait()
        assert len(servicer.pulls) == 1
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)
        context.end()
        assert servicer.pulls == {}
        assert servicer.budget.used_bytes == 0

    class Context:
        """A call whose hello has come."""

        def __init__(self, hello: bytes) -> None:
            self._hello = hello
            self._callbacks: list[Any] = []

        async def read(self) -> bytes:
            return self._hello

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def add_done_callback(self, callback: Any) -> None:
            self._callbacks.append(callback)

        def end(self) -> None:
            for callback in self._callbacks:
                callback(self)

    asyncio.run(main())

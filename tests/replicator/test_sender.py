"""Senders: their items equal the files, while the writer appends, restarts, rolls and trims."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from disks import MemoryDisk
from hypothesis import given, settings
from hypothesis import strategies as st

import rt
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    Chunk,
    Item,
    LogOffset,
    LogTrimmed,
    Run,
    SegmentSealed,
)
from replicator.send.read_cache import ReadCache
from replicator.send.sender import Sender
from rt.log.disk import Disk
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import SegmentTable, TrimReason, encode_table
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_durable_end, read_header, read_table
from rt.log.whole_files import write_whole
from rt.testing.merged import MergedLogBuilder

ROOT = "/data"
DIRECTORY = "/data/s/sessions/feed"
MERGED = "/merged"
CLUSTER = bytes(range(16))


class Received:
    """A receiver that accepts everything and checks the order of the items."""

    def __init__(self, at: LogOffset | None = None) -> None:
        self.segments: dict[SegmentId, bytes] = defaultdict(bytes)
        self.sealed: dict[SegmentId, SegmentSealed] = {}
        self.lives: dict[int, bytes] = {}
        self.trimmed: list[LogTrimmed] = []
        self.place = at

    def take(self, items: Iterable[Item]) -> Received:
        for item in items:
            match item:
                case Chunk(place, data):
                    assert 0 < len(data) <= CHUNK_BYTES_MAX
                    assert self.place is None or place == self.place or place.offset == 0
                    assert place.segment not in self.sealed
                    self.segments[place.segment] += bytes(data)
                    self.place = item.end
                case SegmentSealed(place, _, _, _):
                    assert self.place is None or place == self.place or place.segment not in self.segments
                    known = self.sealed.get(place.segment)
                    assert known is None or (not known.is_last_of_run and item.is_last_of_run)
                    self.sealed[place.segment] = item
                    self.place = LogOffset(place.run, place.roll + 1, 0)
                case Run(x, life):
                    assert x not in self.lives
                    assert not [segment for segment in self.segments if segment.run >= x]
                    self.lives[x] = life
                case LogTrimmed():
                    self.trimmed.append(item)
        return self


def drained(sender: Sender, into: Received | None = None, *, size: int = CHUNK_BYTES_MAX) -> Received:
    received = into or Received()
    while items := sender.items(size):
        received.take(items)
    return received


def sender_of(
    disk: Disk, path: str = DIRECTORY, start: LogOffset | None = None, **options: ReadCache
) -> Sender:
    return Sender(path, start, disk=disk, **options)


def files_of(disk: Disk, path: str = DIRECTORY) -> dict[SegmentId, bytes]:
    content = {}
    for segment in list_segments(disk, path):
        file = disk.open(segment_path(path, segment))
        if file.size():
            content[segment] = file.pread(file.size(), 0)
        file.close()
    return content


def publisher_on(disk: MemoryDisk, **options: object) -> rt.Publisher:
    settings = {"linger_ms": 60_000, "fsync": "never", "roll_bytes": 4096} | options
    return rt.Publisher(ROOT, "s", publisher_id="feed", disk=disk, **settings)  # type: ignore[arg-type]


def published(disk: MemoryDisk, *sizes: int, **options: object) -> None:
    """Publish one run with a batch for each of `sizes`."""
    with publisher_on(disk, **options) as publisher:
        for size in sizes:
            publisher.publish(os.urandom(size))
            publisher.flush()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(st.integers(0, 3000), min_size=1, max_size=5)),
        st.tuples(st.just("restart"), st.just([])),
        st.tuples(st.just("take"), st.lists(st.integers(1, 5000), min_size=1, max_size=3)),
    ),
    max_size=12,
)


@given(steps)
def test_sender_items_equal_files_after_any_publisher_steps(
    script: list[tuple[str, list[int]]],
) -> None:
    disk = MemoryDisk()
    publisher = publisher_on(disk)
    sender, received = sender_of(disk), Received()
    for step, sizes in script:
        match step:
            case "publish":
                for size in sizes:
                    publisher.publish(bytes([size % 251]) * size)
                    publisher.flush()
            case "restart":
                publisher.close()
                publisher = publisher_on(disk)
            case "take":
                for size in sizes:
                    received.take(sender.items(size))
    drained(sender, received)
    files, table = files_of(disk), read_table(disk, DIRECTORY)
    assert table is not None
    assert received.segments == files
    assert [*received.sealed] == [entry.id for entry in table.segments]
    for entry in table.segments:
        sealed = received.sealed[entry.id]
        assert (sealed.end_offset.offset, sealed.end) == (entry.size_bytes, entry.end)
        assert sealed.is_last_of_run == (SegmentId(entry.id.run, entry.id.roll + 1) not in files)
    assert received.lives == {segment.run: run_of(disk, segment) for segment in files}
    publisher.close()


def run_of(disk: Disk, segment: SegmentId) -> bytes:
    header = read_header(disk, DIRECTORY, segment)
    assert header is not None
    return header.run_id


@settings(max_examples=15)
@given(st.lists(st.integers(0, 2500), min_size=1, max_size=8), st.data())
def test_sender_may_start_at_any_batch_boundary(sizes: list[int], data: st.DataObject) -> None:
    disk = MemoryDisk()
    published(disk, *sizes)
    published(disk, *sizes[:2])
    whole = sender_of(disk)
    places: list[LogOffset] = []
    items: list[list[Item]] = []
    while some := whole.items(1):
        places.append(whole.next_offset)
        items.append(some)
    index = data.draw(st.integers(0, len(places) - 1))
    rest = drained(sender_of(disk, start=places[index]), Received(places[index]))
    joined: dict[SegmentId, bytes] = defaultdict(bytes)
    for received in (Received().take(itertools.chain(*items[: index + 1])), rest):
        for segment, content in received.segments.items():
            joined[segment] += content
    assert joined == files_of(disk)


def test_half_written_batch_is_not_sent_until_complete() -> None:
    disk = MemoryDisk()
    published(disk, 100, 200, roll_bytes=2**20)
    whole = files_of(disk)[SegmentId(0, 0)]
    path = segment_path(DIRECTORY, SegmentId(0, 0))
    disk.remove(f"{DIRECTORY}/durable")
    file = disk.open(path, write=True)
    for cut in range(SEGMENT_HEADER_BYTES, len(whole), 37):
        file.truncate(0)
        file.pwritev([whole[:cut]], 0)
        sender, received = sender_of(disk), Received()
        drained(sender, received)
        got = received.segments[SegmentId(0, 0)]
        assert whole.startswith(got)
        file.pwritev([bytes(len(whole) - cut)], cut)  # The file has its size before its content.
        drained(sender, received)
        file.pwritev([whole[cut:]], cut)
        assert drained(sender, received).segments[SegmentId(0, 0)] == whole


def test_corrupt_durable_bytes_raise_corrupt_after_valid_bytes_are_sent() -> None:
    disk = MemoryDisk()
    publisher = publisher_on(disk, roll_bytes=2**20)
    for size in (100, 200, 300):
        publisher.publish(bytes(size))
        publisher.flush()
    path = segment_path(DIRECTORY, SegmentId(0, 0))
    durable = read_durable_end(disk, DIRECTORY)
    assert durable is not None
    file = disk.open(path, write=True)
    file.pwritev([b"\xff"], durable.offset - 20)
    sender, received = sender_of(disk), Received()
    with pytest.raises(rt.Corrupt) as caught:
        drained(sender, received)
    assert received.place is not None
    assert (caught.value.path, caught.value.offset) == (path, received.place.offset)
    file.pwritev([b"\x00"], durable.offset - 20)
    assert drained(sender, received).segments == files_of(disk)
    publisher.close()


def test_flipped_bit_in_sealed_segment_raises_corrupt() -> None:
    disk = MemoryDisk()
    published(disk, 3000, 3000)
    file = disk.open(segment_path(DIRECTORY, SegmentId(0, 0)), write=True)
    file.pwritev([b"\xff\xfe"], 500)
    with pytest.raises(rt.Corrupt):
        drained(sender_of(disk))


def test_frame_larger_than_chunk_is_split_and_sent_only_when_complete() -> None:
    disk = MemoryDisk()
    published(disk, 3 * CHUNK_BYTES_MAX + 5, 10, roll_bytes=2**30)
    whole = files_of(disk)[SegmentId(0, 0)]
    received = drained(sender_of(disk))
    assert received.segments[SegmentId(0, 0)] == whole
    disk.remove(f"{DIRECTORY}/durable")
    disk.open(segment_path(DIRECTORY, SegmentId(0, 0)), write=True).truncate(2 * CHUNK_BYTES_MAX)
    assert drained(sender_of(disk)).segments[SegmentId(0, 0)] == whole[:SEGMENT_HEADER_BYTES]


def test_small_batches_share_chunk() -> None:
    disk = MemoryDisk()
    published(disk, *[10] * 200, roll_bytes=2**30)
    chunks = [item for item in sender_of(disk).items(2**30) if isinstance(item, Chunk)]
    assert len(chunks) == 2  # The header, and the rest.


def test_chunks_of_merged_log_are_nearly_full_and_end_at_block_ends() -> None:
    disk = MemoryDisk()
    merged_on(disk, *[200_000] * 40).merge_all([DIRECTORY], block_bytes=200_000)
    chunks = [item for item in Sender(MERGED, None, disk=disk).items(2**30) if isinstance(item, Chunk)]
    assert all(len(chunk.data) >= CHUNK_BYTES_MAX * 3 // 4 for chunk in chunks[1:-1])
    each = Sender(MERGED, None, disk=disk).items(2**30, chunk_bytes=201_000)
    block_ends = set(itertools.accumulate(len(one.data) for one in each if isinstance(one, Chunk)))
    assert {chunk.end.offset for chunk in chunks} <= block_ends


def test_start_within_batch_raises_diverged() -> None:
    disk = MemoryDisk()
    published(disk, 100, 100)
    for offset in (8, SEGMENT_HEADER_BYTES + 8, SEGMENT_HEADER_BYTES + 64):
        with pytest.raises(rt.Diverged):
            sender_of(disk, start=LogOffset(0, 0, offset)).items()


def test_start_beyond_available_bytes_sends_no_items_until_they_arrive() -> None:
    disk = MemoryDisk()
    with publisher_on(disk, roll_bytes=2**20) as publisher:
        publisher.publish(bytes(100))
        publisher.flush()
        end = drained(sender_of(disk)).place
        publisher.publish(bytes(50))
        publisher.flush()
        further = drained(sender_of(disk)).place
        assert end is not None
        assert further is not None
    content = files_of(disk)[SegmentId(0, 0)]
    file = disk.open(segment_path(DIRECTORY, SegmentId(0, 0)), write=True)
    file.truncate(end.offset)
    sender = sender_of(disk, start=further)
    assert sender.items() == []
    file.pwritev([content[end.offset :]], end.offset)
    assert [type(item) for item in sender.items()] == [Run]
    assert sender_of(disk, start=LogOffset(7, 0, 0)).items() == []


def test_receiver_with_bytes_after_sealed_end_gets_seal_and_next_run() -> None:
    disk = MemoryDisk()
    published(disk, 100)
    published(disk, 100)
    end = len(files_of(disk)[SegmentId(0, 0)])
    items = sender_of(disk, start=LogOffset(0, 0, end + 800)).items()
    assert [type(item) for item in items] == [Run, SegmentSealed, Run, Chunk, Chunk]
    assert isinstance(items[1], SegmentSealed)
    assert (items[1].end_offset, items[1].is_last_of_run) == (LogOffset(0, 0, end), True)


def test_session_with_lost_table_continues_at_next_run_after_run_was_deleted() -> None:
    disk = MemoryDisk()
    published(disk, 100)
    end = len(files_of(disk)[SegmentId(0, 0)])
    with publisher_on(disk) as publisher:
        publisher._log.writer.trim(SegmentId(1, 0), TrimReason.MERGED)
    disk.remove(f"{DIRECTORY}/segments")
    published(disk, 100)
    table = read_table(disk, DIRECTORY)
    assert table is not None
    assert table.segments[0].reason is TrimReason.LOST
    received = drained(sender_of(disk, start=LogOffset(0, 0, end)))
    assert received.segments == files_of(disk)
    assert 0 not in received.lives, "its run id is unknown: a node would take it for another publisher"


def test_session_with_trimmed_start_continues_at_oldest_kept_segment() -> None:
    disk = MemoryDisk()
    published(disk, 3000, 3000, 3000, 3000)
    publisher = publisher_on(disk)
    size = len(files_of(disk)[SegmentId(0, 0)])
    publisher._log.writer.trim(SegmentId(0, 2), TrimReason.MERGED)
    assert drained(sender_of(disk, start=LogOffset(0, 0, SEGMENT_HEADER_BYTES))).segments == files_of(disk)
    assert drained(sender_of(disk)).segments == files_of(disk)
    at_its_end = drained(sender_of(disk, start=LogOffset(0, 0, size)))
    assert at_its_end.segments == files_of(disk)
    assert next(iter(at_its_end.sealed)) == SegmentId(0, 0)
    publisher.close()


def test_session_trimmed_while_sending_continues_after_trim() -> None:
    disk = MemoryDisk()
    published(disk, 1000, 1000, 3000, 3000)
    publisher = publisher_on(disk)
    sender = sender_of(disk)
    sender.items(SEGMENT_HEADER_BYTES + 1000)
    publisher._log.writer.trim(SegmentId(0, 2), TrimReason.MERGED)
    kept = files_of(disk)
    assert {**drained(sender).segments} == kept
    publisher.close()


def test_trimmed_segment_not_yet_emptied_gets_no_seal() -> None:
    disk = MemoryDisk()
    published(disk, 1000, 1000, 3000, 3000)
    published(disk, 10)
    sender, received = sender_of(disk), Received()
    received.take(sender.items(1))
    table = read_table(disk, DIRECTORY)
    assert table is not None
    first, *others = table.segments
    trimmed = SegmentTable(table.identity, (first.trimmed(TrimReason.MERGED, 1), *others))
    write_whole(disk, f"{DIRECTORY}/segments", encode_table(trimmed))
    disk.open(segment_path(DIRECTORY, first.id), write=True).pwritev([b"\xff" * 100], first.size_bytes - 100)
    drained(sender, received)
    assert first.id not in received.sealed
    assert [*received.sealed] == [entry.id for entry in others]


def test_missing_segment_without_trim_raises_corrupt() -> None:
    disk = MemoryDisk()
    published(disk, 3000, 3000, 3000)
    disk.remove(segment_path(DIRECTORY, SegmentId(0, 1)))
    with pytest.raises(rt.Corrupt, match="missing"):
        drained(sender_of(disk))


def test_directory_without_log_raises_log_not_found(tmp_path: Path) -> None:
    with pytest.raises(rt.LogNotFound):
        Sender(tmp_path, None)
    with pytest.raises(rt.LogNotFound):
        Sender(tmp_path / "missing", None)


def test_senders_with_shared_cache_read_once_and_send_same_segments() -> None:
    disk = MemoryDisk()
    published(disk, *[50_000] * 100, roll_bytes=2**22)
    shared = ReadCache(bytes_max=2**24)
    first = drained(sender_of(disk, shared=shared))
    reads = dict(shared._reads)
    second = drained(sender_of(disk, shared=shared))
    assert first.segments == second.segments == files_of(disk)
    assert shared._reads == reads
    late = sender_of(disk, start=_second_boundary(disk), shared=shared)
    drained(late, Received(_second_boundary(disk)))
    assert len(shared._reads) <= len(reads) + 1  # From the next grid line on it shares the others' reads.


def _second_boundary(disk: MemoryDisk) -> LogOffset:
    return LogOffset(0, 0, SEGMENT_HEADER_BYTES + first_batch_bytes(disk))


def first_batch_bytes(disk: MemoryDisk) -> int:
    content = files_of(disk)[SegmentId(0, 0)]
    return int.from_bytes(content[SEGMENT_HEADER_BYTES + 8 : SEGMENT_HEADER_BYTES + 12], "little")


def test_read_cache_memory_is_bounded() -> None:
    disk = MemoryDisk()
    published(disk, *[50_000] * 100, roll_bytes=2**22)
    shared = ReadCache(bytes_max=2**20)
    for chunk in sender_of(disk, shared=shared).items(2**30):
        if isinstance(chunk, Chunk):
            shared.encoded(chunk)
    assert sum(len(read.data) for read in shared._reads.values()) <= 2**20
    assert sum(map(len, shared._encoded.values())) <= 2**20


def test_pruned_read_cache_drops_earlier_chunks_and_late_sender_reads_them_again() -> None:
    disk = MemoryDisk()
    published(disk, *[50_000] * 100, roll_bytes=2**22)
    shared = ReadCache()
    chunks = [chunk for chunk in sender_of(disk, shared=shared).items(2**30) if isinstance(chunk, Chunk)]
    for chunk in chunks:
        shared.encoded(chunk)
    middle = chunks[len(chunks) // 2].start
    shared.prune_before(middle)
    assert min(shared._reads) >= middle
    assert min(shared._encoded)[0] == middle
    assert shared._bytes == sum(len(read.data) for read in shared._reads.values())
    assert shared._encoded_bytes == sum(map(len, shared._encoded.values()))
    assert drained(sender_of(disk, shared=shared)).segments == files_of(disk)
    shared.prune_before(LogOffset(9, 0, 0))
    assert (shared._bytes, shared._encoded_bytes) == (0, 0)


def merged_on(disk: MemoryDisk, *sizes: int) -> MergedLogBuilder:
    published(disk, *(sizes or [700] * 10))
    return MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="s", disk=disk)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["merge", "roll", "take", "trim"]), max_size=14))
def test_merged_log_is_sent_unchanged_with_its_trims(script: list[str]) -> None:
    disk = MemoryDisk()
    merged = merged_on(disk)
    sender, received = sender_of(disk, MERGED), Received()
    content: dict[SegmentId, bytes] = {}
    for step in script:
        match step:
            case "merge":
                published(disk, 100, 900)
                merged.merge_all([DIRECTORY], block_bytes=1500)
            case "roll":
                merged.roll()
            case "trim":
                assert merged.writer.last_id is not None
                merged.trim(merged.writer.last_id)
            case "take":
                received.take(sender.items(1000))
        content |= files_of(disk, MERGED)
    drained(sender, received)
    kept = files_of(disk, MERGED)
    content |= kept
    for segment, bytes_ in received.segments.items():
        assert content[segment].startswith(bytes_)
        assert segment not in kept or bytes_ == kept[segment]
    assert set(kept) <= set(received.segments)
    table = read_table(disk, MERGED)
    assert table is not None
    if any(entry.is_trimmed for entry in table.segments):
        first = read_header(disk, MERGED, next(iter(kept)))
        assert first is not None
        assert (received.trimmed[-1].before, received.trimmed[-1].log_start) == (first.id, first.first)
        assert received.trimmed[-1].reason is TrimReason.TIME
    else:
        assert not received.trimmed
    merged.close()


def test_block_is_sent_only_when_complete() -> None:
    disk = MemoryDisk()
    with merged_on(disk) as merged:
        merged.merge_all([DIRECTORY], block_bytes=3000)
    whole = files_of(disk, MERGED)[SegmentId(0, 0)]
    disk.remove(f"{MERGED}/durable")
    file = disk.open(segment_path(MERGED, SegmentId(0, 0)), write=True)
    sender, received = sender_of(disk, MERGED), Received()
    for cut in range(0, len(whole), 111):
        file.truncate(cut)
        file.pwritev([whole[:cut]], 0)
        if cut >= SEGMENT_HEADER_BYTES:
            drained(sender, received)
            assert whole[:cut].startswith(received.segments[SegmentId(0, 0)])
    file.pwritev([whole], 0)
    assert drained(sender, received).segments[SegmentId(0, 0)] == whole


def test_merged_sender_starts_only_at_block_boundaries() -> None:
    disk = MemoryDisk()
    with merged_on(disk, *[80] * 6) as merged:
        merged.merge_all([DIRECTORY], block_bytes=100)
    whole = files_of(disk, MERGED)[SegmentId(0, 0)]
    good = 0
    for offset in range(0, len(whole) + 1, 8):
        sender = sender_of(disk, MERGED, LogOffset(0, 0, offset))
        try:
            rest = drained(sender, Received(LogOffset(0, 0, offset))).segments[SegmentId(0, 0)]
        except rt.Diverged:
            continue
        assert whole[:offset] + rest == whole
        good += 1
    assert good >= 6


def test_offset_beyond_sealed_merged_segment_raises_diverged() -> None:
    disk = MemoryDisk()
    merged = merged_on(disk)
    merged.merge_all([DIRECTORY])
    merged.roll()
    with pytest.raises(rt.Diverged, match="more bytes of a sealed segment"):
        sender_of(disk, MERGED, LogOffset(0, 0, 2**30)).items()
    merged.close()

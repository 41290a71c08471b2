"""The receiver of a merged log: it stores only verified blocks, and records gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st
from log_items import (
    CLUSTER,
    COPY,
    MERGED,
    SESSION,
    files_of,
    give,
    items_of,
    merged_copy,
    messages,
    publish,
    recut,
)
from msgspec.structs import replace

import rt
from replicator.protocol.messages import Chunk, CompleteUpTo, Item, LogOffset, LogTrimmed, SegmentSealed
from replicator.receive.merged_receiver import MergedReceiver
from rt.errors import ClusterMismatch, Corrupt, DiskFull, ProtocolViolation
from rt.events import SkipForward
from rt.log.check.verify import verify
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.scan.directory import read_table
from rt.testing.merged import MergedLogBuilder

SIZES = st.lists(st.integers(0, 2500), min_size=1, max_size=6)


def rolled(disk: MemoryDisk, *rounds: list[int]) -> MergedLogBuilder:
    """An open merged log with one segment for each round of messages of two sessions. The last segment is
    active.
    """
    merged = MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="s", disk=disk)
    for index, sizes in enumerate(rounds):
        if index:
            merged.roll()
        sessions = [publish(disk, *sizes), publish(disk, *sizes[:2], name="other")]
        merged.merge_all(sessions, block_bytes=2048)
    merged.sync()
    return merged


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def merged(disk: MemoryDisk) -> Iterator[MergedLogBuilder]:
    with rolled(disk, [100, 2000, 300], [50, 50], [700, 20]) as log:
        yield log


@given(
    rounds=st.lists(SIZES, min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 9000), min_size=1),
    stops=st.lists(st.integers(0, 40), max_size=3),
)
def test_merged_copy_equals_log_byte_for_byte_however_chunks_are_split_and_interrupted(
    rounds: list[list[int]], cuts: list[int], stops: list[int]
) -> None:
    disk = MemoryDisk()
    merged = rolled(disk, *rounds)
    receiver = merged_copy(disk)
    for stop, is_reopened in zip([*stops, None], itertools.cycle([True, False]), strict=False):
        receiver.drop_unfinished()
        items = recut(items_of(disk, MERGED, receiver.next_offset), itertools.cycle(cuts))
        give(receiver, itertools.islice(items, stop))
        if is_reopened:
            receiver.close()
            receiver = merged_copy(disk)
    assert files_of(disk, COPY) == files_of(disk, MERGED)
    assert receiver.end == merged.position
    receiver.close()
    merged.close()
    assert messages(COPY, disk) == messages(MERGED, disk)
    assert verify(COPY, disk=disk).damage == []


@given(at=st.integers(0, 2**31), bit=st.integers(0, 7), sizes=SIZES)
def test_merged_receiver_rejects_flipped_bit_anywhere(at: int, bit: int, sizes: list[int]) -> None:
    disk = MemoryDisk()
    with rolled(disk, sizes):
        (chunk,) = items_of(disk, MERGED)
        assert isinstance(chunk, Chunk)
        data = bytearray(chunk.data)
        data[at % len(data)] ^= 1 << bit
        receiver = merged_copy(disk)
        with pytest.raises(rt.RtError):
            give(receiver, [Chunk(chunk.start, bytes(data)), SegmentSealed(chunk.end, receiver.end, True, 0)])
        whole = files_of(disk, MERGED)
        assert all(whole[segment].startswith(content) for segment, content in files_of(disk, COPY).items())
        receiver.drop_unfinished()
        give(receiver, items_of(disk, MERGED, receiver.next_offset))
        assert files_of(disk, COPY) == whole
        receiver.close()


def test_merged_receiver_rejects_items_out_of_order(disk: MemoryDisk, merged: MergedLogBuilder) -> None:
    items = items_of(disk, MERGED)
    first, sealed, second = items[:3]
    assert isinstance(first, Chunk)
    assert isinstance(sealed, SegmentSealed)
    assert isinstance(second, Chunk)
    receiver = merged_copy(disk)
    give(receiver, [first])
    end = first.end
    bad: list[Item] = [
        second,
        Chunk(end._replace(offset=end.offset + 8), first.data),
        Chunk(end._replace(offset=0), first.data),
        SegmentSealed(end, sealed.end + 1, False, 0),
        SegmentSealed(end._replace(offset=end.offset - 8), sealed.end, False, 0),
        CompleteUpTo(receiver.end + 5),
    ]
    for item in bad:
        with pytest.raises(ProtocolViolation):
            give(receiver, [item])
        assert receiver.next_offset == end
    give(receiver, [sealed])
    with pytest.raises(ProtocolViolation):
        give(receiver, [Chunk(second.start._replace(roll=second.start.roll + 1), second.data)])
    give(receiver, items[1:])
    assert files_of(disk, COPY) == files_of(disk, MERGED)
    receiver.close()


def test_merged_receiver_rejects_block_of_other_offset_or_other_cluster(
    disk: MemoryDisk, merged: MergedLogBuilder
) -> None:
    with MergedLogBuilder("/other", cluster_id=bytes(16), stream="s", disk=disk) as other:
        other.merge_all([SESSION])
    theirs, ours = items_of(disk, "/other")[0], items_of(disk, MERGED)[0]
    assert isinstance(theirs, Chunk)
    assert isinstance(ours, Chunk)
    receiver = merged_copy(disk)
    with pytest.raises(ClusterMismatch):
        receiver.append(theirs)
    receiver.append(Chunk(ours.start, ours.data[:SEGMENT_HEADER_BYTES]))
    with pytest.raises(Corrupt) as caught:
        receiver.append(Chunk(ours.start._replace(offset=64), theirs.data[SEGMENT_HEADER_BYTES:]))
    assert caught.value.offset == SEGMENT_HEADER_BYTES
    receiver.close()


def test_merged_receiver_of_other_cluster_directory_raises_cluster_mismatch(disk: MemoryDisk) -> None:
    merged_copy(disk).close()
    with pytest.raises(ClusterMismatch):
        MergedReceiver.open(COPY, LogIdentity(LogKind.MERGED, bytes(16), "s"), disk=disk)


def test_running_checksum_and_last_block_checksum_survive_restart(
    disk: MemoryDisk, merged: MergedLogBuilder
) -> None:
    receiver = merged_copy(disk)
    items = items_of(disk, MERGED)
    give(receiver, items)
    chain_start = 0
    other = merged_copy(disk, "/another")
    for item in items:
        give(other, [item])
        if isinstance(item, SegmentSealed):
            chain_start = other.chain
    known = receiver.chain, receiver.last_checksum
    assert known == (other.chain, other.last_checksum)
    assert known[1]
    receiver.close()
    other.close()
    receiver = merged_copy(disk, chain=chain_start)
    assert (receiver.chain, receiver.last_checksum) == known
    receiver.close()


def test_merged_receiver_keeps_whole_blocks_on_full_disk_and_continues_with_space(
    disk: MemoryDisk, merged: MergedLogBuilder
) -> None:
    (first, *_) = items_of(disk, MERGED)
    assert isinstance(first, Chunk)
    receiver = merged_copy(disk)
    receiver.append(Chunk(first.start, first.data[:SEGMENT_HEADER_BYTES]))
    disk.capacity_bytes = disk.used_bytes + 2500
    with pytest.raises(DiskFull):
        receiver.append(Chunk(first.start._replace(offset=64), first.data[64:]))
    assert receiver.next_offset is not None
    assert receiver.next_offset.offset == len(files_of(disk, COPY)[SegmentId(0, 0)])
    disk.capacity_bytes = None
    give(receiver, items_of(disk, MERGED, receiver.next_offset))
    assert files_of(disk, COPY) == files_of(disk, MERGED)
    receiver.close()


class TestTrims:
    def test_merged_copy_following_trims_applies_trim_of_sender(
        self, disk: MemoryDisk, merged: MergedLogBuilder
    ) -> None:
        receiver = merged_copy(disk)
        give(receiver, items_of(disk, MERGED))
        give(receiver, [LogTrimmed(SegmentId(0, 1), 0, TrimReason.SIZE)])
        table = read_table(disk, COPY)
        assert table is not None
        assert [segment.reason for segment in table.segments] == [TrimReason.SIZE, TrimReason.NONE]
        receiver.close()

    def test_merged_copy_with_own_retention_ignores_trims_of_sender(
        self, disk: MemoryDisk, merged: MergedLogBuilder
    ) -> None:
        receiver = merged_copy(disk, follows_trims=False)
        give(receiver, [*items_of(disk, MERGED), LogTrimmed(SegmentId(0, 2), 0, TrimReason.SIZE)])
        assert files_of(disk, COPY) == files_of(disk, MERGED)
        receiver.close()

    @pytest.mark.parametrize("follows", [True, False])
    def test_merged_copy_overtaken_by_trim_skips_forward_and_its_reader_gets_event(
        self, disk: MemoryDisk, merged: MergedLogBuilder, follows: bool
    ) -> None:
        receiver = merged_copy(disk, follows_trims=follows)
        first = items_of(disk, MERGED)[0]
        assert isinstance(first, Chunk)
        give(receiver, [first])
        end = receiver.end
        receiver.close()
        merged.trim(SegmentId(0, 2))
        receiver = merged_copy(disk, follows_trims=follows)
        told, *items = items_of(disk, MERGED, LogOffset(0, 2, 0))
        assert isinstance(told, LogTrimmed)
        began = items[0]
        assert isinstance(began, Chunk)
        with pytest.raises(ProtocolViolation):
            give(receiver, items)
        table = read_table(disk, MERGED)
        assert table is not None
        start = table.segments[-1].end
        receiver.start_at(began.start, start)
        give(receiver, [replace(told, reason=TrimReason.DISK), *items])
        receiver.close()
        merged_copy(disk, follows_trims=follows).close()
        events: list[object] = []
        with rt.LogReader(COPY, position=0, on_event=events.append, disk=disk) as reader:
            got = [message.position for message in reader]
        kept = [] if follows else list(range(end))
        assert got == [*kept, *range(start, merged.position)]
        (event,) = events
        assert isinstance(event, SkipForward)
        assert event == SkipForward(0 if follows else end, start, "disk")
        assert not follows or verify(COPY, disk=disk).damage == []

    @pytest.mark.parametrize("follows", [True, False])
    def test_merged_copy_started_after_trim_records_reason_of_that_trim_only(
        self, disk: MemoryDisk, merged: MergedLogBuilder, follows: bool
    ) -> None:
        merged.trim(SegmentId(0, 1))
        (told, *_), (began, *items) = (
            items_of(disk, MERGED),
            [one for one in items_of(disk, MERGED, LogOffset(0, 2, 0)) if not isinstance(one, LogTrimmed)],
        )
        assert isinstance(told, LogTrimmed)
        assert isinstance(began, Chunk)
        receiver = merged_copy(disk, follows_trims=follows)
        table = read_table(disk, MERGED)
        assert table is not None
        receiver.start_at(began.start, table.segments[1].end)
        give(receiver, [replace(told, reason=TrimReason.DISK), began, *items])
        receiver.close()
        events: list[SkipForward] = []
        for position in (0, told.log_start):
            with rt.LogReader(COPY, position=position, on_event=events.append, disk=disk) as reader:
                next(iter(reader))
        assert [event.reason for event in events] == ["disk", "lost"]

    def test_merged_copy_skips_segments_trimmed_before_it_received_them(
        self, disk: MemoryDisk, merged: MergedLogBuilder
    ) -> None:
        receiver = merged_copy(disk)
        give(receiver, items_of(disk, MERGED)[:1])
        merged.trim(SegmentId(0, 2))
        give(receiver, items_of(disk, MERGED, LogOffset(0, 1, 0)))
        assert sorted(files_of(disk, COPY)) == [SegmentId(0, 2)]
        assert receiver.end == merged.position
        receiver.close()

    def test_merged_receiver_drops_unfinished_block_when_it_skips_forward(
        self, disk: MemoryDisk, merged: MergedLogBuilder
    ) -> None:
        first = items_of(disk, MERGED)[0]
        assert isinstance(first, Chunk)
        receiver = merged_copy(disk)
        receiver.append(Chunk(first.start, first.data[: len(first.data) - 40]))
        assert receiver.unfinished_bytes
        merged.trim(SegmentId(0, 2))
        give(receiver, items_of(disk, MERGED, LogOffset(0, 1, 0)))
        assert receiver.end == merged.position
        assert files_of(disk, COPY) == files_of(disk, MERGED)
        receiver.close()

    def test_merged_receiver_rejects_start_before_its_end(
        self, disk: MemoryDisk, merged: MergedLogBuilder
    ) -> None:
        receiver = merged_copy(disk)
        give(receiver, items_of(disk, MERGED))
        place = receiver.next_offset
        assert place is not None
        for back, first in ((LogOffset(0, 1, 0), 0), (LogOffset(0, 5, 64), 500), (LogOffset(0, 5, 0), 1)):
            with pytest.raises(ProtocolViolation):
                receiver.start_at(back, first)
        receiver.start_at(place, receiver.end)
        receiver.close()


def test_merged_copy_may_start_at_later_segment(disk: MemoryDisk, merged: MergedLogBuilder) -> None:
    receiver = merged_copy(disk)
    table = read_table(disk, MERGED)
    assert table is not None
    start = table.segments[0].end
    receiver.start_at(LogOffset(0, 1, 0), start)
    give(receiver, items_of(disk, MERGED, LogOffset(0, 1, 0)))
    whole = files_of(disk, MERGED)
    assert files_of(disk, COPY) == {segment: whole[segment] for segment in whole if segment.roll >= 1}
    assert messages(COPY, disk) == messages(MERGED, disk)[start:]
    receiver.close()


def test_trim_before_start_of_merged_copy_does_not_move_next_offset(
    disk: MemoryDisk, merged: MergedLogBuilder
) -> None:
    receiver = merged_copy(disk)
    table = read_table(disk, MERGED)
    assert table is not None
    begins = LogOffset(0, 2, 0)
    receiver.start_at(begins, table.segments[1].end)
    give(receiver, [LogTrimmed(SegmentId(0, 1), table.segments[0].end, TrimReason.SIZE)])
    assert receiver.next_offset == begins
    give(receiver, items_of(disk, MERGED, begins))
    assert sorted(files_of(disk, COPY)) == [SegmentId(0, 2)]
    receiver.close()


def test_segments_skipped_by_merged_copy_are_trimmed_with_reason_of_sender(
    disk: MemoryDisk, merged: MergedLogBuilder
) -> None:
    receiver = merged_copy(disk)
    give(receiver, items_of(disk, MERGED)[:1])
    merged.trim(SegmentId(0, 2))
    give(receiver, items_of(disk, MERGED, LogOffset(0, 1, 0)))
    table, wanted = read_table(disk, COPY), read_table(disk, MERGED)
    assert table is not None
    assert wanted is not None
    assert {segment.reason for segment in table.segments} == {wanted.segments[0].reason}
    receiver.close()

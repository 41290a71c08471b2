"""The receiver of a session: it stores exactly the bytes that the publisher wrote."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st
from log_items import COPY, SESSION, files_of, give, items_of, messages, publish, recut, session_copy
from msgspec.structs import replace

import rt
from replicator.protocol.messages import Chunk, Item, LogOffset, Run, SegmentSealed
from replicator.receive.batch_boundaries import read_marks
from replicator.receive.session_receiver import FRAME_BYTES_MAX, SessionReceiver
from rt.errors import (
    BadContents,
    ClusterMismatch,
    Corrupt,
    DirectoryLocked,
    DiskFull,
    Fenced,
    MessageTooLarge,
    ProtocolViolation,
)
from rt.log.check.verify import verify
from rt.log.format.batch import CODEC_NONE, CODEC_ZSTD, BatchDraft, encode_batch
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    encode_segment_header,
)
from rt.log.format.segment_table import LogIdentity, TrimReason

SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=8)


@given(lives=st.lists(SIZES, min_size=1, max_size=3), cuts=st.lists(st.integers(1, 9000), min_size=1))
def test_session_replica_equals_log_byte_for_byte_however_chunks_are_split(
    lives: list[list[int]], cuts: list[int]
) -> None:
    disk = MemoryDisk()
    for sizes in lives:
        publish(disk, *sizes)
    receiver = session_copy(disk)
    give(receiver, recut(items_of(disk, SESSION), itertools.cycle(cuts)))
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    assert receiver.end == sum(map(len, lives))
    receiver.close()
    assert messages(COPY, disk) == messages(SESSION, disk)
    assert verify(COPY, disk=disk).damage == []


@given(
    sizes=SIZES,
    cuts=st.lists(st.integers(1, 5000), min_size=1),
    stops=st.lists(st.integers(0, 30), max_size=4),
)
def test_session_replica_continues_at_its_end_after_any_interruption(
    sizes: list[int], cuts: list[int], stops: list[int]
) -> None:
    disk = MemoryDisk()
    publish(disk, *sizes)
    publish(disk, *sizes)
    receiver = session_copy(disk)
    for stop, is_reopened in zip([*stops, None], itertools.cycle([True, False]), strict=False):
        items = recut(items_of(disk, SESSION, receiver.next_offset), itertools.cycle(cuts))
        give(receiver, itertools.islice(items, stop))
        if is_reopened:
            receiver.close()
            receiver = session_copy(disk)
        else:
            receiver.drop_unfinished()
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    receiver.close()


@given(sizes=SIZES, at=st.integers(0, 2**31), bit=st.integers(0, 7))
def test_session_receiver_rejects_flipped_bit_and_keeps_valid_bytes_before_it(
    sizes: list[int], at: int, bit: int
) -> None:
    disk = MemoryDisk()
    publish(disk, *sizes)
    receiver = session_copy(disk)
    chunks = [item for item in items_of(disk, SESSION) if isinstance(item, Chunk)]
    at %= sum(len(chunk.data) for chunk in chunks)
    bad: list[Item] = []
    for chunk in chunks:
        data = bytearray(chunk.data)
        if 0 <= at < len(data):
            data[at] ^= 1 << bit
        at -= len(data)
        bad.append(Chunk(chunk.start, bytes(data)))
    give(receiver, [item for item in items_of(disk, SESSION) if isinstance(item, Run)])
    with pytest.raises((rt.RtError,)):
        give_sealing(receiver, bad, items_of(disk, SESSION))
    assert_prefix(disk)
    give(receiver, items_of(disk, SESSION, receiver.next_offset))
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    receiver.close()


def give_sealing(receiver: SessionReceiver, chunks: list[Item], items: list[Item]) -> None:
    """Pass the items to the receiver, with `chunks` in place of their chunks."""
    replaced = iter(chunks)
    give(receiver, [next(replaced) if isinstance(item, Chunk) else item for item in items])


def assert_prefix(disk: MemoryDisk, path: str = COPY, of: str = SESSION) -> None:
    whole = files_of(disk, of)
    for segment, content in files_of(disk, path).items():
        assert whole[segment].startswith(content)


class TestWhatDoesNotFollow:
    @pytest.fixture
    def disk(self) -> MemoryDisk:
        disk = MemoryDisk()
        publish(disk, 2000, 2000, 2000)
        publish(disk, 100)
        return disk

    @pytest.fixture
    def items(self, disk: MemoryDisk) -> list[Item]:
        return items_of(disk, SESSION)

    def refused(
        self, receiver: SessionReceiver, *items: Item, error: type[Exception] = ProtocolViolation
    ) -> None:
        before = receiver.next_offset
        with pytest.raises(error):
            give(receiver, items)
        assert receiver.next_offset == before

    def test_session_receiver_rejects_bytes_before_run_is_started(
        self, disk: MemoryDisk, items: list[Item]
    ) -> None:
        receiver = session_copy(disk)
        self.refused(receiver, items[1])
        receiver.close()

    def test_session_receiver_rejects_gap_repeat_and_other_segment(
        self, disk: MemoryDisk, items: list[Item]
    ) -> None:
        receiver = session_copy(disk)
        life, first = items[0], items[1]
        assert isinstance(first, Chunk)
        give(receiver, [life, first])
        end = first.end
        for place in (
            end._replace(offset=end.offset + 8),
            end._replace(offset=end.offset - 8),
            end._replace(offset=0),
            end._replace(roll=end.roll + 1, offset=0),
            end._replace(run=end.run + 1, offset=0),
        ):
            self.refused(receiver, Chunk(place, first.data))
        receiver.close()

    def test_next_run_waits_until_last_segment_is_sealed_as_last_of_run(
        self, disk: MemoryDisk, items: list[Item]
    ) -> None:
        receiver = session_copy(disk)
        at = next(
            index
            for index, item in enumerate(items)
            if isinstance(item, Run) and item.number > items[0].number
        )  # type: ignore[union-attr]
        give(receiver, items[: at - 1])
        last = items[at - 1]
        assert isinstance(last, SegmentSealed)
        assert last.is_last_of_run
        give(receiver, [replace(last, is_last_of_run=False), items[at]])
        assert not receiver.has_ended
        self.refused(receiver, items[at + 1])
        receiver.seal(last)
        assert receiver.has_ended
        give(receiver, items[at + 1 :])
        assert files_of(disk, COPY) == files_of(disk, SESSION)
        receiver.close()

    def test_session_receiver_rejects_seal_not_at_its_end(self, disk: MemoryDisk, items: list[Item]) -> None:
        receiver = session_copy(disk)
        give(receiver, items[:2])
        place = receiver.next_offset
        assert place is not None
        further = place._replace(offset=place.offset + 8)
        self.refused(receiver, SegmentSealed(further, receiver.end, True, 0))
        self.refused(receiver, SegmentSealed(place, receiver.end + 1, True, 0))
        self.refused(receiver, SegmentSealed(place._replace(roll=place.roll + 1), receiver.end, True, 0))
        receiver.close()

    def test_session_receiver_rejects_header_of_other_session_run_id_or_segment(
        self, disk: MemoryDisk, items: list[Item]
    ) -> None:
        publish(disk, 10, name="other")
        other = items_of(disk, "/data/s/sessions/other")
        receiver = session_copy(disk)
        self.refused(receiver, items[0], other[1], error=ClusterMismatch)
        first = items[1]
        assert isinstance(first, Chunk)
        receiver.start_run(Run(first.start.run, b"another!"))
        self.refused(receiver, first)
        give(receiver, [items[0]])
        self.refused(receiver, Chunk(LogOffset(first.start.run, 5, 0), first.data))
        assert files_of(disk, COPY) == {}
        receiver.close()

    def test_start_of_older_run_or_of_same_run_with_other_id_raises_fenced(
        self, disk: MemoryDisk, items: list[Item]
    ) -> None:
        receiver = session_copy(disk)
        give(receiver, items)
        newest = items[-1]
        run = receiver.writer.last_id.run  # type: ignore[union-attr]
        with pytest.raises(Fenced):
            receiver.start_run(Run(run - 1, b"12345678"))
        with pytest.raises(Fenced):
            receiver.start_run(Run(run, b"12345678"))
        receiver.start_run(Run(run + 1, b"12345678"))
        assert newest is not None
        receiver.close()

    def test_second_receiver_of_same_replica_raises_directory_locked(self, disk: MemoryDisk) -> None:
        receiver = session_copy(disk)
        with pytest.raises(DirectoryLocked):
            session_copy(disk)
        receiver.close()


def test_session_replica_keeps_bytes_its_publisher_lost_and_ends_run_there() -> None:
    disk = MemoryDisk()
    publish(disk, 100, 100, roll_bytes=1 << 20)
    items = items_of(disk, SESSION)
    receiver = session_copy(disk)
    give(receiver, items[:2])
    place = receiver.next_offset
    assert place is not None
    shorter = SegmentSealed(place._replace(offset=place.offset - 64), receiver.end - 1, False, 0)
    receiver.seal(shorter)
    assert receiver.active is not None
    receiver.seal(replace(shorter, is_last_of_run=True))
    assert receiver.active is None
    assert receiver.next_offset == place
    assert receiver.has_ended
    receiver.close()


@pytest.mark.parametrize("offset", [0, 8, 56, 65, 100])
def test_session_receiver_rejects_seal_at_invalid_offset(offset: int) -> None:
    disk = MemoryDisk()
    publish(disk, 100, 100, roll_bytes=1 << 20)
    receiver = session_copy(disk)
    give(receiver, items_of(disk, SESSION)[:2])
    place = receiver.next_offset
    assert place is not None
    with pytest.raises(ProtocolViolation):
        receiver.seal(SegmentSealed(place._replace(offset=offset), 0, True, 0))
    assert not receiver.has_ended
    receiver.close()


def test_frame_above_size_limit_raises_message_too_large_before_buffering() -> None:
    disk = MemoryDisk()
    publish(disk, 300_000, roll_bytes=1 << 20)
    receiver = session_copy(disk, frame_bytes_max=100_000)
    items = items_of(disk, SESSION)
    chunk = items[1]
    assert isinstance(chunk, Chunk)
    give(receiver, items[:1])
    with pytest.raises(MessageTooLarge):
        receiver.append(Chunk(chunk.start, chunk.data[: SEGMENT_HEADER_BYTES + 64]))
    assert receiver.unfinished_bytes == 0
    receiver.close()


def test_frame_length_beyond_every_limit_raises_corrupt() -> None:
    disk = MemoryDisk()
    publish(disk, 10)
    items = items_of(disk, SESSION)
    chunk = items[1]
    assert isinstance(chunk, Chunk)
    data = bytearray(chunk.data)
    data[SEGMENT_HEADER_BYTES + 8 : SEGMENT_HEADER_BYTES + 12] = b"\xff\xff\xff\x7f"
    receiver = session_copy(disk)
    with pytest.raises(Corrupt) as caught:
        give(receiver, [items[0], Chunk(chunk.start, bytes(data))])
    assert caught.value.offset == SEGMENT_HEADER_BYTES
    assert receiver.unfinished_bytes == 0
    receiver.close()
    assert FRAME_BYTES_MAX < 2**31


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("codec", [CODEC_NONE, CODEC_ZSTD])
@pytest.mark.parametrize("fault", ["offsets", "end", "topic index", "topics", "no fault"])
def test_batch_with_valid_checksums_and_invalid_columns_raises_bad_contents(
    count: int, codec: int, fault: str
) -> None:
    header = SegmentHeader(LogKind.SESSION, SegmentId(0, 0), 0, 0, bytes(16), b"12345678")
    offsets = np.arange(count + 1, dtype=np.int32) * 8
    index = np.zeros(count, np.uint16)
    topics = [b"a", b"b"]
    match fault:
        case "offsets":
            offsets[1:3] = 16, 8
        case "end":
            offsets[-1] += 8
        case "topic index":
            index[1] = 2
        case "topics":
            topics = [b"a", b"\xff"]
    times = np.ones(count, np.int64)
    draft = BatchDraft(bytes(8 * count), offsets, times, 1, 1, topics, index)
    good = BatchDraft(bytes(8), np.array([0, 8], np.int32), times[:1], 1, 1, [b"a"])
    first = b"".join(encode_batch(good, first=0, seed=batch_seed(header.seed, 64)))
    seed = batch_seed(header.seed, 64 + len(first))
    lying = b"".join(encode_batch(draft, first=1, seed=seed, codec=codec))
    disk = MemoryDisk()
    receiver = SessionReceiver.open(COPY, LogIdentity(LogKind.SESSION, bytes(16), "feed"), disk=disk)
    receiver.start_run(Run(0, header.run_id))
    chunk = Chunk(LogOffset(0, 0, 0), encode_segment_header(header) + first + lying)
    if fault == "no fault":
        receiver.append(chunk)
        assert receiver.end == 1 + count
    else:
        with pytest.raises(BadContents) as caught:
            receiver.append(chunk)
        assert caught.value.where == LogOffset(0, 0, 64 + len(first))
        assert receiver.end == 1
        assert [
            mark.number for _, marks in receiver.on_synced(receiver.sync_point()).boundaries for mark in marks
        ] == [1]
    receiver.close()


def test_large_message_in_many_chunks_is_buffered_once() -> None:
    disk = MemoryDisk()
    publish(disk, 3_500_000, 10, roll_bytes=1 << 30)
    receiver = session_copy(disk)
    seen = 0
    for item in items_of(disk, SESSION):
        give(receiver, [item])
        seen = max(seen, receiver.unfinished_bytes)
    assert 2_000_000 < seen < 3_600_000
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    receiver.close()


def test_session_receiver_stores_no_part_of_chunk_on_full_disk_and_continues_with_space() -> None:
    disk = MemoryDisk()
    publish(disk, 900, 900, 900, roll_bytes=1 << 20)
    items = items_of(disk, SESSION)
    receiver = session_copy(disk)
    life, chunk = items[:2]
    assert isinstance(chunk, Chunk)
    give(receiver, [life, Chunk(chunk.start, chunk.data[:SEGMENT_HEADER_BYTES])])
    place = receiver.next_offset
    disk.capacity_bytes = disk.used_bytes + 100
    with pytest.raises(DiskFull):
        receiver.append(Chunk(chunk.start._replace(offset=64), chunk.data[64:]))
    assert receiver.next_offset == place
    disk.capacity_bytes = None
    give(receiver, items_of(disk, SESSION, receiver.next_offset))
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    receiver.close()


class TestMarks:
    def test_batch_boundaries_are_reported_only_after_they_are_durable(self) -> None:
        disk = MemoryDisk()
        publish(disk, 2000, 2000, 2000, 10)
        receiver = session_copy(disk)
        told: list[tuple[SegmentId, int]] = []

        def sync() -> None:
            point = receiver.sync_point()
            if point is not None:
                receiver.sync_to(point)
            told.extend(
                (segment, mark.offset)
                for segment, marks in receiver.on_synced(point).boundaries
                for mark in marks
            )

        for item in items_of(disk, SESSION):
            before = list(told)
            give(receiver, [item])
            assert told == before
            sync()
            assert receiver.durable == receiver.next_offset
        whole = {
            segment: [mark.offset for mark in read_marks(disk, SESSION, segment)]
            for segment in files_of(disk, SESSION)
        }
        assert told == [(segment, offset) for segment in sorted(whole) for offset in whole[segment]]
        receiver.close()

    def test_reopened_replica_reports_boundaries_of_active_segment_and_continues_checksum(self) -> None:
        disk = MemoryDisk()
        publish(disk, 100, 100, 100, roll_bytes=1 << 20)
        receiver = session_copy(disk)
        items = items_of(disk, SESSION)
        cut = next(iter(read_marks(disk, SESSION, SegmentId(items[0].number, 0)))).offset  # type: ignore[union-attr]
        chunk = items[1]
        assert isinstance(chunk, Chunk)
        give(receiver, [items[0], Chunk(chunk.start, chunk.data[:cut])])
        receiver.close()
        receiver = session_copy(disk)
        (recovered,) = receiver.recovered
        give(receiver, items_of(disk, SESSION, receiver.next_offset))
        following = [
            mark for _, marks in receiver.on_synced(receiver.sync_point()).boundaries for mark in marks
        ]
        assert [*recovered.marks, *following] == read_marks(disk, SESSION, recovered.segment)
        receiver.close()


def segment_of(item: Item) -> SegmentId:
    assert isinstance(item, Chunk | SegmentSealed)
    return item.start.segment if isinstance(item, Chunk) else item.end_offset.segment


class TestSkipping:
    def test_replica_with_remaining_bytes_merged_continues_at_given_segment(self) -> None:
        disk = MemoryDisk()
        publish(disk, 2000, 2000, 2000, 2000, 2000, 2000)
        items = items_of(disk, SESSION)
        receiver = session_copy(disk)
        give(receiver, items[:2])
        receiver.close()
        third = sorted(files_of(disk, SESSION))[2]
        receiver = session_copy(disk, at=LogOffset(*third, 100))
        assert receiver.next_offset == LogOffset(*third, 0)
        give(receiver, items_of(disk, SESSION, receiver.next_offset))
        receiver.close()
        whole = files_of(disk, SESSION)
        assert files_of(disk, COPY) == {segment: whole[segment] for segment in whole if segment >= third}
        receiver = session_copy(disk)
        assert receiver.end == 6
        receiver.close()

    def test_session_receiver_accepts_later_segment_only_after_skip_to_its_first_number(self) -> None:
        disk = MemoryDisk()
        publish(disk, 2000, 2000, 2000, 2000, 2000, 2000)
        items = items_of(disk, SESSION)
        first = items[1]
        assert isinstance(first, Chunk)
        segments = sorted(files_of(disk, SESSION))
        later = [item for item in items if not isinstance(item, Run) and segment_of(item) >= segments[1]]
        begins = next(item for item in items if isinstance(item, SegmentSealed)).end
        receiver = session_copy(disk)
        give(receiver, items[:1])
        receiver.append(Chunk(first.start, first.data[:SEGMENT_HEADER_BYTES]))
        with pytest.raises(ProtocolViolation):
            give(receiver, later)
        receiver.skip_to(LogOffset(*segments[0], 100), begins - 1)
        with pytest.raises(ProtocolViolation):
            give(receiver, later)
        receiver.skip_to(LogOffset(*segments[0], 200), begins)
        give(receiver, later)
        whole = files_of(disk, SESSION)
        assert files_of(disk, COPY) == {segment: whole[segment] for segment in segments[1:]}
        receiver.close()

    def test_session_receiver_keeps_its_segments_when_sender_starts_at_later_segment(self) -> None:
        """This node may be the only one that can still supply the earlier segments."""
        disk = MemoryDisk()
        publish(disk, 2000, 2000, 2000, 2000)
        items = items_of(disk, SESSION)
        segments = sorted(files_of(disk, SESSION))
        assert len(segments) >= 3
        later = [item for item in items if isinstance(item, Run) or segment_of(item) >= segments[2]]
        first = next(one for one in items if isinstance(one, Chunk))
        begins = [one for one in items if isinstance(one, SegmentSealed)][1].end
        receiver = session_copy(disk)
        give(receiver, [next(one for one in items if isinstance(one, Run))])
        receiver.append(first)
        receiver.skip_to(LogOffset(*segments[0], 200), begins, keep=True)
        give(receiver, later)
        whole = files_of(disk, SESSION)
        kept = files_of(disk, COPY)
        assert kept.pop(segments[0]) == bytes(first.data)
        assert kept == {segment: whole[segment] for segment in segments[2:]}
        receiver.close()

    def test_trimmed_session_replica_continues_with_next_run(self) -> None:
        disk = MemoryDisk()
        publish(disk, 2000, 2000, 2000, 2000)
        receiver = session_copy(disk)
        give(receiver, items_of(disk, SESSION))
        last = receiver.writer.last_id
        assert last is not None
        assert receiver.trim(last, TrimReason.MERGED)
        receiver.close()
        publish(disk, 50)
        receiver = session_copy(disk)
        give(receiver, items_of(disk, SESSION, receiver.next_offset))
        assert receiver.end == 5
        receiver.close()


def test_uncache_covers_only_bytes_of_active_segment_before_given_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rt.log.write.active_segment.UNCACHE_STEP_BYTES", 512)
    disk = MemoryDisk()
    publish(disk, 900, 900, 900, 900, 900, 900)
    receiver = session_copy(disk)
    give(receiver, items_of(disk, SESSION))
    active = receiver.active
    assert active is not None
    assert active.id.roll > 0
    for segment in (SegmentId(0, 0), SegmentId(0, active.id.roll + 1), SegmentId(1, active.id.roll)):
        assert receiver.uncacheable_bytes(LogOffset(*segment, 2000)) == 0
    place = LogOffset(*active.id, 700)
    assert receiver.uncacheable_bytes(place) == 512
    receiver.uncache(place)
    assert receiver.uncacheable_bytes(place) == 0
    assert files_of(disk, COPY) == files_of(disk, SESSION)
    receiver.close()

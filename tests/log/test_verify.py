"""Verifying session logs: flipped bits, message numbers and batch contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from batches import columns, forge
from disks import MemoryDisk
from verify_bench import (
    CLUSTER,
    DIRECTORY,
    MERGED,
    ReadOnlyDisk,
    damage,
    frame_starts,
    notes,
    open_publisher,
    publish,
    segment_path,
)

import rt
from rt.log.check.status import SegmentState
from rt.log.check.verify import Report, Severity, verify
from rt.log.format.checksum import batch_seed
from rt.log.format.durable_end import DURABLE_FILE, RECORD_BYTES
from rt.log.format.index import ENTRY_BYTES, IndexEntry, encode_entry
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentId
from rt.log.format.segment_table import TABLE_FILE, LogIdentity
from rt.log.scan.directory import read_header
from rt.log.write.writer import BatchFrames, LogWriter
from rt.testing.merged import MergedLogBuilder


def assert_each_flipped_bit_is_found(disk: MemoryDisk, directory: str, segment: SegmentId) -> None:
    path = f"{directory}/{segment}"
    starts = frame_starts(disk, directory, segment)
    for offset in range(len(disk.read(path))):
        disk.flip_bit(path, offset, offset % 8)
        start = max(start for start in starts if start <= offset)
        report = verify(directory, disk=disk)
        assert (path, start) in damage(report), offset
        disk.flip_bit(path, offset, offset % 8)
    assert not verify(directory, disk=disk).is_damaged


# Whole logs


def test_valid_log_is_reported_segment_by_segment(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    publish(disk, 2)
    report = verify(DIRECTORY, disk=disk)
    assert report.all_problems == []
    assert report.identity is not None
    assert report.identity.name == "feed"
    assert [
        (
            str(segment.id),
            segment.state,
            segment.first,
            segment.end,
            segment.message_count,
            segment.batch_count,
        )
        for segment in report.segments
    ] == [
        ("log.0.0", SegmentState.SEALED, 0, 3, 3, 1),
        ("log.0.1", SegmentState.SEALED, 3, 6, 3, 1),
        ("log.0.2", SegmentState.SEALED, 6, 9, 3, 1),
        ("log.0.3", SegmentState.SEALED, 9, 12, 3, 1),
        ("log.1.0", SegmentState.ACTIVE, 12, 18, 6, 2),
    ]
    assert [segment.size_bytes for segment in report.segments] == [
        len(disk.read(f"{DIRECTORY}/{segment.id}")) for segment in report.segments
    ]


def test_log_without_messages_has_no_problems(disk: MemoryDisk) -> None:
    publish(disk, 0)
    assert verify(DIRECTORY, disk=disk).all_problems == []


def test_compressed_batches_are_verified(disk: MemoryDisk) -> None:
    publish(disk, 3, size=5000, compression="zstd")
    report = verify(DIRECTORY, disk=disk)
    assert report.all_problems == []
    assert report.segments[0].message_count == 9


def test_batch_larger_than_one_read_is_verified(disk: MemoryDisk) -> None:
    publish(disk, 2, size=3 * 2**20, batch_bytes=16 * 2**20)
    assert verify(DIRECTORY, disk=disk).all_problems == []


def test_progress_increases_and_ends_near_total_bytes(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    seen: list[tuple[int, int]] = []
    verify(DIRECTORY, disk=disk, on_progress=lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert total == sum(len(disk.read(f"{DIRECTORY}/log.0.{roll}")) for roll in range(4))
    assert 0 <= total - done <= 4 * SEGMENT_HEADER_BYTES
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


def test_directory_without_log_raises_log_not_found(disk: MemoryDisk, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(rt.LogNotFound):
            verify(path)


def test_verify_reads_open_log_without_writing_or_locking(disk: MemoryDisk) -> None:
    with open_publisher(disk) as publisher:
        publisher.publish(b"value")
        publisher.flush()
        assert verify(DIRECTORY, disk=ReadOnlyDisk(disk)).segments[0].message_count == 1


# Flipped bits


def test_flipped_bit_in_newest_segment_is_found_at_its_batch(disk: MemoryDisk) -> None:
    publish(disk, 3)
    assert_each_flipped_bit_is_found(disk, DIRECTORY, SegmentId(0, 0))


def test_flipped_bit_in_sealed_segment_is_found_at_its_batch(disk: MemoryDisk) -> None:
    publish(disk, 2)
    publish(disk, 1)
    assert_each_flipped_bit_is_found(disk, DIRECTORY, SegmentId(0, 0))


def test_flipped_bit_in_merged_segment_is_found_at_its_frame(disk: MemoryDisk) -> None:
    sessions = [publish(disk, 2, "a", size=1), publish(disk, 1, "b", size=1)]
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge_all(sessions, block_bytes=4096)
    assert_each_flipped_bit_is_found(disk, MERGED, SegmentId(0, 0))


def test_flipped_bit_in_table_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 1)
    publish(disk, 1)
    path = f"{DIRECTORY}/{TABLE_FILE}"
    for offset in range(len(disk.read(path))):
        disk.flip_bit(path, offset, offset % 8)
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == [(path, 0)], offset
        assert [segment.message_count for segment in report.segments] == [3, 3]
        disk.flip_bit(path, offset, offset % 8)


def test_flipped_bit_in_durable_end_is_reported_as_note(disk: MemoryDisk) -> None:
    publish(disk, 2)
    path = f"{DIRECTORY}/{DURABLE_FILE}"
    for offset in range(2 * RECORD_BYTES):
        disk.flip_bit(path, offset, offset % 8)
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert notes(report) == [(path, offset // RECORD_BYTES * RECORD_BYTES)], offset
        disk.flip_bit(path, offset, offset % 8)


def test_flipped_bit_in_index_is_reported_as_note(disk: MemoryDisk) -> None:
    publish(disk, 4, size=400_000, batch_bytes=2**20)
    path = f"{DIRECTORY}/index.0.0"
    assert len(disk.read(path)) >= 3 * ENTRY_BYTES
    for offset in range(0, 3 * ENTRY_BYTES, 3):
        disk.flip_bit(path, offset, offset % 8)
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert notes(report) == [(path, offset // ENTRY_BYTES * ENTRY_BYTES)], offset
        disk.flip_bit(path, offset, offset % 8)


def test_index_entry_with_wrong_target_is_reported_as_note(disk: MemoryDisk) -> None:
    publish(disk, 3)
    header = read_header(disk, DIRECTORY, SegmentId(0, 0))
    assert header is not None
    path = f"{DIRECTORY}/index.0.0"
    entries = [IndexEntry(1, SEGMENT_HEADER_BYTES, 0), IndexEntry(2, SEGMENT_HEADER_BYTES + 8, 0)]
    disk.write(path, b"".join(encode_entry(entry, header.seed) for entry in entries))
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(path, 0), (path, ENTRY_BYTES)]


def test_corruption_in_several_segments_is_reported_for_each(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    for roll in (0, 2, 3):
        disk.flip_bit(segment_path(DIRECTORY, 0, roll), 5000, 1)
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(segment_path(DIRECTORY, 0, roll), 64) for roll in (0, 2, 3)]
    assert [segment.message_count for segment in report.segments] == [0, 3, 0, 0]


# Numbers


def start_at(disk: MemoryDisk, segment: SegmentId, first: int, *, dedup_id: str | None = None) -> None:
    """Start a segment whose numbers need not follow those before it."""
    identity = LogIdentity(LogKind.SESSION, bytes(16), "feed", dedup_id)
    writer = LogWriter.open(DIRECTORY, identity, disk=disk)
    writer.start(segment, first=first, run_id=b"8 bytes.")
    writer.sync()
    writer.close()


def test_number_jump_within_run_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 1)
    start_at(disk, SegmentId(0, 1), 7)
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


def test_number_jump_between_runs_is_reported_as_note(disk: MemoryDisk) -> None:
    publish(disk, 1)
    start_at(disk, SegmentId(1, 0), 7)
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(segment_path(DIRECTORY, 1, 0), 0)]


def test_number_jump_between_runs_of_dedup_session_is_no_problem(disk: MemoryDisk) -> None:
    publish(disk, 1, dedup_id="twins")
    start_at(disk, SegmentId(1, 0), 7, dedup_id="twins")
    assert verify(DIRECTORY, disk=disk).all_problems == []


# Contents


def bad_messages(report: Report) -> list[tuple[str, int]]:
    return [(problem.path, problem.offset) for problem in report.bad_messages]


def forged_log(disk: MemoryDisk, content: Callable[[int], bytes]) -> None:
    """Write a session with one batch whose checksums are valid. `content` gets the seed."""
    writer = LogWriter.open(DIRECTORY, LogIdentity(LogKind.SESSION, bytes(16), "feed"), disk=disk)
    writer.start(SegmentId(0, 0), first=0)
    assert writer.active is not None
    seed = batch_seed(writer.active.seed, writer.offset)
    writer.append([BatchFrames([content(seed)], 1, 5, 5)])
    writer.sync()
    writer.close()


@pytest.mark.parametrize(
    ("offsets", "topic_offsets", "text", "stamp", "is_good"),
    [
        ([0, 8], [0, 1], b"t", 5, True),
        ([1, 8], [0, 1], b"t", 5, False),
        ([0, 7], [0, 1], b"t", 5, False),
        ([0, 8], [0, 2], b"t", 5, False),
        ([0, 8], [0, 1], b"\xff", 5, False),
        ([0, 8], [0, 1], b"t", 6, False),
    ],
)
def test_invalid_batch_contents_are_reported_as_bad_messages_not_corruption(
    disk: MemoryDisk, offsets: list[int], topic_offsets: list[int], text: bytes, stamp: int, is_good: bool
) -> None:
    forged = columns(offsets, [stamp], [], topic_offsets, text)
    forged_log(
        disk, lambda seed: forge(forged, b"8 bytes.", seed=seed, timestamp_low_ns=5, timestamp_high_ns=5)
    )
    report = verify(DIRECTORY, disk=disk)
    assert not report.is_damaged
    assert bad_messages(report) == ([] if is_good else [(segment_path(DIRECTORY, 0, 0), 64)])


def test_bad_batch_among_small_batches_is_reported_at_its_own_offset(disk: MemoryDisk) -> None:
    writer = LogWriter.open(DIRECTORY, LogIdentity(LogKind.SESSION, bytes(16), "feed"), disk=disk)
    writer.start(SegmentId(0, 0), first=0)
    places = []
    for number in range(5):
        assert writer.active is not None
        places.append(writer.offset)
        text = b"\xff" if number in {1, 3} else b"t"
        batch = forge(
            columns([0, 8], [5], [], [0, 1], text),
            b"8 bytes.",
            seed=batch_seed(writer.active.seed, writer.offset),
            first=number,
            timestamp_low_ns=5,
            timestamp_high_ns=5,
        )
        writer.append([BatchFrames([batch], number + 1, 5, 5)])
    writer.sync()
    writer.close()
    report = verify(DIRECTORY, disk=disk)
    assert bad_messages(report) == [(segment_path(DIRECTORY, 0, 0), places[number]) for number in (1, 3)]
    assert not report.is_damaged
    assert report.segments[0].message_count == 5


def test_torn_tail_problem_has_severity_note_and_prints_it(disk: MemoryDisk) -> None:
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    disk.write(path, disk.read(path) + b"torn")
    (problem,) = verify(DIRECTORY, disk=disk).all_problems
    assert problem.severity is Severity.NOTE
    assert str(problem).startswith(f"note: {path}, offset ")

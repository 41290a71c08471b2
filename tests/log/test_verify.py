"""Verifying: all damage is found at its exact place; what a writer or a crash leaves is not called damage."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import columns, forge
from disks import FaultyDisk, MemoryDisk
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.log.check.status import SegmentState
from rt.log.check.verify import Report, Severity, verify
from rt.log.disk import REAL, Disk, File, Lock
from rt.log.format.block import BLOCK_HEADER_BYTES
from rt.log.format.checksum import batch_seed, crc32c
from rt.log.format.durable_end import DURABLE_FILE, RECORD_BYTES
from rt.log.format.index import ENTRY_BYTES, IndexEntry, encode_entry
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentId
from rt.log.format.segment_table import TABLE_FILE, LogIdentity, TrimReason, encode_table
from rt.log.scan.directory import list_segments, read_header, read_table, scans
from rt.log.scan.scanner import scanner_for
from rt.log.write.writer import BatchFrames, LogWriter
from rt.testing.merged import MergedLogBuilder

DIRECTORY = "/root/stream/sessions/feed"
MERGED = "/merged"
CLUSTER = b"cluster of test."


def open_publisher(disk: Disk, session: str = "feed", **options: Any) -> rt.Publisher:
    return rt.Publisher(
        "/root", "stream", publisher_id=session, **{"linger_ms": 60_000, "disk": disk} | options
    )


def publish(disk: Disk, batches: int, session: str = "feed", size: int = 20, **options: Any) -> str:
    """`batches` batches of three messages in one new life of a session; its directory."""
    with open_publisher(disk, session, **options) as publisher:
        for batch in range(batches):
            publisher.publish_many([b"%d" % batch + bytes(size)] * 3, topic=f"t{batch % 2}")
            publisher.flush()
    return publisher.directory


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def segment_path(directory: str, run: int, roll: int) -> str:
    return f"{directory}/log.{run}.{roll}"


def damage(report: Report) -> list[tuple[str, int]]:
    return [(problem.path, problem.offset) for problem in report.damage]


def notes(report: Report) -> list[tuple[str, int]]:
    return [(problem.path, problem.offset) for problem in report.notes]


def frame_starts(disk: Disk, directory: str, segment: SegmentId) -> list[int]:
    """Where the segment header, and each batch and block header of a segment start."""
    header = read_header(disk, directory, segment)
    assert header is not None
    file = disk.open(f"{directory}/{segment}")
    starts = [0]
    scanner = scanner_for(header)
    for scan in scans(file.pread, scanner):
        starts += [batch.offset for batch in scan.batches]
    if header.kind is LogKind.MERGED:
        at = SEGMENT_HEADER_BYTES
        while at < file.size():
            starts.append(at)
            at += BLOCK_HEADER_BYTES + int.from_bytes(file.pread(8, at + 48), "little")
    file.close()
    return sorted(starts)


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


def test_a_whole_log_is_told_segment_by_segment(disk: MemoryDisk) -> None:
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


def test_a_log_without_messages_is_whole(disk: MemoryDisk) -> None:
    publish(disk, 0)
    assert verify(DIRECTORY, disk=disk).all_problems == []


def test_compressed_batches_are_verified_too(disk: MemoryDisk) -> None:
    publish(disk, 3, size=5000, compression="zstd")
    report = verify(DIRECTORY, disk=disk)
    assert report.all_problems == []
    assert report.segments[0].message_count == 9


def test_a_batch_larger_than_one_read_is_verified(disk: MemoryDisk) -> None:
    publish(disk, 2, size=3 * 2**20, batch_bytes=16 * 2**20)
    assert verify(DIRECTORY, disk=disk).all_problems == []


def test_progress_ends_at_the_bytes_there_are(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    seen: list[tuple[int, int]] = []
    verify(DIRECTORY, disk=disk, on_progress=lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert total == sum(len(disk.read(f"{DIRECTORY}/log.0.{roll}")) for roll in range(4))
    assert 0 <= total - done <= 4 * SEGMENT_HEADER_BYTES
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


def test_what_is_no_log_is_told_so(disk: MemoryDisk, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(rt.LogNotFound):
            verify(path)


class ReadOnlyDisk:
    """A disk on which nothing can be changed."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def open(self, path: str, *, write: bool = False) -> File:
        assert not write, path
        return self._disk.open(path)

    def list_directory(self, path: str) -> list[str]:
        return self._disk.list_directory(path)

    def size(self, path: str) -> int | None:
        return self._disk.size(path)

    def _refuse(self, *arguments: object) -> Any:
        raise AssertionError(arguments)

    create = rename = remove = make_directory = sync_directory = _refuse

    def lock(self, path: str) -> Lock:
        raise AssertionError(path)


def test_a_log_is_verified_without_writing_or_locking(disk: MemoryDisk) -> None:
    with open_publisher(disk) as publisher:
        publisher.publish(b"value")
        publisher.flush()
        assert verify(DIRECTORY, disk=ReadOnlyDisk(disk)).segments[0].message_count == 1


# Flipped bits


def test_each_flipped_bit_of_the_newest_segment_is_found_at_its_batch(disk: MemoryDisk) -> None:
    publish(disk, 3)
    assert_each_flipped_bit_is_found(disk, DIRECTORY, SegmentId(0, 0))


def test_each_flipped_bit_of_a_sealed_segment_is_found_at_its_batch(disk: MemoryDisk) -> None:
    publish(disk, 2)
    publish(disk, 1)
    assert_each_flipped_bit_is_found(disk, DIRECTORY, SegmentId(0, 0))


def test_each_flipped_bit_of_a_merged_segment_is_found_at_its_frame(disk: MemoryDisk) -> None:
    sessions = [publish(disk, 2, "a", size=1), publish(disk, 1, "b", size=1)]
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge_all(sessions, block_bytes=4096)
    assert_each_flipped_bit_is_found(disk, MERGED, SegmentId(0, 0))


def test_each_flipped_bit_of_the_table_is_found(disk: MemoryDisk) -> None:
    publish(disk, 1)
    publish(disk, 1)
    path = f"{DIRECTORY}/{TABLE_FILE}"
    for offset in range(len(disk.read(path))):
        disk.flip_bit(path, offset, offset % 8)
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == [(path, 0)], offset
        assert [segment.message_count for segment in report.segments] == [3, 3]
        disk.flip_bit(path, offset, offset % 8)


def test_each_flipped_bit_of_the_durable_end_is_noted(disk: MemoryDisk) -> None:
    publish(disk, 2)
    path = f"{DIRECTORY}/{DURABLE_FILE}"
    for offset in range(2 * RECORD_BYTES):
        disk.flip_bit(path, offset, offset % 8)
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert notes(report) == [(path, offset // RECORD_BYTES * RECORD_BYTES)], offset
        disk.flip_bit(path, offset, offset % 8)


def test_each_flipped_bit_of_an_index_is_noted(disk: MemoryDisk) -> None:
    publish(disk, 4, size=400_000, batch_bytes=2**20)
    path = f"{DIRECTORY}/index.0.0"
    assert len(disk.read(path)) >= 3 * ENTRY_BYTES
    for offset in range(0, 3 * ENTRY_BYTES, 3):
        disk.flip_bit(path, offset, offset % 8)
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert notes(report) == [(path, offset // ENTRY_BYTES * ENTRY_BYTES)], offset
        disk.flip_bit(path, offset, offset % 8)


def test_an_index_entry_that_points_elsewhere_is_noted(disk: MemoryDisk) -> None:
    publish(disk, 3)
    header = read_header(disk, DIRECTORY, SegmentId(0, 0))
    assert header is not None
    path = f"{DIRECTORY}/index.0.0"
    entries = [IndexEntry(1, SEGMENT_HEADER_BYTES, 0), IndexEntry(2, SEGMENT_HEADER_BYTES + 8, 0)]
    disk.write(path, b"".join(encode_entry(entry, header.seed) for entry in entries))
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(path, 0), (path, ENTRY_BYTES)]


def test_all_damage_is_told_not_only_the_first(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    for roll in (0, 2, 3):
        disk.flip_bit(segment_path(DIRECTORY, 0, roll), 5000, 1)
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(segment_path(DIRECTORY, 0, roll), 64) for roll in (0, 2, 3)]
    assert [segment.message_count for segment in report.segments] == [0, 3, 0, 0]


# Files lost, cut, swapped


def test_a_sealed_segment_that_is_cut_is_damage_at_its_last_batch(disk: MemoryDisk) -> None:
    publish(disk, 2)
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    starts = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    content = disk.read(path)
    for size in (len(content) - 1, starts[-1] + 1, starts[-1]):
        disk.write(path, content[:size])
        assert damage(verify(DIRECTORY, disk=disk)) == [(path, starts[-1])], size


def test_a_sealed_segment_that_has_grown_is_damage_at_its_end(disk: MemoryDisk) -> None:
    publish(disk, 2)
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    content = disk.read(path)
    disk.write(path, content + bytes(8))
    assert damage(verify(DIRECTORY, disk=disk)) == [(path, len(content))]


def test_a_segment_that_is_missing_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    disk.remove(segment_path(DIRECTORY, 0, 1))
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


def test_the_newest_segment_missing_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 2, size=2000, roll_bytes=8192)
    disk.remove(segment_path(DIRECTORY, 0, 1))
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


@pytest.mark.parametrize("roll", [0, 1])
def test_a_segment_that_was_emptied_but_not_trimmed_is_damage(disk: MemoryDisk, roll: int) -> None:
    publish(disk, 2, size=2000, roll_bytes=8192)
    disk.write(segment_path(DIRECTORY, 0, roll), b"")
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, roll), 0)]


def test_a_segment_under_another_name_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    first, second = (disk.read(segment_path(DIRECTORY, 0, roll)) for roll in (0, 1))
    disk.write(segment_path(DIRECTORY, 0, 0), second)
    disk.write(segment_path(DIRECTORY, 0, 1), first)
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(segment_path(DIRECTORY, 0, roll), 0) for roll in (0, 1)]
    assert report.segments[2].message_count == 3


def test_a_segment_of_another_session_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 1)
    other = publish(disk, 1, "other")
    disk.write(segment_path(DIRECTORY, 0, 0), disk.read(segment_path(other, 0, 0)))
    assert (segment_path(DIRECTORY, 0, 0), 0) in damage(verify(DIRECTORY, disk=disk))


def test_a_batch_at_another_place_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 3)
    path = segment_path(DIRECTORY, 0, 0)
    _, *batches = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    content = disk.read(path)
    first, second = content[batches[0] : batches[1]], content[batches[1] : batches[2]]
    disk.write(path, content[: batches[0]] + second + first + content[batches[2] :])
    assert damage(verify(DIRECTORY, disk=disk)) == [(path, batches[0])]


def test_a_segment_that_cannot_be_read_is_damage_and_the_next_is_looked_at(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    faulty = FaultyDisk(disk)
    whole = verify(DIRECTORY, disk=faulty)
    assert not whole.is_damaged
    found: set[str] = set()
    for call in range(1, 20):
        faulty = FaultyDisk(disk)
        faulty.fail("pread", at=call, error=errno.EIO)
        try:
            report = verify(DIRECTORY, disk=faulty)
        except rt.StorageFailed:
            continue
        found |= {problem.path for problem in report.damage}
        assert sum(segment.message_count for segment in report.segments) >= 6
    assert found == {segment_path(DIRECTORY, 0, roll) for roll in range(3)}


def test_a_segment_of_an_unknown_version_is_told(disk: MemoryDisk) -> None:
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    content = bytearray(disk.read(path))
    content[8:10] = (99).to_bytes(2, "little")
    content[12:16] = crc32c(bytes(content[16:64]), crc32c(bytes(content[:12]))).to_bytes(4, "little")
    disk.write(path, bytes(content))
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(path, 0)]
    assert "version" in report.damage[0].what


# What crashes leave


def test_a_torn_tail_is_reported_where_it_starts(disk: MemoryDisk) -> None:
    publish(disk, 2)
    path = segment_path(DIRECTORY, 0, 0)
    whole = disk.read(path)
    *_, last = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    for size in range(1, 80):
        disk.write(path, whole + whole[last : last + size])
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert notes(report) == [(path, len(whole))]
        assert report.segments[0].message_count == 6


def test_a_cut_below_the_durable_end_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 2)
    path = segment_path(DIRECTORY, 0, 0)
    *_, last = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    for size in (last - 1, last, last + 1):
        disk.write(path, disk.read(path)[:size])
        assert [where for where, _ in damage(verify(DIRECTORY, disk=disk))] == [path]


def test_a_batch_that_no_sync_covered_may_be_torn(disk: MemoryDisk) -> None:
    with open_publisher(disk, fsync="never", batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(3000)] * 5)
        path = segment_path(DIRECTORY, 0, 0)
        disk.write(path, disk.read(path)[:-1])
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert len(notes(report)) == 1


def test_without_a_durable_end_it_is_said_that_it_is_missing(disk: MemoryDisk) -> None:
    publish(disk, 1)
    disk.remove(f"{DIRECTORY}/{DURABLE_FILE}")
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(f"{DIRECTORY}/{DURABLE_FILE}", 0)]


def test_a_table_that_is_lost_is_damage_and_everything_else_is_verified(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    disk.remove(f"{DIRECTORY}/{TABLE_FILE}")
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(f"{DIRECTORY}/{TABLE_FILE}", 0)]
    assert [segment.message_count for segment in report.segments] == [3, 3, 3]


def test_a_hole_between_segments_is_found_without_a_table(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    disk.remove(f"{DIRECTORY}/{TABLE_FILE}")
    disk.remove(segment_path(DIRECTORY, 0, 1))
    assert (segment_path(DIRECTORY, 0, 2), 0) in damage(verify(DIRECTORY, disk=disk))


@pytest.mark.parametrize(
    "change", [{"end": 4}, {"first": 1}, {"created_ns": 1}, {"timestamp_high_ns": 5}, {"run_id": b"8 bytes."}]
)
def test_a_table_that_contradicts_a_segment_is_damage(disk: MemoryDisk, change: dict[str, Any]) -> None:
    publish(disk, 1)
    publish(disk, 1)
    table = read_table(disk, DIRECTORY)
    assert table is not None
    wrong = replace(table, segments=(replace(table.segments[0], **change),))
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", encode_table(wrong))
    assert (segment_path(DIRECTORY, 0, 0), 0) in damage(verify(DIRECTORY, disk=disk))


def test_a_table_that_leaves_a_sealed_segment_out_is_damage(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    table = read_table(disk, DIRECTORY)
    assert table is not None
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", encode_table(replace(table, segments=table.segments[:1])))
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


# Numbers


def start_at(disk: MemoryDisk, segment: SegmentId, first: int, *, dedup_id: str | None = None) -> None:
    """Begin a segment whose numbers need not follow."""
    identity = LogIdentity(LogKind.SESSION, bytes(16), "feed", dedup_id)
    writer = LogWriter.open(DIRECTORY, identity, disk=disk)
    writer.start(segment, first=first, run_id=b"8 bytes.")
    writer.sync()
    writer.close()


def test_numbers_that_jump_within_run_are_damage(disk: MemoryDisk) -> None:
    publish(disk, 1)
    start_at(disk, SegmentId(0, 1), 7)
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


def test_numbers_that_jump_over_runs_are_notes(disk: MemoryDisk) -> None:
    publish(disk, 1)
    start_at(disk, SegmentId(1, 0), 7)
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(segment_path(DIRECTORY, 1, 0), 0)]


def test_numbers_of_a_dedup_session_may_jump_over_run(disk: MemoryDisk) -> None:
    publish(disk, 1, dedup_id="twins")
    start_at(disk, SegmentId(1, 0), 7, dedup_id="twins")
    assert verify(DIRECTORY, disk=disk).all_problems == []


# Contents


def bad_messages(report: Report) -> list[tuple[str, int]]:
    return [(problem.path, problem.offset) for problem in report.bad_messages]


def forged_log(disk: MemoryDisk, content: Callable[[int], bytes]) -> None:
    """A session with one batch whose checksums hold: `content` gets the seed."""
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
def test_contents_that_no_reader_would_accept_are_bad_messages_and_no_damage(
    disk: MemoryDisk, offsets: list[int], topic_offsets: list[int], text: bytes, stamp: int, is_good: bool
) -> None:
    forged = columns(offsets, [stamp], [], topic_offsets, text)
    forged_log(
        disk, lambda seed: forge(forged, b"8 bytes.", seed=seed, timestamp_low_ns=5, timestamp_high_ns=5)
    )
    report = verify(DIRECTORY, disk=disk)
    assert not report.is_damaged
    assert bad_messages(report) == ([] if is_good else [(segment_path(DIRECTORY, 0, 0), 64)])


def test_a_bad_batch_among_small_ones_is_told_by_its_own_offset(disk: MemoryDisk) -> None:
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


# Trims


def trim(disk: Disk, directory: str, before: SegmentId) -> None:
    table = read_table(disk, directory)
    assert table is not None
    writer = LogWriter.open(directory, table.identity, disk=disk)
    writer.trim(before, TrimReason.TIME)
    writer.close()


def test_trimmed_segments_are_told_and_are_no_damage(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    trim(disk, DIRECTORY, SegmentId(0, 2))
    report = verify(DIRECTORY, disk=disk)
    assert report.all_problems == []
    assert [(segment.state, segment.message_count) for segment in report.segments] == [
        (SegmentState.TRIMMED, 0),
        (SegmentState.TRIMMED, 0),
        (SegmentState.SEALED, 3),
        (SegmentState.SEALED, 3),
    ]
    assert [segment.first for segment in report.segments] == [0, 3, 6, 9]


class HookedDisk(ReadOnlyDisk):
    """Calls `hook` before each opening of a file."""

    def __init__(self, disk: Disk, hook: Callable[[str], None]) -> None:
        super().__init__(disk)
        self._hook = hook

    def open(self, path: str, *, write: bool = False) -> File:
        self._hook(path)
        return super().open(path, write=write)


class LaggingFile:
    """A file of which the first read stops short, as if its last bytes were just being written."""

    def __init__(self, file: File, *, short_by: int) -> None:
        self._file = file
        self._short_by = short_by

    def pread(self, size: int, offset: int) -> bytes:
        data = self._file.pread(size, offset)
        if offset < SEGMENT_HEADER_BYTES:
            return data
        short_by, self._short_by = self._short_by, 0
        return data[: len(data) - short_by]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class LaggingDisk(ReadOnlyDisk):
    """A disk whose segments lag behind."""

    def __init__(self, disk: Disk, *, short_by: int) -> None:
        super().__init__(disk)
        self._short_by = short_by

    def open(self, path: str, *, write: bool = False) -> Any:
        file = super().open(path, write=write)
        return LaggingFile(file, short_by=self._short_by) if "/log." in path else file


@pytest.mark.parametrize("short_by", [1, 40, 200, 250])
def test_a_batch_that_was_being_written_when_it_was_read_is_read_again(
    disk: MemoryDisk, short_by: int
) -> None:
    publish(disk, 2)
    session = publish(disk, 1)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge_all([session])
    for directory, count in ((DIRECTORY, 9), (MERGED, 9)):
        report = verify(directory, disk=LaggingDisk(disk, short_by=short_by))
        assert report.all_problems == []
        assert sum(segment.message_count for segment in report.segments) == count


def test_a_segment_that_is_trimmed_while_it_is_verified_is_no_damage(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    for call in range(1, 8):
        copy = disk.after_power_cut("all")
        calls = 0

        def trim_now(path: str, copy: Disk = copy, call: int = call) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                trim(copy, DIRECTORY, SegmentId(0, 3))

        report = verify(DIRECTORY, disk=HookedDisk(copy, trim_now))
        assert calls >= call
        assert report.all_problems == []


# Merged logs


@pytest.fixture
def sessions(disk: MemoryDisk) -> list[str]:
    made = [publish(disk, 6, name, size=1500, roll_bytes=12_000) for name in ("a", "b")]
    publish(disk, 3, "a")
    return made


def test_a_merged_log_of_several_sessions_blocks_and_segments_is_whole(
    disk: MemoryDisk, sessions: list[str]
) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(sessions[1])
        merged.roll()
        merged.merge_all(sessions, block_bytes=12_000)
        merged.roll()
        publish(disk, 1, "b")
        merged.merge_all(sessions)
    report = verify(MERGED, disk=disk)
    assert report.all_problems == []
    assert [segment.state for segment in report.segments] == [
        SegmentState.SEALED,
        SegmentState.SEALED,
        SegmentState.ACTIVE,
    ]
    assert sum(segment.message_count for segment in report.segments) == 2 * 18 + 9 + 3
    assert sum(segment.batch_count for segment in report.segments) == 2 * 6 + 3 + 1


def test_a_trimmed_merged_log_is_whole(disk: MemoryDisk, sessions: list[str]) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        for _ in range(3):
            merged.merge(sessions[0])
            merged.merge(sessions[1])
            merged.roll()
        merged.trim(SegmentId(0, 2))
    assert verify(MERGED, disk=disk).all_problems == []


def batch_places(disk: Disk, session: str) -> list[int]:
    _, *places = frame_starts(disk, session, SegmentId(0, 0))
    return [*places, disk.size(segment_path(session, 0, 0)) or 0]


def test_a_gap_between_source_ranges_is_damage_at_its_block(disk: MemoryDisk) -> None:
    session = publish(disk, 3)
    first, second, third, end = batch_places(disk, session)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(session, first, second)
        place = merged.writer.offset
        merged.merge(session, third, end)
    report = verify(MERGED, disk=disk)
    assert damage(report) == [(segment_path(MERGED, 0, 0), place)]
    assert report.segments[0].message_count == 6


def test_an_overlap_of_source_ranges_is_damage_at_its_block(disk: MemoryDisk) -> None:
    session = publish(disk, 3)
    first, second, third, end = batch_places(disk, session)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(session, first, third)
        place = merged.writer.offset
        merged.merge(session, second, end)
    assert damage(verify(MERGED, disk=disk)) == [(segment_path(MERGED, 0, 0), place)]


def test_a_source_segment_left_out_is_damage(disk: MemoryDisk, sessions: list[str]) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(sessions[0], segment=SegmentId(0, 0))
        merged.roll()
        merged.merge(sessions[0], segment=SegmentId(0, 2))
    assert [path for path, _ in damage(verify(MERGED, disk=disk))] == [segment_path(MERGED, 0, 1)]


def test_a_dedup_group_is_whole_with_skips_and_ranges_left_out(disk: MemoryDisk) -> None:
    twins = [publish(disk, 4, name, dedup_id="twins") for name in ("a", "b")]
    ends = batch_places(disk, twins[0])
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(twins[0], ends[0], ends[1])
        assert merged.merge(twins[1], ends[0], ends[2]) == range(3, 6)
        assert merged.merge(twins[0], ends[1], ends[2]) == range(6, 6)
        merged.merge(twins[0], ends[2], ends[3])
        assert merged.merge_all(twins) == range(9, 12)
    report = verify(MERGED, disk=disk)
    assert report.all_problems == []
    assert report.segments[0].message_count == 12
    with rt.LogReader(MERGED, disk=disk) as reader:
        assert [message.number for message in reader] == list(range(12))


def test_a_dedup_group_is_whole_when_the_rest_of_a_segment_had_come_from_elsewhere(disk: MemoryDisk) -> None:
    twins = [publish(disk, 6, name, size=1500, roll_bytes=12_000, dedup_id="twins") for name in ("a", "b")]
    ends = batch_places(disk, twins[0])
    assert len(list_segments(disk, twins[0])) > 2
    for is_rolled in (False, True):
        path = f"/merged-{is_rolled}"
        with MergedLogBuilder(path, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
            assert merged.merge(twins[0], ends[0], ends[1]) == range(3)
            if is_rolled:
                merged.roll()
            merged.merge(twins[1])
            assert not merged.merge(twins[0], ends[1])
            assert merged.merge(twins[0], segment=SegmentId(0, 1))
            merged.merge_all(twins)
        report = verify(path, disk=disk)
        assert report.all_problems == []
        assert sum(segment.message_count for segment in report.segments) == 18


def batch_ranges(disk: Disk, session: str) -> list[tuple[SegmentId, int, int]]:
    """The segment, the start and the end of each batch of a session."""
    found = []
    for segment in list_segments(disk, session):
        _, *starts = frame_starts(disk, session, segment)
        ends = [*starts[1:], disk.size(f"{session}/{segment}") or 0]
        found += [(segment, start, end) for start, end in zip(starts, ends, strict=True)]
    return found


@given(st.data())
def test_a_dedup_group_is_whole_however_its_sessions_take_turns(data: st.DataObject) -> None:
    """Segments, runs, rolls and turns are drawn; the watermark decides what is merged."""
    disk = MemoryDisk()
    twins: dict[str, list[tuple[SegmentId, int, int]]] = {}
    for name in ("a", "b", "c"):
        roll_bytes = data.draw(st.sampled_from([4_096, 8_000, 2**20]), label="roll_bytes")
        for batches in data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3), label=name):
            directory = publish(disk, batches, name, size=500, roll_bytes=roll_bytes, dedup_id="twins")
        twins[directory] = batch_ranges(disk, directory)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        for turn in data.draw(st.lists(st.integers(0, 8), max_size=40), label="turns"):
            directory = list(twins)[turn % 3]
            if turn > 5 and merged.position:
                merged.roll()
            first = 3 * (len(batch_ranges(disk, directory)) - len(twins[directory]))
            if twins[directory] and first <= merged.position:
                segment, start, end = twins[directory].pop(0)
                merged.merge(directory, start, end, segment=segment)
        merged.merge_all(list(twins))
        end = merged.position
    assert verify(MERGED, disk=disk).all_problems == []
    with rt.LogReader(MERGED, disk=disk) as reader:
        assert [message.number for message in reader] == list(range(end))


def test_a_wrong_skip_is_damage(disk: MemoryDisk) -> None:
    twins = [publish(disk, 2, name, dedup_id="twins") for name in ("a", "b")]
    ends = batch_places(disk, twins[0])
    for skip in (0, 2, 4):
        path = f"/merged{skip}"
        with MergedLogBuilder(path, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
            merged.merge(twins[0], ends[0], ends[1])
            merged.merge(twins[1], ends[0], ends[2], skip=skip)
        assert [where for where, _ in damage(verify(path, disk=disk))] == [segment_path(path, 0, 0)], skip


def test_behind_a_damaged_segment_sources_need_not_join(disk: MemoryDisk, sessions: list[str]) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        for _ in range(3):
            merged.merge(sessions[0])
            merged.roll()
    disk.flip_bit(segment_path(MERGED, 0, 1), 2000, 0)
    assert [path for path, _ in damage(verify(MERGED, disk=disk))] == [segment_path(MERGED, 0, 1)]


def test_a_block_that_is_cut_short_counts_nothing(disk: MemoryDisk) -> None:
    session = publish(disk, 3)
    ends = batch_places(disk, session)
    merged = MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk)
    merged.merge(session, ends[0], ends[1])
    merged.sync()
    place = merged.writer.offset
    merged.merge(session, ends[1], ends[3])
    merged.writer.close()
    path = segment_path(MERGED, 0, 0)
    disk.write(path, disk.read(path)[: place + 96 + ends[2] - ends[1]])
    report = verify(MERGED, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(path, place)]
    assert (report.segments[0].message_count, report.segments[0].end) == (3, 3)


# Live logs


@pytest.mark.slow
@pytest.mark.parametrize("fsync", ["batch", "interval", "never"])
def test_a_log_that_is_being_written_is_never_damaged(tmp_path: Path, fsync: Any) -> None:
    lives = 3
    looked = threading.Semaphore(0)
    failures: list[BaseException] = []

    def write() -> None:
        """Publish one life after another, each while at least one more look is under way."""
        try:
            for run in range(lives):
                if run:
                    looked.acquire()
                with rt.Publisher(
                    tmp_path, "s", publisher_id="feed", roll_bytes=300_000, batch_bytes=60_000, fsync=fsync
                ) as publisher:
                    for size in range(100):
                        publisher.publish_many([bytes(size * 37 % 5000)] * 20, topic="t" * (size % 5))
                        publisher.publish(b"one more")
        except BaseException as error:
            failures.append(error)
            raise

    writer = threading.Thread(target=write)
    writer.start()
    directory = tmp_path / "s" / "sessions" / "feed"
    while not (directory / "log.0.0").exists():
        assert writer.is_alive()
    looks = 0
    while writer.is_alive():
        looked.release()
        assert verify(directory).damage == []
        looks += 1
    writer.join()
    assert failures == []
    assert looks >= lives - 1
    final = verify(directory)
    assert final.all_problems == []
    assert sum(segment.message_count for segment in final.segments) == lives * 2100


@pytest.mark.slow
def test_a_merged_log_that_is_being_written_rolled_and_trimmed_is_never_damaged(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", batch_bytes=20_000) as publisher:
        for _ in range(40):
            publisher.publish_many([bytes(1000)] * 100)
    stop = threading.Event()
    merged = MergedLogBuilder(tmp_path / "merged", cluster_id=CLUSTER, stream="s")
    places = [batch.offset for scan in session_scans(publisher.directory) for batch in scan.batches]

    def write() -> None:
        for index, (start, end) in enumerate(itertools.pairwise(places)):
            merged.merge(publisher.directory, start, end)
            if index % 3 == 0:
                merged.sync()
            if index % 10 == 9:
                merged.roll()
                merged.trim(SegmentId(0, max(index // 10 - 2, 0)))
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        is_over = False
        while not is_over:
            is_over = stop.is_set() or not writer.is_alive()
            assert verify(tmp_path / "merged").damage == []
    finally:
        writer.join()
    merged.close()
    assert stop.is_set()
    assert verify(tmp_path / "merged").all_problems == []


def test_what_is_trimmed_while_it_is_read_leaves_nothing_to_be_missed_in_the_next_segment(
    tmp_path: Path,
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", batch_bytes=200_000) as publisher:
        for _ in range(40):
            publisher.publish_many([bytes(1000)] * 200)
    places = [batch.offset for scan in session_scans(publisher.directory) for batch in scan.batches]
    with MergedLogBuilder(tmp_path / "merged", cluster_id=CLUSTER, stream="s") as merged:
        for index, (start, end) in enumerate(itertools.pairwise(places)):
            merged.merge(publisher.directory, start, end)
            if index in {0, 30}:
                merged.roll()
        walked: list[int] = []

        def on_progress(size: int, _total: int) -> None:
            walked.append(size)
            if len(walked) == 2:  # In the middle of the second segment.
                merged.trim(SegmentId(0, 2))

        report = verify(tmp_path / "merged", on_progress=on_progress)
    assert len(walked) > 2
    assert [segment.state for segment in report.segments] == [
        SegmentState.SEALED,
        SegmentState.TRIMMED,
        SegmentState.ACTIVE,
    ]
    assert report.damage == []


def session_scans(directory: str) -> Iterator[Any]:
    header = read_header(REAL, directory, list_segments(REAL, directory)[0])
    assert header is not None
    file = REAL.open(f"{directory}/{header.id}")
    yield from scans(file.pread, scanner_for(header))
    file.close()


def test_severities_are_told_apart(disk: MemoryDisk) -> None:
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    disk.write(path, disk.read(path) + b"torn")
    (problem,) = verify(DIRECTORY, disk=disk).all_problems
    assert problem.severity is Severity.NOTE
    assert str(problem).startswith(f"note: {path}, offset ")

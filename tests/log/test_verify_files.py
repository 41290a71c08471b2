"""Verifying logs with files that are missing, truncated or swapped, or as a crash leaves them."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from disks import FaultyDisk, MemoryDisk
from msgspec.structs import replace
from verify_bench import DIRECTORY, damage, frame_starts, notes, open_publisher, publish, segment_path

import rt
from rt.log.check.verify import verify
from rt.log.format.checksum import crc32c
from rt.log.format.durable_end import DURABLE_FILE
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TABLE_FILE, encode_table
from rt.log.scan.directory import read_table

# Lost, truncated and swapped files


def test_truncated_sealed_segment_is_reported_as_corruption_at_its_last_batch(disk: MemoryDisk) -> None:
    publish(disk, 2)
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    starts = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    content = disk.read(path)
    for size in (len(content) - 1, starts[-1] + 1, starts[-1]):
        disk.write(path, content[:size])
        assert damage(verify(DIRECTORY, disk=disk)) == [(path, starts[-1])], size


def test_extra_bytes_in_sealed_segment_are_reported_as_corruption_at_its_end(disk: MemoryDisk) -> None:
    publish(disk, 2)
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    content = disk.read(path)
    disk.write(path, content + bytes(8))
    assert damage(verify(DIRECTORY, disk=disk)) == [(path, len(content))]


def test_missing_segment_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    disk.remove(segment_path(DIRECTORY, 0, 1))
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


def test_missing_newest_segment_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 2, size=2000, roll_bytes=8192)
    disk.remove(segment_path(DIRECTORY, 0, 1))
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]


@pytest.mark.parametrize("roll", [0, 1])
def test_emptied_segment_without_trim_is_reported_as_corruption(disk: MemoryDisk, roll: int) -> None:
    publish(disk, 2, size=2000, roll_bytes=8192)
    disk.write(segment_path(DIRECTORY, 0, roll), b"")
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, roll), 0)]


def test_segments_with_swapped_names_are_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    first, second = (disk.read(segment_path(DIRECTORY, 0, roll)) for roll in (0, 1))
    disk.write(segment_path(DIRECTORY, 0, 0), second)
    disk.write(segment_path(DIRECTORY, 0, 1), first)
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(segment_path(DIRECTORY, 0, roll), 0) for roll in (0, 1)]
    assert report.segments[2].message_count == 3


def test_segment_of_another_session_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 1)
    other = publish(disk, 1, "other")
    disk.write(segment_path(DIRECTORY, 0, 0), disk.read(segment_path(other, 0, 0)))
    assert (segment_path(DIRECTORY, 0, 0), 0) in damage(verify(DIRECTORY, disk=disk))


def test_batches_in_swapped_order_are_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 3)
    path = segment_path(DIRECTORY, 0, 0)
    _, *batches = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    content = disk.read(path)
    first, second = content[batches[0] : batches[1]], content[batches[1] : batches[2]]
    disk.write(path, content[: batches[0]] + second + first + content[batches[2] :])
    assert damage(verify(DIRECTORY, disk=disk)) == [(path, batches[0])]


def test_unreadable_segment_is_reported_as_corruption_and_others_are_verified(disk: MemoryDisk) -> None:
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


def test_segment_of_unknown_version_is_reported_as_corruption_naming_version(disk: MemoryDisk) -> None:
    publish(disk, 1)
    path = segment_path(DIRECTORY, 0, 0)
    content = bytearray(disk.read(path))
    content[8:10] = (99).to_bytes(2, "little")
    content[12:16] = crc32c(bytes(content[16:64]), crc32c(bytes(content[:12]))).to_bytes(4, "little")
    disk.write(path, bytes(content))
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(path, 0)]
    assert "version" in report.damage[0].what


# State after crashes


def test_torn_tail_is_reported_as_note_at_its_start(disk: MemoryDisk) -> None:
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


def test_truncation_below_durable_end_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 2)
    path = segment_path(DIRECTORY, 0, 0)
    *_, last = frame_starts(disk, DIRECTORY, SegmentId(0, 0))
    for size in (last - 1, last, last + 1):
        disk.write(path, disk.read(path)[:size])
        assert [where for where, _ in damage(verify(DIRECTORY, disk=disk))] == [path]


def test_truncated_unsynced_batch_is_reported_as_note(disk: MemoryDisk) -> None:
    with open_publisher(disk, fsync="never", batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(3000)] * 5)
        path = segment_path(DIRECTORY, 0, 0)
        disk.write(path, disk.read(path)[:-1])
        report = verify(DIRECTORY, disk=disk)
        assert damage(report) == []
        assert len(notes(report)) == 1


def test_missing_durable_end_is_reported_as_note(disk: MemoryDisk) -> None:
    publish(disk, 1)
    disk.remove(f"{DIRECTORY}/{DURABLE_FILE}")
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(f"{DIRECTORY}/{DURABLE_FILE}", 0)]


def test_missing_table_is_reported_as_corruption_and_segments_are_still_verified(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    disk.remove(f"{DIRECTORY}/{TABLE_FILE}")
    report = verify(DIRECTORY, disk=disk)
    assert damage(report) == [(f"{DIRECTORY}/{TABLE_FILE}", 0)]
    assert [segment.message_count for segment in report.segments] == [3, 3, 3]


def test_hole_between_segments_is_reported_as_corruption_without_table(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    disk.remove(f"{DIRECTORY}/{TABLE_FILE}")
    disk.remove(segment_path(DIRECTORY, 0, 1))
    assert (segment_path(DIRECTORY, 0, 2), 0) in damage(verify(DIRECTORY, disk=disk))


@pytest.mark.parametrize(
    "change", [{"end": 4}, {"first": 1}, {"created_ns": 1}, {"timestamp_high_ns": 5}, {"run_id": b"8 bytes."}]
)
def test_table_contradicting_segment_is_reported_as_corruption(
    disk: MemoryDisk, change: dict[str, Any]
) -> None:
    publish(disk, 1)
    publish(disk, 1)
    table = read_table(disk, DIRECTORY)
    assert table is not None
    wrong = replace(table, segments=(replace(table.segments[0], **change),))
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", encode_table(wrong))
    assert (segment_path(DIRECTORY, 0, 0), 0) in damage(verify(DIRECTORY, disk=disk))


def test_table_omitting_sealed_segment_is_reported_as_corruption(disk: MemoryDisk) -> None:
    publish(disk, 3, size=2000, roll_bytes=8192)
    table = read_table(disk, DIRECTORY)
    assert table is not None
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", encode_table(replace(table, segments=table.segments[:1])))
    assert damage(verify(DIRECTORY, disk=disk)) == [(segment_path(DIRECTORY, 0, 1), 0)]

"""Trimming a log: the table is written before bytes are deleted, on full disks too; trims by others."""

from __future__ import annotations

import contextlib
import errno

import pytest
from batches import CLUSTER
from disks import MemoryDisk

from rt.errors import Corrupt, DiskFull
from rt.log.format.index import index_file_name
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, SealedSegment, TrimReason
from rt.log.write.writer import LogWriter

PATH = "/merged"
IDENTITY = LogIdentity(LogKind.MERGED, CLUSTER, "s")
FIRST, SECOND, THIRD = (SegmentId(0, roll) for roll in range(3))


def opened(disk: MemoryDisk, gone: tuple[SealedSegment, ...] = ()) -> LogWriter:
    return LogWriter.open(PATH, IDENTITY, disk=disk, resume=True, trimmed_elsewhere=gone)


@pytest.fixture
def disk() -> MemoryDisk:
    """Two sealed segments and an active one, without messages."""
    disk = MemoryDisk()
    writer = opened(disk)
    for segment in (FIRST, SECOND, THIRD):
        writer.start(segment, first=0, created_ns=5)
    writer.sync()
    writer.close()
    return disk


def sizes(disk: MemoryDisk) -> list[int | None]:
    return [disk.size(f"{PATH}/{segment.file_name}") for segment in (FIRST, SECOND, THIRD)]


def said(writer: LogWriter) -> list[tuple[TrimReason, int]]:
    return [(one.reason, one.trimmed_ns) for one in writer.table.segments]


def test_each_trimmed_segment_keeps_its_own_reason_and_time(disk: MemoryDisk) -> None:
    writer = opened(disk)
    gone = writer.trim_each({FIRST: (TrimReason.TIME, 7), SECOND: (TrimReason.SIZE, 8)})
    assert [one.id for one in gone] == [FIRST, SECOND]
    assert said(writer) == [(TrimReason.TIME, 7), (TrimReason.SIZE, 8)]
    assert sizes(disk) == [0, 0, 64]
    assert writer.trim_each({FIRST: (TrimReason.DISK, 9)}) == []
    assert said(writer)[0] == (TrimReason.TIME, 7)
    writer.close()
    writer = opened(disk)
    assert said(writer) == [(TrimReason.TIME, 7), (TrimReason.SIZE, 8)]
    writer.close()


def test_trim_without_space_for_table_deletes_no_segment_and_can_be_retried(disk: MemoryDisk) -> None:
    writer = opened(disk)
    disk.capacity_bytes = disk.used_bytes
    with pytest.raises(DiskFull):
        writer.trim(SECOND, TrimReason.DISK)
    assert sizes(disk) == [64, 64, 64]
    assert said(writer) == [(TrimReason.NONE, 0)] * 2
    disk.capacity_bytes = None
    writer.trim(SECOND, TrimReason.DISK)
    assert sizes(disk) == [0, 64, 64]
    writer.close()


def test_trim_on_full_disk_deletes_index_of_trimmed_segment_to_fit_table(disk: MemoryDisk) -> None:
    writer = opened(disk)
    indexes = [f"{PATH}/{index_file_name(segment)}" for segment in (FIRST, SECOND)]
    for index in indexes:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(index)
        file = disk.create(index)
        file.pwritev([bytes(4096)], 0)
        file.close()
    disk.capacity_bytes = disk.used_bytes
    writer.trim(SECOND, TrimReason.DISK)
    assert sizes(disk) == [0, 64, 64]
    assert [disk.size(index) for index in indexes] == [None, 4096]
    writer.close()


def test_next_trim_empties_segment_left_by_failed_truncate(disk: MemoryDisk) -> None:
    writer = opened(disk)
    disk.fail("truncate", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        writer.trim(SECOND, TrimReason.DISK)
    assert sizes(disk) == [64, 64, 64]
    assert said(writer)[0][0] is TrimReason.DISK
    assert writer.trim(SECOND, TrimReason.DISK) == []
    assert sizes(disk) == [0, 64, 64]
    writer.close()


def trimmed(segment: SegmentId) -> SealedSegment:
    return SealedSegment(segment, 0, 0, 640, 1, 0, 0, 2, trimmed_ns=77, reason=TrimReason.SIZE)


@pytest.mark.parametrize("damaged", [FIRST, SECOND, THIRD])
def test_corrupt_segment_trimmed_elsewhere_is_emptied_and_listed_with_given_reason(
    damaged: SegmentId, disk: MemoryDisk
) -> None:
    disk.write(f"{PATH}/{damaged.file_name}", b"x" * 63)
    with pytest.raises(Corrupt):
        opened(disk)
    writer = opened(disk, tuple(trimmed(SegmentId(0, roll)) for roll in range(damaged.roll + 1)))
    assert sizes(disk) == [0 if roll <= damaged.roll else 64 for roll in range(3)]
    assert said(writer)[: damaged.roll + 1] == [(TrimReason.SIZE, 77)] * (damaged.roll + 1)
    if damaged == THIRD:
        assert (writer.active, writer.end, writer.last_id) == (None, 0, THIRD)
        writer.start(SegmentId(0, 7), first=20, created_ns=9)
    writer.close()
    opened(disk).close()


def test_segments_trimmed_elsewhere_and_missing_here_are_not_listed(disk: MemoryDisk) -> None:
    writer = opened(disk, (trimmed(SegmentId(0, 3)), trimmed(SegmentId(0, 4))))
    assert said(writer) == [(TrimReason.NONE, 0)] * 2
    assert writer.active is not None
    writer.close()

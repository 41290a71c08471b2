"""The skips file of a copy: recorded ranges that it never received, and the reason for each."""

from __future__ import annotations

import pytest
from disks import MemoryDisk

from rt.log.format.segment_table import TrimReason
from rt.log.read.gaps import GapReport, read_skips, reason_of, record_skip


@pytest.fixture
def disk() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_directory("/copy")
    return disk


def test_skips_keep_order_and_only_newest_within_limit(
    disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rt.log.read.gaps.SKIPS_MAX", 20)
    assert read_skips(disk, "/copy") == []
    noted = [GapReport(at, at + 1, TrimReason(1 + at % 3)) for at in range(22)]
    for one in noted:
        record_skip(disk, "/copy", one)
    assert read_skips(disk, "/copy") == noted[2:]


def test_gap_reason_is_taken_from_newest_overlapping_skip() -> None:
    skips = [
        GapReport(0, 10, TrimReason.TIME),
        GapReport(20, 30, TrimReason.SIZE),
        GapReport(20, 40, TrimReason.DISK),
    ]
    ranges = [(0, 1), (9, 20), (10, 20), (25, 26), (5, 50), (40, 50)]
    assert [reason_of(skips, *one) for one in ranges] == [
        *(TrimReason.TIME, TrimReason.TIME, None),
        *(TrimReason.DISK, TrimReason.DISK, None),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"version": 2, "skips": []}',
        b'{"version": 1, "skips": [[1, 2]]}',
        b'{"version": 1, "skips": [[1, 2, "weather"]]}',
        b'{"version": 1, "skips": [[1, 2, 3]]}',
        b"[" * 10_000,
    ],
)
def test_unreadable_skips_file_reads_as_empty_and_is_rewritten(disk: MemoryDisk, content: bytes) -> None:
    disk.write("/copy/skips", content)
    assert read_skips(disk, "/copy") == []
    record_skip(disk, "/copy", GapReport(1, 2, TrimReason.SIZE))
    assert read_skips(disk, "/copy") == [GapReport(1, 2, TrimReason.SIZE)]

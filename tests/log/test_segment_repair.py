"""Repair makes a corrupt segment equal to a good copy, and survives a power cut."""

from __future__ import annotations

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from hypothesis import given
from hypothesis import strategies as st
from log_items import MERGED, SESSION, WHOLE, merge, publish

from rt.errors import Corrupt, Diverged
from rt.log.disk import File
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.write.segment_repair import check_segment, repair_segment, synced_end, valid_end
from rt.log.write.writer import LogWriter

GOOD = "/good"
FIRST, SECOND = SegmentId(0, 0), SegmentId(0, 1)


def written(path: str = MERGED) -> MemoryDisk:
    """Return a log of two segments, the second one active, with a good copy of both files in another
    directory.
    """
    disk = MemoryDisk()
    publish(disk, 100, 2000, 3000, 10, 900, roll_bytes=1 << 20)
    if path == MERGED:
        log = merge(disk, [SESSION])
        log.roll()
        publish(disk, 500, 600, 1200, roll_bytes=1 << 20)
        log.merge_all([SESSION], block_bytes=2048)
        log.sync()
        log.close()
    disk.make_directory(GOOD)
    for segment in (FIRST, SECOND):
        if disk.size(segment_path(path, segment)):
            disk.write(segment_path(GOOD, segment), disk.read(segment_path(path, segment)))
    return disk


def flip(disk: MemoryDisk, path: str, at: int) -> None:
    data = bytearray(disk.read(path))
    data[at] ^= 4
    disk.write(path, bytes(data))


def problem(disk: MemoryDisk, segment: SegmentId = FIRST, path: str = MERGED) -> int | None:
    """Return the offset at which a segment is corrupt."""
    try:
        list(check_segment(disk, path, segment, synced_end(disk, path, segment)))
    except Corrupt as error:
        return error.offset
    return None


@pytest.mark.parametrize("segment", [FIRST, SECOND])
def test_segment_check_covers_all_and_only_synced_bytes(segment: SegmentId) -> None:
    disk = written()
    size = disk.size(segment_path(MERGED, segment))
    assert synced_end(disk, MERGED, segment) == size
    assert problem(disk, segment) is None
    disk.write(segment_path(MERGED, segment), disk.read(segment_path(MERGED, segment)) + b"half a block")
    assert problem(disk, segment) is None


@given(st.data())
def test_flipped_bit_is_detected_and_repaired_to_original_bytes(data: st.DataObject) -> None:
    disk = written()
    segment = data.draw(st.sampled_from([FIRST, SECOND]))
    path = segment_path(MERGED, segment)
    good = disk.read(path)
    end = len(good)
    flip(disk, path, data.draw(st.integers(0, end - 1)))
    found = problem(disk, segment)
    assert found is not None
    assert found == valid_end(disk, MERGED, segment, end) < end
    assert repair_segment(disk, MERGED, GOOD, segment, end) == 1
    assert disk.read(path) == good


@pytest.mark.parametrize("left", [0, 30, 64, 2500])
def test_truncated_segment_is_completed_by_repair(left: int) -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    good = disk.read(path)
    disk.write(path, good[:left])
    assert repair_segment(disk, MERGED, GOOD, FIRST, len(good)) == len(good) - left
    assert disk.read(path) == good


def test_missing_segment_is_replaced_by_copy() -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    good = disk.read(path)
    disk.remove(path)
    with pytest.raises(FileNotFoundError):
        repair_segment(disk, MERGED, "/nowhere", FIRST, len(good))
    repair_segment(disk, MERGED, GOOD, FIRST, len(good))
    assert disk.read(path) == good


def test_repair_raises_diverged_and_changes_no_bytes_if_copy_differs_in_valid_bytes() -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    flip(disk, path, 5000)
    bad = disk.read(path)
    flip(disk, segment_path(GOOD, FIRST), 70)
    with pytest.raises(Diverged):
        repair_segment(disk, MERGED, GOOD, FIRST, len(bad))
    assert disk.read(path) == bad


def test_trimmed_segment_has_no_synced_bytes_to_check() -> None:
    disk = written()
    writer = LogWriter.open(MERGED, WHOLE, disk=disk)
    writer.trim(SECOND, TrimReason.SIZE)
    writer.close()
    assert synced_end(disk, MERGED, FIRST) == 0


def test_segment_is_checked_whole_without_table_if_another_follows() -> None:
    disk = written()
    disk.remove(f"{MERGED}/segments")
    assert synced_end(disk, MERGED, FIRST) == disk.size(segment_path(MERGED, FIRST))


def _repair(disk: MemoryDisk, log: Log) -> None:
    size = disk.size(segment_path(GOOD, FIRST))
    assert size is not None
    repair_segment(disk, MERGED, GOOD, FIRST, size)
    log.append(size)


def _is_good_or_still_bad(disk: MemoryDisk, log: Log) -> None:
    good = disk.read(segment_path(GOOD, FIRST))
    if log:
        assert disk.read(segment_path(MERGED, FIRST)) == good
    _repair(disk, log)
    assert disk.read(segment_path(MERGED, FIRST)) == good


def test_repair_can_be_repeated_after_power_cut_at_any_change() -> None:
    good = written()

    def prepare(disk: MemoryDisk) -> None:
        for path in good.paths():
            disk.make_directory(path.rsplit("/", 1)[0])
            disk.write(path, good.read(path))
        flip(disk, segment_path(MERGED, FIRST), 3000)
        flip(disk, segment_path(MERGED, FIRST), 5000)

    assert sweep(_repair, _is_good_or_still_bad, prepare=prepare) > 1


def test_segment_trimmed_before_repair_stays_trimmed() -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    end = synced_end(disk, MERGED, FIRST)
    flip(disk, path, 500)
    writer = LogWriter.open(MERGED, WHOLE, disk=disk, resume=True)
    writer.trim(SECOND, TrimReason.TIME)
    assert repair_segment(disk, MERGED, GOOD, FIRST, end) == 0
    assert disk.size(path) == 0
    writer.close()


@pytest.mark.parametrize("is_gone", [False, True])
def test_segment_trimmed_during_repair_stays_trimmed(is_gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    end = synced_end(disk, MERGED, FIRST)
    writer = LogWriter.open(MERGED, WHOLE, disk=disk, resume=True)
    if is_gone:
        disk.remove(path)
    else:
        flip(disk, path, 500)
    opened, renamed = disk.open, disk.rename

    def trim() -> None:
        monkeypatch.undo()
        writer.trim(SECOND, TrimReason.TIME)

    def open_(file_path: str, *, write: bool = False) -> File:
        file = opened(file_path, write=write)
        if file_path == path and write:
            trim()
        return file

    def rename(source: str, target: str) -> None:
        trim()
        renamed(source, target)

    monkeypatch.setattr(disk, "rename" if is_gone else "open", rename if is_gone else open_)
    assert repair_segment(disk, MERGED, GOOD, FIRST, end) == 0
    assert disk.size(path) == 0
    assert writer.table.segments[0].reason is TrimReason.TIME
    writer.close()

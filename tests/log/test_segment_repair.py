"""A segment is mended by a good copy, byte for byte, and by nothing else; a crash on the way does no harm."""

from __future__ import annotations

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from hypothesis import given
from hypothesis import strategies as st
from receiving import MERGED, SESSION, WHOLE, merge, publish

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
    """A log of two segments, the second active, and a good copy of both files in another directory."""
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
    """Where a segment is damaged."""
    try:
        list(check_segment(disk, path, segment, synced_end(disk, path, segment)))
    except Corrupt as error:
        return error.offset
    return None


@pytest.mark.parametrize("segment", [FIRST, SECOND])
def test_all_that_was_synced_is_checked_and_no_more(segment: SegmentId) -> None:
    disk = written()
    size = disk.size(segment_path(MERGED, segment))
    assert synced_end(disk, MERGED, segment) == size
    assert problem(disk, segment) is None
    disk.write(segment_path(MERGED, segment), disk.read(segment_path(MERGED, segment)) + b"half a block")
    assert problem(disk, segment) is None


@given(st.data())
def test_a_bit_flipped_anywhere_is_found_and_repaired_to_the_same_bytes(data: st.DataObject) -> None:
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
def test_a_segment_that_was_cut_off_is_completed(left: int) -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    good = disk.read(path)
    disk.write(path, good[:left])
    assert repair_segment(disk, MERGED, GOOD, FIRST, len(good)) == len(good) - left
    assert disk.read(path) == good


def test_a_segment_that_is_missing_is_replaced_by_the_copy() -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    good = disk.read(path)
    disk.remove(path)
    with pytest.raises(FileNotFoundError):
        repair_segment(disk, MERGED, "/nowhere", FIRST, len(good))
    repair_segment(disk, MERGED, GOOD, FIRST, len(good))
    assert disk.read(path) == good


def test_a_copy_that_differs_from_what_is_valid_changes_nothing() -> None:
    disk = written()
    path = segment_path(MERGED, FIRST)
    flip(disk, path, 5000)
    bad = disk.read(path)
    flip(disk, segment_path(GOOD, FIRST), 70)
    with pytest.raises(Diverged):
        repair_segment(disk, MERGED, GOOD, FIRST, len(bad))
    assert disk.read(path) == bad


def test_what_is_trimmed_is_not_damage() -> None:
    disk = written()
    writer = LogWriter.open(MERGED, WHOLE, disk=disk)
    writer.trim(SECOND, TrimReason.SIZE)
    writer.close()
    assert synced_end(disk, MERGED, FIRST) == 0


def test_a_segment_that_the_table_forgot_counts_whole_where_another_follows() -> None:
    disk = written()
    disk.remove(f"{MERGED}/segments")
    assert synced_end(disk, MERGED, FIRST) == disk.size(segment_path(MERGED, FIRST))


def _mend(disk: MemoryDisk, log: Log) -> None:
    size = disk.size(segment_path(GOOD, FIRST))
    assert size is not None
    repair_segment(disk, MERGED, GOOD, FIRST, size)
    log.append(size)


def _is_good_or_still_bad(disk: MemoryDisk, log: Log) -> None:
    good = disk.read(segment_path(GOOD, FIRST))
    if log:
        assert disk.read(segment_path(MERGED, FIRST)) == good
    _mend(disk, log)
    assert disk.read(segment_path(MERGED, FIRST)) == good


def test_after_a_power_cut_at_any_change_it_can_be_repaired_again() -> None:
    good = written()

    def prepare(disk: MemoryDisk) -> None:
        for path in good.paths():
            disk.make_directory(path.rsplit("/", 1)[0])
            disk.write(path, good.read(path))
        flip(disk, segment_path(MERGED, FIRST), 3000)
        flip(disk, segment_path(MERGED, FIRST), 5000)

    assert sweep(_mend, _is_good_or_still_bad, prepare=prepare) > 1


def test_a_segment_that_was_trimmed_while_good_bytes_were_fetched_stays_trimmed() -> None:
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
def test_a_segment_that_is_trimmed_while_it_is_overwritten_stays_trimmed(
    is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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

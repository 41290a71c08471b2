"""Raft's log on disk with flipped bits, and with truncated, missing or swapped files."""

from __future__ import annotations

import itertools

import pytest
from disks import MemoryDisk
from raft_log_bench import DIRECTORY, FIRST, SECOND, SYNCED_END, contents, entry, opened, written

from rt.errors import Corrupt
from sequencer.raft.storage.log_format import GROUP_HEADER_BYTES, SEGMENT_HEADER_BYTES


def is_damaged(disk: MemoryDisk) -> Corrupt | None:
    """Open the log, and return its error if it is corrupt. In that case no file has changed."""
    before = contents(disk)
    try:
        opened(disk).close()
    except Corrupt as error:
        assert contents(disk) == before
        return error
    return None


@pytest.mark.parametrize("fill", [0, 1500])
@pytest.mark.parametrize("name", ["log.1", "log.2"])
def test_flipped_bit_in_synced_bytes_raises_corrupt(name: str, fill: int) -> None:
    """Flip bits in all of a segment that has a later one, and in the groups of the newest segment."""
    whole = written(fill=fill)
    path = f"{DIRECTORY}/{name}"
    size = len(written().read(path)) if name == "log.2" else len(whole.read(path))
    for offset in range(size):
        disk = whole.after_power_cut("all")
        disk.flip_bit(path, offset, offset % 8)
        error = is_damaged(disk)
        assert error is not None, offset
        assert error.path in {path, f"{DIRECTORY}/log.2"}
        assert error.offset <= offset


@pytest.mark.parametrize("fill", [0, 1500])
def test_flipped_bit_without_synced_end_is_cut_as_torn_tail_only_in_last_group(fill: int) -> None:
    whole = written(fill=fill)
    whole.remove(SYNCED_END)
    end = len(written().read(SECOND))
    last = end - GROUP_HEADER_BYTES - 24 - len(entry(7).content) - (-len(entry(7).content) % 8)
    for offset in range(end):
        disk = whole.after_power_cut("all")
        disk.flip_bit(SECOND, offset, 3)
        if offset < last:
            assert is_damaged(disk) is not None, offset
        else:
            torn = disk.read(SECOND)[last:].rstrip(b"\0")
            log = opened(disk)
            assert (log.last, log.term, log.voted_for) == ((6, 1), 1, "a")
            assert log.cut == (SECOND, last, len(torn))


@pytest.mark.parametrize("has_synced_end", [True, False])
def test_flipped_bit_after_last_group_of_newest_segment_is_cut(has_synced_end: bool) -> None:
    whole = written(fill=1500)
    if not has_synced_end:
        whole.remove(SYNCED_END)
    end = len(written().read(SECOND))
    assert len(whole.read(SECOND)) == 1500
    for offset in range(end, 1500):
        disk = whole.after_power_cut("all")
        disk.flip_bit(SECOND, offset, offset % 8)
        log = opened(disk, fill_bytes=1500)
        assert (log.last, log.cut) == ((7, 1), (SECOND, end, offset + 1 - end))
        assert disk.after_power_cut("none").read(SECOND) == whole.read(SECOND)


@pytest.mark.parametrize("has_synced_end", [True, False])
def test_zeroed_synced_groups_raise_corrupt(has_synced_end: bool) -> None:
    """Without a synced end, the loss of the very last groups of a log cannot be detected."""
    whole = written(fill=1500)
    if not has_synced_end:
        whole.remove(SYNCED_END)
    for path, start in itertools.product([FIRST, SECOND], range(SEGMENT_HEADER_BYTES, 1000, 8)):
        content = whole.read(path)
        if not any(content[start:]) or (path == SECOND and not has_synced_end):
            continue
        disk = whole.after_power_cut("all")
        disk.write(path, content[:start] + bytes(len(content) - start))
        assert is_damaged(disk) is not None, (path, start)


def test_flipped_bit_in_synced_end_loses_nothing() -> None:
    whole = written()
    for offset in range(128):
        disk = whole.after_power_cut("all")
        disk.flip_bit(SYNCED_END, offset, offset % 8)
        log = opened(disk)
        assert (log.last, log.cut) == ((7, 1), None)


def test_lost_synced_end_is_restored_on_opening() -> None:
    for content in (None, b"", bytes(128), bytes(64), bytes(1000)):
        disk = written()
        disk.remove(SYNCED_END)
        if content is not None:
            disk.write(SYNCED_END, content)
        opened(disk).close()
        disk = disk.after_power_cut("none")
        disk.flip_bit(f"{DIRECTORY}/log.2", len(disk.read(f"{DIRECTORY}/log.2")) - 1, 0)
        assert is_damaged(disk) is not None


@pytest.mark.parametrize("fill", [0, 1500])
def test_truncated_segment_raises_corrupt_unless_only_zeros_are_missing(fill: int) -> None:
    whole = written(fill=fill)
    for path in (FIRST, SECOND):
        end = len(written().read(path))
        for size in range(0, len(whole.read(path)), 3 if fill else 1):
            disk = whole.after_power_cut("all")
            disk.write(path, disk.read(path)[:size])
            assert (is_damaged(disk) is not None) == (size < end), (path, size)


def test_missing_segments_raise_corrupt() -> None:
    disk = written()
    disk.remove(f"{DIRECTORY}/log.2")
    assert is_damaged(disk) is not None
    disk.remove(f"{DIRECTORY}/log.1")
    error = is_damaged(disk)
    assert error is not None
    assert "segments of the Raft log are missing" in str(error)


def test_files_of_another_log_raise_corrupt() -> None:
    disk, other = written(), MemoryDisk()
    opened(other, new_id=lambda: bytes(16)).close()
    disk.write(f"{DIRECTORY}/log.3", other.read(f"{DIRECTORY}/log.1"))
    assert is_damaged(disk) is not None
    disk = written()
    disk.write(SYNCED_END, other.read(SYNCED_END))
    assert is_damaged(disk) is not None

"""Spare segments of Raft's log, filled in advance."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk, Operation
from raft_log_bench import (
    DIRECTORY,
    FIRST,
    SECOND,
    SEGMENT_BYTES,
    SPARE,
    Model,
    contents,
    do,
    entry,
    opened,
    prepare,
    segments,
    written,
)

from rt.errors import DiskFull, StorageFailed
from rt.log.disk import REAL, Disk, File
from sequencer.raft.model.messages import NOWHERE
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.log_format import GROUP_HEADER_BYTES, SEGMENT_HEADER_BYTES, encode_segment_header
from sequencer.raft.storage.preallocation import SPARE_FILE

# --- Filling ---------------------------------------------------------------------------------------------


def half_full(disk: Disk, directory: str = DIRECTORY, **options: Any) -> DurableLog:
    """Return a filled log that is due for its next segment."""
    log = opened(disk, directory, **{"fill_bytes": SEGMENT_BYTES} | options)
    log.append(entry(1, size=100))
    log.sync()
    return log


def test_newest_segment_is_filled_on_opening_and_keeps_its_size_after_sync() -> None:
    disk = MemoryDisk()
    log = opened(disk, fill_bytes=2000)
    for reopened in (False, True):
        if reopened:
            log.close()
            log = opened(disk, fill_bytes=2000)
        log.append(entry(log.last.index + 1, size=90))
        before = disk.after_power_cut("none").read(FIRST) if reopened else disk.read(FIRST)
        assert len(before) == 2000
        if reopened:
            break
        log.sync()
        assert len(disk.read(FIRST)) == 2000


def test_group_larger_than_remaining_space_grows_the_file() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    log.append(entry(2, size=3000))
    log.sync()
    assert len(disk.read(FIRST)) > 3000
    assert opened(disk.after_power_cut("none"), fill_bytes=SEGMENT_BYTES).last == (2, 1)


def test_next_segment_is_the_spare_with_a_header() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    assert prepare(log)
    assert disk.read(SPARE) == bytes(SEGMENT_BYTES)
    log.set_term(4, "b")
    log.roll()
    assert SPARE not in disk.paths()
    content = disk.read(SECOND)
    assert content == encode_segment_header(log._header) + bytes(SEGMENT_BYTES - SEGMENT_HEADER_BYTES)
    log.append(entry(2))
    log.sync()
    assert len(disk.read(SECOND)) == SEGMENT_BYTES
    again = opened(disk.after_power_cut("none"))
    assert (again.last, again.term, again.voted_for, again.cut) == ((2, 1), 4, "b", None)


def test_spare_is_prepared_one_at_a_time_when_segment_is_half_full() -> None:
    disk = MemoryDisk()
    assert half_full(disk, fill_bytes=0).prepare_spare() is None
    log = opened(MemoryDisk(), fill_bytes=SEGMENT_BYTES, segment_bytes=4 * SEGMENT_HEADER_BYTES)
    assert log.prepare_spare() is None
    log.append(entry(1, size=2 * SEGMENT_HEADER_BYTES - SEGMENT_HEADER_BYTES - GROUP_HEADER_BYTES - 24))
    log.sync()
    work = log.prepare_spare()
    assert work is not None
    assert log.prepare_spare() is None, "work is under way"
    work()
    assert log.prepare_spare() is None, "there is one"
    log.roll()
    assert log.prepare_spare() is None, "the new segment is not half full"


def test_roll_does_not_wait_for_spare_and_next_roll_uses_it() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    work = log.prepare_spare()
    assert work is not None
    log.roll()
    assert len(disk.read(SECOND)) == SEGMENT_HEADER_BYTES
    work()
    log.append(entry(2))
    log.roll()
    assert len(disk.read(f"{DIRECTORY}/log.3")) == SEGMENT_BYTES
    assert opened(disk.after_power_cut("none")).last == (2, 1)


class Meanwhile:
    """A disk on which something happens before each sync of a file."""

    def __init__(self, disk: Disk, happens: Callable[[], Any]) -> None:
        self._disk, self._happens = disk, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def create(self, path: str) -> Any:
        return MeanwhileFile(self._disk.create(path), self._happens)


class MeanwhileFile:
    def __init__(self, file: File, happens: Callable[[], Any]) -> None:
        self._file, self._happens = file, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        self._happens()
        self._file.sync()


def test_unfinished_spare_is_not_used_by_roll() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    happened: list[str] = []

    def roll() -> None:
        if not happened:
            happened.append("rolled")
            log.roll()

    log._spare_disk = Meanwhile(disk, roll)
    assert prepare(log)
    assert happened == ["rolled"]
    assert len(disk.read(SECOND)) == SEGMENT_HEADER_BYTES
    assert len(disk.read(SPARE)) == SEGMENT_BYTES
    log.append(entry(2))
    log.roll()
    assert len(disk.read(f"{DIRECTORY}/log.3")) == SEGMENT_BYTES
    assert opened(disk.after_power_cut("none")).last == (2, 1)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_closing_removes_unused_spare(meanwhile: bool) -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    if meanwhile:
        log._spare_disk = Meanwhile(disk, log.close)
    prepare(log)
    assert (SPARE in disk.paths()) == (not meanwhile)
    log.close()
    log.close()
    assert SPARE not in disk.paths()
    assert disk.used_bytes == sum(map(len, contents(disk).values())), "its file is closed"
    assert log.prepare_spare() is None


@pytest.mark.parametrize("operation", ["create", "pwritev", "sync"])
@pytest.mark.parametrize(("code", "raised"), [(errno.ENOSPC, DiskFull), (errno.EIO, StorageFailed)])
def test_failed_preparation_of_spare_does_not_fail_log(
    operation: Operation, code: int, raised: type[Exception]
) -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    disk.fail(operation, error=code)
    with pytest.raises(raised, match=r"preparing a segment") as caught:
        prepare(log)
    assert SPARE in str(caught.value)
    assert SPARE not in disk.paths()
    log.append(entry(2, size=8))
    assert log.sync()
    assert prepare(log), "it is tried again"
    log.roll()
    assert len(disk.read(SECOND)) == SEGMENT_BYTES
    assert opened(disk.after_power_cut("none")).last == (2, 1)


@pytest.mark.parametrize("operation", ["pwritev", "sync", "rename"])
def test_roll_without_space_for_header_removes_spare_and_log_continues(operation: Operation) -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    prepare(log)
    disk.fail(operation, error=errno.ENOSPC)
    with pytest.raises(DiskFull, match="beginning a segment"):
        log.roll()
    assert SPARE not in disk.paths()
    log.append(entry(2))
    log.sync()
    log.roll()
    assert len(disk.read(SECOND)) == SEGMENT_HEADER_BYTES
    assert opened(disk.after_power_cut("none")).last == (2, 1)


def test_spare_left_by_failed_removal_is_created_again() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    for operation in ("sync", "remove"):
        disk.fail(operation)
    with pytest.raises(StorageFailed):
        prepare(log)
    disk.write(SPARE, b"old bytes" * 100)
    assert prepare(log)
    assert disk.read(SPARE) == bytes(SEGMENT_BYTES)


@pytest.mark.parametrize("room", [0, 1, 100, SEGMENT_BYTES])
def test_log_opens_unfilled_without_space(room: int) -> None:
    disk = MemoryDisk()
    opened(disk).close()
    disk.capacity_bytes = disk.used_bytes + room
    log = opened(disk, fill_bytes=SEGMENT_BYTES)
    is_filled = room >= SEGMENT_BYTES - SEGMENT_HEADER_BYTES
    assert len(disk.read(FIRST)) == (SEGMENT_BYTES if is_filled else SEGMENT_HEADER_BYTES)
    disk.capacity_bytes = None
    log.append(entry(1))
    log.sync()
    assert opened(disk.after_power_cut("none")).last == (1, 1)


def test_filled_log_continues_when_opened_on_full_disk() -> None:
    disk = MemoryDisk()
    half_full(disk).close()
    disk.capacity_bytes = disk.used_bytes
    log = opened(disk, fill_bytes=SEGMENT_BYTES)
    log.append(entry(2, size=20))
    assert log.sync()


def test_failed_fill_raises_storage_failed_on_opening() -> None:
    disk = MemoryDisk()
    opened(disk).close()
    disk.fail("pwritev")
    with pytest.raises(StorageFailed, match="opening the Raft log"):
        opened(disk, fill_bytes=SEGMENT_BYTES)
    assert opened(disk, fill_bytes=SEGMENT_BYTES).last == NOWHERE


def test_leftover_spare_with_header_is_removed_on_opening() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    disk.write(SPARE, encode_segment_header(log._header) + bytes(300))
    again = opened(disk, fill_bytes=SEGMENT_BYTES)
    assert (again.last, segments(disk)) == ((1, 1), ["log.1"])


def test_log_continues_while_another_thread_prepares_spares(tmp_path: Path) -> None:
    directory = str(tmp_path / "node")
    log, model = opened(REAL, directory, fill_bytes=SEGMENT_BYTES), Model()
    threads = []
    for index in range(1, 200):
        work = log.prepare_spare()
        if work is not None:
            threads.append(threading.Thread(target=work))
            threads[-1].start()
        do(log, model, "append", entry(index))
        log.sync()
        if index == 100:
            threads[-1].join()
    for thread in threads:
        thread.join()
    log.close()
    sizes = [os.path.getsize(os.path.join(directory, f"log.{n}")) for n, _ in log._segments]
    assert len(threads) > 1
    assert len(sizes) > 5
    assert SPARE_FILE not in os.listdir(directory)
    model.check(opened(REAL, directory, fill_bytes=SEGMENT_BYTES))


def test_leftover_temporary_segment_is_removed_on_opening() -> None:
    disk = written()
    disk.write(f"{DIRECTORY}/.log.3.new", encode_segment_header(opened(disk)._header))
    disk.write(f"{DIRECTORY}/.snapshot.new", b"of somebody else")
    opened(disk)
    assert [path for path in disk.paths() if "/." in path] == [f"{DIRECTORY}/.snapshot.new"]

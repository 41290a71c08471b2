"""Raft's log on disk after power cuts, full disks and disk failures."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from disks import FaultyDisk, MemoryDisk, Operation
from disks.crash_sweep import Log, sweep
from raft_log_bench import (
    DIRECTORY,
    FIRST,
    SEGMENT_BYTES,
    SPARE,
    SYNCED_END,
    Model,
    change,
    entry,
    opened,
    prepare,
)

from rt.errors import Closed, DiskFull, StorageFailed
from rt.log.disk import File
from sequencer.raft.model.messages import NOWHERE, LogIndex
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.log_format import GROUP_HEADER_BYTES

FILLS = [0, SEGMENT_BYTES]


# --- Power cuts ------------------------------------------------------------------------------------------

HISTORY: list[tuple[Any, ...]] = [
    ("set_term", 1, "a"),
    ("append", entry(1)),
    ("sync",),
    ("extend", [entry(index, 1, 250) for index in range(2, 6)]),
    ("sync",),
    ("append", entry(6, 2)),
    ("truncate", 4),
    ("extend", [entry(4, 3), entry(5, 3)]),
    ("set_term", 3, None),
    ("sync",),
    ("set_term", 3, "b"),
    ("sync",),
    ("append", entry(6, 3, 1500)),
    ("sync",),
    ("compact", 5),
    ("append", entry(7, 3)),
    ("roll",),
    ("truncate", 6),
    ("sync",),
    ("compact", 6),
    ("reset", LogIndex(20, 4)),
    ("append", entry(21, 4)),
    ("sync",),
    ("extend", [entry(22, 4), entry(23, 4, 300)]),
    ("sync",),
    ("append", entry(24, 4)),
    ("sync",),
    ("compact", 24),
]


def run(disk: MemoryDisk, promised: Log, *, fill: int = 0, late: int | None = None) -> None:
    """Run the history, and append to `promised` how many of its first steps are durable.

    Each spare is made `late` steps after it is due, or never.
    """
    log = opened(disk, fill_bytes=fill)
    promised.append(0)
    works: list[tuple[int, Callable[[], None]]] = []
    for number, (name, *arguments) in enumerate(HISTORY, 1):
        if late is not None and (work := log.prepare_spare()) is not None:
            works.append((number + late, work))
        while works and works[0][0] <= number:
            works.pop(0)[1]()
        change(log, name, *arguments)
        if name in {"sync", "roll"}:
            promised.append(number)
    log.close()


def models_after(promised: int) -> Iterator[Model]:
    """Yield the possible states of the log: with the promised steps, or also with the group that was being
    written.
    """
    model = Model()
    for number in range(len(HISTORY) + 1):
        if number:
            model.do(*HISTORY[number - 1])
        if number == promised:
            found = copy.deepcopy(model)
            found.compacted = 99
            yield found
        elif number > promised and HISTORY[number - 1][0] in {"sync", "roll"}:
            model.compacted = 99
            yield model
            return


def check(disk: MemoryDisk, promised: Log, *, fill: int = 0) -> None:
    log = opened(disk, fill_bytes=fill)
    assert SPARE not in disk.paths()
    problems = []
    for model in models_after(max(promised, default=0)):
        try:
            model.check(log)
        except AssertionError as error:
            problems.append(error)
        else:
            break
    else:
        raise AssertionError(problems)
    assert log.synced == log.last
    prepare(log)
    log.append(entry(log.last.index + 1, 9))
    log.sync()
    log.close()
    again = opened(disk, fill_bytes=fill)
    assert (again.last.term, again.cut) == (9, None)


def recover(disk: MemoryDisk, promised: Log, *, fill: int = 0) -> None:
    opened(disk, fill_bytes=fill).close()


def test_power_cut_at_any_change_loses_no_synced_entries() -> None:
    assert sweep(run, check, seeds=range(6), recover=recover, recover_cuts=3) > 1000


@pytest.mark.parametrize(
    ("fill", "late", "fill_after"),
    [
        (SEGMENT_BYTES, 0, SEGMENT_BYTES),
        (SEGMENT_BYTES, 3, SEGMENT_BYTES),
        (450, 0, 450),
        (SEGMENT_BYTES, 0, 0),
        (0, None, SEGMENT_BYTES),
    ],
    ids=["spares", "late spares", "narrow", "filled before", "filled now"],
)
def test_power_cut_at_any_change_of_filled_log_loses_no_synced_entries(
    fill: int, late: int | None, fill_after: int
) -> None:
    """Cut the power at any change: during a fill, during the work on a spare, and during the step from one
    segment into its spare.
    """
    start = partial(run, fill=fill, late=late)
    look, fix = partial(check, fill=fill_after), partial(recover, fill=fill_after)
    assert sweep(start, look, seeds=range(2), recover=fix, recover_cuts=1) > 500


def accept(disk: MemoryDisk, promised: Log) -> None:
    """Promise what recovery accepted: no later power cut may lose it."""
    log = opened(disk)
    promised.append((log.term, log.voted_for, list(log)))
    log.close()


def check_accepted(disk: MemoryDisk, promised: Log) -> None:
    log = opened(disk)
    for state in promised[1:]:
        assert (log.term, log.voted_for, list(log)) == state


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("size", [100, 1500])
def test_entries_accepted_by_recovery_survive_next_power_cut(size: int, fill: int) -> None:
    def killed(disk: MemoryDisk) -> None:
        """Recovery finds a whole group that no sync covers."""
        log = opened(disk, fill_bytes=fill)
        log.append(entry(1))
        log.sync()
        log.record_synced_end()
        log.append(entry(2, size=size))
        log.sync()

    def start(disk: MemoryDisk, promised: Log) -> None:
        promised.append(None)
        accept(disk, promised)

    assert sweep(start, check_accepted, prepare=killed) > 10


def test_kill_between_write_and_sync_keeps_group_and_recovery_makes_it_durable() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    disk.cut_power_at(disk.changes + 2)
    with pytest.raises(BaseException, match="power"):
        log.sync()
    disk = disk.after_power_cut("all")
    assert opened(disk).last == (1, 1)
    assert opened(disk.after_power_cut("none")).last == (1, 1)


@pytest.mark.parametrize("fill", FILLS)
def test_recovery_rewrites_group_left_unsynced_by_failed_sync(fill: int) -> None:
    disk = MemoryDisk()
    log = opened(disk, fill_bytes=fill)
    log.append(entry(1))
    disk.fail("sync")
    with pytest.raises(StorageFailed):
        log.sync()
    assert opened(disk).last == (1, 1)
    assert opened(disk.after_power_cut("none")).last == (1, 1)


@pytest.mark.parametrize("fill", FILLS)
def test_torn_tail_is_cut_and_reported(fill: int) -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    log.sync()
    whole = disk.read(FIRST)
    disk.write(FIRST, whole + bytes(500) + b"torn" + bytes(500))
    log = opened(disk, fill_bytes=fill)
    assert log.cut == (FIRST, len(whole), 504)
    assert log.last == (1, 1)
    assert disk.read(FIRST) == whole + bytes(1004)
    assert opened(disk.after_power_cut("none")).cut is None


def test_zeros_left_unsynced_by_failed_recovery_are_rewritten() -> None:
    """Otherwise the torn tail under the zeros would return, and would count as corruption if a later segment
    follows.
    """
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    log.sync()
    disk.write(FIRST, disk.read(FIRST) + bytes(300) + b"torn")
    disk.fail("sync")
    with pytest.raises(StorageFailed):
        opened(disk)
    log = opened(disk)
    log.append(entry(2))
    log.roll()
    again = opened(disk.after_power_cut("none"))
    assert (again.last, again.cut) == ((2, 1), None)


# --- Faults of the disk ----------------------------------------------------------------------------------


def run_stubbornly(disk: MemoryDisk, fill: int) -> int:
    """Run the history, and try each step again when the disk is full. Return how often it was full."""
    full = 0
    log = opened(disk, fill_bytes=fill)
    for name, *arguments in HISTORY:
        try:
            prepare(log)
        except DiskFull:
            full += 1
            assert SPARE not in disk.paths()
        for _ in range(3):
            try:
                change(log, name, *arguments)
                break
            except DiskFull:
                full += 1
                assert log.is_dirty or name == "roll"
        else:
            raise AssertionError(f"{name} never succeeded")
    log.close()
    return full


FULL = Model()
for _step in HISTORY:
    FULL.do(*_step)
FULL.compacted = 99


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("operation", ["create", "pwritev", "rename"])
def test_single_enospc_loses_no_entries(operation: Operation, fill: int) -> None:
    met = 0
    for at in itertools.count(1):
        disk = MemoryDisk()
        log = opened(disk)
        log.close()
        before = disk._calls[operation]
        disk.fail(operation, at=at, error=errno.ENOSPC)
        try:
            met += run_stubbornly(disk, fill)
        except DiskFull:  # The log was being opened: only its caller can try again.
            met += run_stubbornly(disk, fill)
        FULL.check(opened(disk.after_power_cut("none")))
        if disk._calls[operation] < before + at:
            break
    assert met >= 1


def test_partial_write_on_full_disk_is_undone() -> None:
    for room in range(1, 300, 7):
        disk = MemoryDisk()
        log = opened(disk)
        log.append(entry(1))
        log.sync()
        before = disk.read(f"{DIRECTORY}/log.1")
        disk.capacity_bytes = disk.used_bytes + room
        log.append(entry(2, size=300))
        for _ in range(2):
            with pytest.raises(DiskFull):
                log.sync()
            assert disk.read(f"{DIRECTORY}/log.1") == before
        assert (log.synced, log.last, log.is_dirty) == ((1, 1), (2, 1), True)
        disk.capacity_bytes = None
        assert log.sync()
        assert opened(disk.after_power_cut("none")).last == (2, 1)


def test_log_continues_in_its_segment_without_space_for_next() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    for index in range(1, 6):
        log.append(entry(index, size=290))
        size = GROUP_HEADER_BYTES + 24 + 296
        disk.capacity_bytes = disk.used_bytes + size
        assert log.sync()
    assert [path for path in disk.paths() if "log.2" in path] == []
    disk.capacity_bytes = None
    log.append(entry(6))
    log.sync()
    assert f"{DIRECTORY}/log.2" in disk.paths()
    assert opened(disk.after_power_cut("none")).last == (6, 1)


@pytest.mark.parametrize("operation", ["create", "open"])
def test_log_continues_in_its_segment_without_descriptor_for_next(operation: Operation) -> None:
    disk = MemoryDisk()
    log = opened(disk)
    disk.fail(operation, error=errno.EMFILE)
    for index in range(1, 12):
        log.append(entry(index, size=290))
        assert log.sync()
    assert f"{DIRECTORY}/log.2" in disk.paths()
    assert opened(disk.after_power_cut("none")).last == (11, 1)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("operation", ["pwritev", "sync", "create", "rename", "sync_directory", "remove"])
def test_other_disk_failures_are_final_and_lose_no_synced_entries(operation: Operation, fill: int) -> None:
    """Only failures in the work on a spare are not final, and they change nothing."""
    failures = 0
    for at in itertools.count(1):
        disk = MemoryDisk()
        opened(disk).close()
        end = disk._calls[operation] + at
        disk.fail(operation, at=at)
        promised: Log = []
        try:
            failures += run_until_it_fails(disk, promised, fill)
        except StorageFailed:  # The log was being opened.
            assert promised == []
        if disk._calls[operation] < end:
            break
        check(disk.after_power_cut("none"), promised)
    assert (failures >= 1) == (operation != "create" or not fill), "a filled log only creates spares"


def run_until_it_fails(disk: MemoryDisk, promised: Log, fill: int) -> bool:
    """Run the history, and return whether a step failed permanently."""
    log = opened(disk, fill_bytes=fill)
    for number, (name, *arguments) in enumerate(HISTORY, 1):
        with contextlib.suppress(StorageFailed):
            prepare(log)
        try:
            change(log, name, *arguments)
        except StorageFailed as error:
            check_final(log, error)
            log.close()
            return True
        if name in {"sync", "roll"}:
            promised.append(number)
    return False


def test_failed_truncation_of_partial_write_is_final() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    log.sync()
    log.append(entry(2, size=300))
    disk.capacity_bytes = disk.used_bytes + 100
    disk.fail("truncate")
    with pytest.raises(StorageFailed, match="truncating an incomplete group") as caught:
        log.sync()
    check_final(log, caught.value)
    assert opened(disk).last == (1, 1)


def check_final(log: DurableLog, first: StorageFailed) -> None:
    for again in (
        log.sync,
        log.roll,
        lambda: log.append(entry(log.last.index + 1, 9)),
        lambda: log.set_term(99, None),
        lambda: log.truncate(log.last.index),
        lambda: log.reset(LogIndex(99, 99)),
        lambda: log.compact(1),
    ):
        with pytest.raises(StorageFailed) as caught:
            again()
        assert caught.value is first


def test_enospc_in_sync_is_final() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    disk.fail("sync", error=errno.ENOSPC)
    with pytest.raises(StorageFailed):
        log.sync()
    with pytest.raises(StorageFailed):
        log.sync()
    assert log.synced == NOWHERE


def test_failed_write_of_synced_end_does_not_fail_sync() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    assert log.sync()
    before = disk.read(SYNCED_END)
    disk.fail("pwritev")
    log.record_synced_end()
    assert disk.read(SYNCED_END) == before
    assert log.synced == (1, 1)
    assert opened(disk.after_power_cut("none")).last == (1, 1)


def test_sync_of_removed_segment_raises_storage_failed() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    disk.remove(f"{DIRECTORY}/log.1")
    log.append(entry(1))
    with pytest.raises(StorageFailed, match="removed under its writer"):
        log.sync()


class Interrupting:
    """A file with a sync that is interrupted."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        raise KeyboardInterrupt


def test_interrupted_sync_is_final() -> None:
    log = opened(MemoryDisk())
    log._file = Interrupting(log._file)
    log.append(entry(1))
    with pytest.raises(KeyboardInterrupt):
        log.sync()
    with pytest.raises(StorageFailed, match="interrupted"):
        log.sync()


def test_closed_log_raises_closed() -> None:
    disk = FaultyDisk(MemoryDisk())
    log = opened(disk)
    log.close()
    log.close()
    with pytest.raises(Closed):
        log.append(entry(1))
    with pytest.raises(Closed):
        log.sync()

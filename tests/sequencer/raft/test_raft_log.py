"""The durable Raft log: what a sync returned for is there after any crash, and nothing else is made up."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, MemoryDisk, Operation
from disks.crash_sweep import Log, sweep
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.errors import Closed, Corrupt, DiskFull, LogNotFound, StorageFailed
from rt.log.disk import REAL, Disk, File
from sequencer.raft.model.messages import NOWHERE, LogIndex, RaftEntry
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.log_entries import Entries
from sequencer.raft.storage.log_format import (
    GROUP_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SYNCED_END_FILE,
    encode_segment_header,
)
from sequencer.raft.storage.preallocation import SPARE_FILE

DIRECTORY = "/node"
SYNCED_END = f"{DIRECTORY}/{SYNCED_END_FILE}"
SEGMENT_BYTES = SEGMENT_HEADER_BYTES + 300
"""So small that few groups fill a segment."""
FIRST, SECOND = f"{DIRECTORY}/log.1", f"{DIRECTORY}/log.2"
SPARE = f"{DIRECTORY}/{SPARE_FILE}"
FILLS = [0, SEGMENT_BYTES]


def opened(disk: Disk, directory: str = DIRECTORY, **options: Any) -> DurableLog:
    options = {
        "create_at": NOWHERE,
        "segment_bytes": SEGMENT_BYTES,
        "new_id": lambda: bytes(range(16)),
    } | options
    return DurableLog.open(directory, disk=disk, **options)


def entry(index: int, term: int = 1, size: int | None = None) -> RaftEntry:
    size = index * 37 % 90 if size is None else size
    return RaftEntry((b"%d/%d " % (index, term) * (size // 4 + 1))[:size], index, term)


class Model:
    """The log as a dumb list from the start of time, with what the last sync covered."""

    def __init__(self) -> None:
        self.base = NOWHERE
        self.entries: list[RaftEntry] = []
        self.term, self.vote = 0, None
        self.compacted = 0

    @property
    def last(self) -> LogIndex:
        return self.entries[-1].place if self.entries else self.base

    def do(self, name: str, *arguments: Any) -> None:
        if name == "append":
            self.entries.append(*arguments)
        elif name == "extend":
            self.entries += arguments[0]
        elif name == "truncate":
            self.entries = [entry for entry in self.entries if entry.index < arguments[0]]
        elif name == "set_term":
            self.term, self.vote = arguments
        elif name == "reset":
            self.base, self.entries = arguments[0], []
        elif name == "compact":
            self.compacted = max(self.compacted, arguments[0])

    def check(self, log: DurableLog) -> None:
        """The log is this one, but for what a compaction let go."""
        assert (log.term, log.voted_for, log.last) == (self.term, self.vote, self.last)
        kept = [entry for entry in self.entries if entry.index > log.base.index]
        assert log.entries(log.base.index + 1) == kept
        assert [*log][1:] == kept
        if log.base != self.base:
            assert self.base.index < log.base.index < self.compacted
            assert log.base in [entry.place for entry in self.entries]


def prepare(log: DurableLog) -> bool:
    """Have a spare made at once, if it is time for one."""
    work = log.prepare_spare()
    if work is not None:
        work()
    return work is not None


def extend(log: Entries, entries: Iterable[RaftEntry]) -> None:
    for one in entries:
        log.append(one)


def change(log: DurableLog, name: str, *arguments: Any) -> None:
    if name == "extend":
        extend(log, *arguments)
    else:
        getattr(log, name)(*arguments)


def do(log: DurableLog, model: Model, name: str, *arguments: Any) -> None:
    """One change of both."""
    change(log, name, *arguments)
    if name == "sync":
        log.record_synced_end()
    model.do(name, *arguments)


# --- As a sequence ---------------------------------------------------------------------------------------


@given(st.integers(0, 6), st.data())
def test_the_log_reads_like_a_list_that_starts_with_its_base(count: int, data: st.DataObject) -> None:
    base = LogIndex(40, 3)
    kept = [entry(index, 4) for index in range(41, 41 + count)]
    entries, dumb = Entries(base, kept), [RaftEntry(b"", 40, 3), *kept]
    assert (len(entries), list(entries)) == (len(dumb), dumb)
    for at in range(-count - 3, count + 4):
        if -len(dumb) <= at < len(dumb):
            assert entries[at] == dumb[at]
        else:
            with pytest.raises(IndexError):
                entries[at]
    bounds = st.none() | st.integers(-9, 9)
    key = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert entries[key] == dumb[key]


@given(st.integers(0, 6), st.integers(1, 9), st.none() | st.integers(-1, 12), st.none() | st.integers(0, 300))
def test_entries_come_up_to_a_bound_but_at_least_one(
    count: int, start: int, end: int | None, bytes_max: int | None
) -> None:
    kept = [entry(index) for index in range(1, 1 + count)]
    wanted = [one for one in kept if one.index >= start and (end is None or one.index < end)]
    while bytes_max is not None and len(wanted) > 1 and sum(len(one.content) for one in wanted) > bytes_max:
        wanted.pop()
    assert Entries(NOWHERE, kept).entries(start, end, bytes_max) == wanted


def test_an_entry_is_asked_for_by_its_index() -> None:
    log = opened(MemoryDisk(), create_at=LogIndex(7, 2))
    extend(log, [entry(8, 2), entry(9, 3)])
    assert [log.entry(8), log.entry(9)] == [entry(8, 2), entry(9, 3)]
    assert [log.term_at(index) for index in range(6, 11)] == [None, 2, 2, 3, None]
    for index in (6, 7, 10):
        with pytest.raises(IndexError):
            log.entry(index)
    with pytest.raises(IndexError):
        log.entries(7)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("append", [entry(4, 2)]),
        ("append", [entry(3, 1)]),
        ("append", [entry(5, 2)]),
        ("truncate", [0]),
        ("set_term", [4, None]),
        ("set_term", [5, "b"]),
        ("set_term", [5, None]),
        ("set_term", [6, ""]),
        ("compact", [4]),
    ],
)
def test_what_may_not_be_is_not_taken(name: str, arguments: list[Any]) -> None:
    log = opened(MemoryDisk())
    log.set_term(5, "a")
    extend(log, [entry(1, 2), entry(2, 2)])
    log.sync()
    with pytest.raises(AssertionError):
        change(log, name, *arguments)
    assert (log.last, log.term, log.voted_for, log.is_dirty) == ((2, 2), 5, "a", False)


# --- Durable and not -------------------------------------------------------------------------------------


def test_nothing_is_synced_before_a_sync_returned() -> None:
    log = opened(MemoryDisk())
    assert (log.sync(), log.is_dirty, log.synced) == (False, False, NOWHERE)
    extend(log, [entry(1), entry(2), entry(3)])
    assert (log.is_dirty, log.last, log.synced) == (True, (3, 1), NOWHERE)
    assert (log.sync(), log.is_dirty, log.synced) == (True, False, (3, 1))
    log.truncate(2)
    log.append(entry(2, 2))
    assert (log.last, log.synced) == ((2, 2), (1, 1))
    log.truncate(2)
    log.append(entry(2, 3))
    assert (log.sync(), log.synced) == (True, (2, 3))
    log.reset(LogIndex(9, 3))
    assert (log.base, log.last, log.synced) == ((9, 3), (9, 3), NOWHERE)
    assert (log.sync(), log.synced) == (True, (9, 3))


def test_what_changes_nothing_is_not_written() -> None:
    log = opened(MemoryDisk())
    log.set_term(3, "a")
    log.append(entry(1))
    log.sync()
    log.set_term(3, "a")
    log.truncate(2)
    assert not log.is_dirty


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Changes that may follow each other, with syncs, compactions and reopenings among them."""
    model, synced, history = Model(), Model(), []
    names = ["append", "extend", "set_term", "truncate", "reset", "sync", "roll", "compact", "reopen"]
    for name in draw(st.lists(st.sampled_from(names), max_size=40)):
        last, arguments = model.last, ()
        step = draw(st.integers(0, 3))
        if name == "append":
            arguments = (entry(last.index + 1, last.term + step // 2),)
        elif name == "extend":
            arguments = ([entry(last.index + at, last.term + step) for at in range(1, step + 2)],)
        elif name == "set_term":
            is_open = model.vote is None or step > 0
            arguments = (
                model.term + step,
                draw(st.sampled_from(["a", "b", None])) if is_open else model.vote,
            )
        elif name == "truncate":
            low = max(model.compacted, model.base.index + 1)
            arguments = (draw(st.integers(low, max(low, last.index))),)
        elif name == "reset":
            index = max(draw(st.integers(0, last.index + 3)), model.compacted)
            arguments = (LogIndex(index, last.term + step),)
        elif name == "compact":
            arguments = (draw(st.integers(0, last.index + 1)),)
        history.append((name, *arguments))
        if name == "reopen":
            model = copy.deepcopy(synced)
        model.do(name, *arguments)
        if name in {"sync", "roll"}:
            synced = copy.deepcopy(model)
        synced.compacted = model.compacted
    return history


@settings(max_examples=250)
@given(histories(), st.lists(st.sampled_from([0, 500, SEGMENT_BYTES, 3000]), min_size=1), st.booleans())
def test_the_log_is_what_a_dumb_list_is_through_any_history(
    history: list[tuple[Any, ...]], fills: list[int], has_spares: bool
) -> None:
    """However much is filled, and though that changes from one run to the next."""
    disk = MemoryDisk()
    filled = itertools.cycle(fills)
    log, model, synced = opened(disk, fill_bytes=next(filled)), Model(), Model()
    for name, *arguments in history:
        if has_spares:
            prepare(log)
        if name == "reopen":
            log.close()
            assert SPARE not in disk.paths()
            log, model = opened(disk, fill_bytes=next(filled)), copy.deepcopy(synced)
            assert (log.synced, log.is_dirty, log.cut) == (log.last, False, None)
        else:
            do(log, model, name, *arguments)
        if name in {"sync", "roll"}:
            synced = copy.deepcopy(model)
            assert log.synced == log.last
        synced.compacted = model.compacted
        model.check(log)
        assert log.synced <= log.last
    log.close()
    synced.check(opened(disk))


def test_the_log_lives_on_the_real_disk(tmp_path: Path) -> None:
    directory = str(tmp_path / "node")
    log, model = opened(REAL, directory), Model()
    for index in range(1, 40):
        do(log, model, "append", entry(index, index // 4))
        do(log, model, "set_term", index, f"node-{index}")
        log.sync()
    do(log, model, "extend", [entry(index, 10, 3000) for index in range(40, 2000)])
    log.sync()
    do(log, model, "compact", 36)
    log.close()
    log.close()
    assert log.base.index > 0
    model.check(opened(REAL, directory))
    assert [name for name in os.listdir(directory) if name.startswith(".")] == []


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
    """Go through the history; what is promised are its first so many steps.

    Spares are made `late` steps after it was time for them, or never.
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
    """What the log may be: what was promised, or the group that was being written too."""
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


def test_a_power_cut_at_any_change_loses_nothing_that_was_synced() -> None:
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
def test_a_power_cut_loses_nothing_of_a_filled_log(fill: int, late: int | None, fill_after: int) -> None:
    """At any change: of a fill, of the work on a spare, of the step from one segment into its spare."""
    start = partial(run, fill=fill, late=late)
    look, mend = partial(check, fill=fill_after), partial(recover, fill=fill_after)
    assert sweep(start, look, seeds=range(2), recover=mend, recover_cuts=1) > 500


def accept(disk: MemoryDisk, promised: Log) -> None:
    """Whatever recovery accepted is promised from then on."""
    log = opened(disk)
    promised.append((log.term, log.voted_for, list(log)))
    log.close()


def check_accepted(disk: MemoryDisk, promised: Log) -> None:
    log = opened(disk)
    for state in promised[1:]:
        assert (log.term, log.voted_for, list(log)) == state


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("size", [100, 1500])
def test_what_recovery_accepted_survives_the_next_power_cut(size: int, fill: int) -> None:
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


def test_a_kill_between_write_and_sync_keeps_the_group_and_makes_it_durable() -> None:
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
def test_recovery_writes_again_what_a_failed_sync_left_in_memory_only(fill: int) -> None:
    disk = MemoryDisk()
    log = opened(disk, fill_bytes=fill)
    log.append(entry(1))
    disk.fail("sync")
    with pytest.raises(StorageFailed):
        log.sync()
    assert opened(disk).last == (1, 1)
    assert opened(disk.after_power_cut("none")).last == (1, 1)


@pytest.mark.parametrize("fill", FILLS)
def test_a_torn_tail_is_cut_and_reported(fill: int) -> None:
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


def test_zeros_that_a_failed_sync_left_in_memory_only_are_written_again() -> None:
    """Else the torn tail beneath them would come back, where a later segment makes it damage."""
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
    """Go through the history; when the disk is full, try again. How often it was."""
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
def test_a_disk_that_is_full_once_loses_nothing(operation: Operation, fill: int) -> None:
    met = 0
    for at in itertools.count(1):
        disk = MemoryDisk()
        log = opened(disk)
        log.close()
        before = disk._calls[operation]
        disk.fail(operation, at=at, error=errno.ENOSPC)
        try:
            met += run_stubbornly(disk, fill)
        except DiskFull:  # On opening it, where trying again is the caller's.
            met += run_stubbornly(disk, fill)
        FULL.check(opened(disk.after_power_cut("none")))
        if disk._calls[operation] < before + at:
            break
    assert met >= 1


def test_a_write_that_fits_in_part_leaves_nothing_of_itself() -> None:
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


def test_a_log_continues_in_its_segment_while_there_is_no_room_for_the_next() -> None:
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


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("operation", ["pwritev", "sync", "create", "rename", "sync_directory", "remove"])
def test_any_other_failure_is_final_and_loses_nothing(operation: Operation, fill: int) -> None:
    """But for the work on a spare, whose failures change nothing."""
    failures = 0
    for at in itertools.count(1):
        disk = MemoryDisk()
        opened(disk).close()
        end = disk._calls[operation] + at
        disk.fail(operation, at=at)
        promised: Log = []
        try:
            failures += run_until_it_fails(disk, promised, fill)
        except StorageFailed:  # On opening it.
            assert promised == []
        if disk._calls[operation] < end:
            break
        check(disk.after_power_cut("none"), promised)
    assert (failures >= 1) == (operation != "create" or not fill), "a filled log only creates spares"


def run_until_it_fails(disk: MemoryDisk, promised: Log, fill: int) -> bool:
    """Go through the history; whether a step failed for good."""
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


def test_a_part_that_cannot_be_cut_off_again_is_final() -> None:
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


def test_a_full_disk_that_shows_only_in_the_sync_is_final() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.append(entry(1))
    disk.fail("sync", error=errno.ENOSPC)
    with pytest.raises(StorageFailed):
        log.sync()
    with pytest.raises(StorageFailed):
        log.sync()
    assert log.synced == NOWHERE


def test_a_failure_of_the_synced_end_is_no_failure_of_the_sync() -> None:
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


def test_a_segment_that_was_removed_under_its_writer_counts_for_nothing() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    disk.remove(f"{DIRECTORY}/log.1")
    log.append(entry(1))
    with pytest.raises(StorageFailed, match="removed under its writer"):
        log.sync()


class Interrupting:
    """A file whose sync is broken off."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def sync(self) -> None:
        raise KeyboardInterrupt


def test_a_sync_that_was_interrupted_is_final() -> None:
    log = opened(MemoryDisk())
    log._file = Interrupting(log._file)
    log.append(entry(1))
    with pytest.raises(KeyboardInterrupt):
        log.sync()
    with pytest.raises(StorageFailed, match="interrupted"):
        log.sync()


def test_a_closed_log_says_so() -> None:
    disk = FaultyDisk(MemoryDisk())
    log = opened(disk)
    log.close()
    log.close()
    with pytest.raises(Closed):
        log.append(entry(1))
    with pytest.raises(Closed):
        log.sync()


# --- Bit rot ---------------------------------------------------------------------------------------------


def written(*, groups: int = 5, fill: int = 0) -> MemoryDisk:
    """Two segments, of which the newest holds some groups; each is filled up to `fill`."""
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=2 * SEGMENT_BYTES, fill_bytes=fill)
    log.set_term(1, "a")
    extend(log, [entry(1), entry(2)])
    log.sync()
    log._segment_bytes = 1
    assert prepare(log) == (fill > 0)
    log._segment_bytes = 1 << 20
    log.roll()
    for index in range(3, 3 + groups):
        log.append(entry(index))
        log.sync()
    log.record_synced_end()
    log.close()
    return disk


def contents(disk: MemoryDisk) -> dict[str, bytes]:
    return {path: disk.read(path) for path in disk.paths()}


def is_damaged(disk: MemoryDisk) -> Corrupt | None:
    """What opening says; where it is damage, no file has changed."""
    before = contents(disk)
    try:
        opened(disk).close()
    except Corrupt as error:
        assert contents(disk) == before
        return error
    return None


@pytest.mark.parametrize("fill", [0, 1500])
@pytest.mark.parametrize("name", ["log.1", "log.2"])
def test_a_bit_that_flips_in_what_was_synced_stops_the_node(name: str, fill: int) -> None:
    """In all of a segment that has a later one, and in the groups of the newest."""
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
def test_without_a_synced_end_only_the_very_last_group_may_be_taken_for_torn(fill: int) -> None:
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
def test_a_bit_that_flips_after_the_groups_of_the_newest_segment_is_cut(has_synced_end: bool) -> None:
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
def test_synced_groups_that_turned_to_zeros_stop_the_node(has_synced_end: bool) -> None:
    """Without a synced end it cannot be told of the very last ones of a log."""
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


def test_a_bit_that_flips_in_the_synced_end_costs_nothing() -> None:
    whole = written()
    for offset in range(128):
        disk = whole.after_power_cut("all")
        disk.flip_bit(SYNCED_END, offset, offset % 8)
        log = opened(disk)
        assert (log.last, log.cut) == ((7, 1), None)


def test_a_synced_end_that_was_lost_is_made_again_on_opening() -> None:
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
def test_a_segment_cut_short_stops_the_node(fill: int) -> None:
    """Unless only zeros are gone."""
    whole = written(fill=fill)
    for path in (FIRST, SECOND):
        end = len(written().read(path))
        for size in range(0, len(whole.read(path)), 3 if fill else 1):
            disk = whole.after_power_cut("all")
            disk.write(path, disk.read(path)[:size])
            assert (is_damaged(disk) is not None) == (size < end), (path, size)


def test_segments_that_are_gone_stop_the_node() -> None:
    disk = written()
    disk.remove(f"{DIRECTORY}/log.2")
    assert is_damaged(disk) is not None
    disk.remove(f"{DIRECTORY}/log.1")
    error = is_damaged(disk)
    assert error is not None
    assert "segments of the Raft log are missing" in str(error)


def test_files_of_another_log_stop_the_node() -> None:
    disk, other = written(), MemoryDisk()
    opened(other, new_id=lambda: bytes(16)).close()
    disk.write(f"{DIRECTORY}/log.3", other.read(f"{DIRECTORY}/log.1"))
    assert is_damaged(disk) is not None
    disk = written()
    disk.write(SYNCED_END, other.read(SYNCED_END))
    assert is_damaged(disk) is not None


# --- Making, rolling, compacting -------------------------------------------------------------------------


def test_where_there_never_was_a_log_one_must_be_asked_for() -> None:
    disk = MemoryDisk()
    for _ in range(2):
        with pytest.raises(LogNotFound, match="no Raft log"):
            opened(disk, create_at=None)
        disk.make_directory(DIRECTORY)
    assert opened(disk, create_at=LogIndex(5, 2)).base == (5, 2)
    log = opened(disk, create_at=LogIndex(9, 9))
    assert (log.base, log.last, log.synced, log.term, log.voted_for) == ((5, 2), (5, 2), (5, 2), 2, None)


def rolled(count: int = 6) -> tuple[MemoryDisk, DurableLog]:
    """A log with one entry in each segment, and an empty one at the end."""
    disk = MemoryDisk()
    log = opened(disk)
    for index in range(1, count + 1):
        log.append(entry(index))
        log.roll()
    return disk, log


def segments(disk: MemoryDisk) -> list[str]:
    """The files of segments, oldest first."""
    numbers = [path.removeprefix(f"{DIRECTORY}/log.") for path in disk.paths() if path != SYNCED_END]
    return [f"log.{number}" for number in sorted(map(int, numbers))]


def test_rolling_an_empty_segment_does_nothing() -> None:
    disk, log = rolled(1)
    log.roll()
    assert segments(disk) == ["log.1", "log.2"]


@pytest.mark.parametrize("keep_from", range(8))
def test_compaction_lets_whole_old_segments_go(keep_from: int) -> None:
    disk, log = rolled()
    log.compact(keep_from)
    first = max(keep_from, 1)
    assert segments(disk) == [f"log.{number}" for number in range(first, 8)]
    assert (log.base.index, len(log), log.last) == (first - 1, 8 - first, (6, 1))
    again = opened(disk.after_power_cut("all"))
    assert (again.base, list(again)) == (log.base, list(log))


def test_removed_segments_may_come_back_in_any_way() -> None:
    disk, log = rolled()
    before = contents(disk)
    log.compact(5)
    log.close()
    for back in itertools.product([False, True], repeat=4):
        found = disk.after_power_cut("all")
        for number, is_back in enumerate(back, 1):
            if is_back:
                found.write(f"{DIRECTORY}/log.{number}", before[f"{DIRECTORY}/log.{number}"])
        again = opened(found)
        assert again.last == (6, 1)
        assert again.base.index <= 4
        again.compact(5)
        assert (segments(found), again.base) == (["log.5", "log.6", "log.7"], (4, 1))


def test_a_segment_lost_from_the_middle_shows_in_the_base_and_nothing_is_removed() -> None:
    disk, log = rolled()
    log.close()
    disk.remove(f"{DIRECTORY}/log.3")
    before = segments(disk)
    log = opened(disk)
    assert (log.base, segments(disk)) == ((3, 1), before)
    log.compact(3)
    assert segments(disk) == before


def test_a_cut_that_is_only_queued_does_not_let_a_segment_go_too_early() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    extend(log, [entry(index) for index in range(1, 11)])
    log.roll()
    log.truncate(8)
    log.compact(8)
    again = opened(disk.after_power_cut("none"))
    assert (again.base, again.last) == (NOWHERE, (10, 1))


def test_a_header_says_term_and_vote_again() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.set_term(7, "b")
    log.append(entry(1))
    log.roll()
    log.compact(2)
    assert segments(disk) == ["log.2"]
    again = opened(disk)
    assert (again.term, again.voted_for, again.base) == (7, "b", (1, 1))


def test_a_segment_is_rolled_when_it_is_full() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    for index in range(1, 30):
        log.append(entry(index, size=60))
        log.sync()
    sizes = [len(disk.read(f"{DIRECTORY}/{name}")) for name in segments(disk)]
    assert len(sizes) > 5
    assert all(SEGMENT_BYTES <= size < SEGMENT_BYTES + 200 for size in sizes[:-1])


# --- Filling ---------------------------------------------------------------------------------------------


def half_full(disk: Disk, directory: str = DIRECTORY, **options: Any) -> DurableLog:
    """A filled log, for whose next segment it is time."""
    log = opened(disk, directory, **{"fill_bytes": SEGMENT_BYTES} | options)
    log.append(entry(1, size=100))
    log.sync()
    return log


def test_the_newest_segment_is_filled_when_it_is_opened_and_a_sync_leaves_its_size() -> None:
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


def test_a_group_that_is_longer_than_what_is_left_makes_the_file_grow() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    log.append(entry(2, size=3000))
    log.sync()
    assert len(disk.read(FIRST)) > 3000
    assert opened(disk.after_power_cut("none"), fill_bytes=SEGMENT_BYTES).last == (2, 1)


def test_the_next_segment_is_the_spare_with_a_header() -> None:
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


def test_a_spare_is_prepared_once_the_segment_is_half_full_and_only_one_at_a_time() -> None:
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


def test_rolling_never_waits_for_a_spare_and_the_next_roll_takes_it() -> None:
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


def test_a_spare_that_is_half_made_is_not_taken() -> None:
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
def test_closing_removes_the_spare_nobody_used(meanwhile: bool) -> None:
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
def test_a_spare_that_cannot_be_made_is_no_failure_of_the_log(
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
def test_without_room_for_its_header_the_spare_goes_and_the_log_continues(operation: Operation) -> None:
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


def test_a_spare_that_could_not_be_removed_is_made_again() -> None:
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
def test_a_log_opens_unfilled_where_there_is_no_room(room: int) -> None:
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


def test_a_filled_log_that_is_opened_on_a_full_disk_can_continue() -> None:
    disk = MemoryDisk()
    half_full(disk).close()
    disk.capacity_bytes = disk.used_bytes
    log = opened(disk, fill_bytes=SEGMENT_BYTES)
    log.append(entry(2, size=20))
    assert log.sync()


def test_a_failure_while_filling_is_a_failure_of_the_opening() -> None:
    disk = MemoryDisk()
    opened(disk).close()
    disk.fail("pwritev")
    with pytest.raises(StorageFailed, match="opening the Raft log"):
        opened(disk, fill_bytes=SEGMENT_BYTES)
    assert opened(disk, fill_bytes=SEGMENT_BYTES).last == NOWHERE


def test_a_leftover_spare_is_removed_even_with_a_header() -> None:
    disk = MemoryDisk()
    log = half_full(disk)
    disk.write(SPARE, encode_segment_header(log._header) + bytes(300))
    again = opened(disk, fill_bytes=SEGMENT_BYTES)
    assert (again.last, segments(disk)) == ((1, 1), ["log.1"])


def test_spares_are_made_by_another_thread_while_the_log_continues(tmp_path: Path) -> None:
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


def test_what_was_being_written_aside_is_removed() -> None:
    disk = written()
    disk.write(f"{DIRECTORY}/.log.3.new", encode_segment_header(opened(disk)._header))
    disk.write(f"{DIRECTORY}/.snapshot.new", b"of somebody else")
    opened(disk)
    assert [path for path in disk.paths() if "/." in path] == [f"{DIRECTORY}/.snapshot.new"]

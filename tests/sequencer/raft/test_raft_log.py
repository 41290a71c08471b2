"""Raft's log on disk: reading, appending, syncing, rolling and compaction."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from raft_log_bench import (
    DIRECTORY,
    SEGMENT_BYTES,
    SPARE,
    Model,
    change,
    contents,
    do,
    entry,
    extend,
    opened,
    prepare,
    rolled,
    segments,
)

from rt.errors import LogNotFound
from rt.log.disk import REAL
from sequencer.raft.model.messages import NOWHERE, LogIndex, RaftEntry
from sequencer.raft.storage.log_entries import Entries

# --- As a sequence ---------------------------------------------------------------------------------------


@given(st.integers(0, 6), st.data())
def test_log_indexes_and_slices_as_list_starting_with_its_base(count: int, data: st.DataObject) -> None:
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
def test_read_entries_stay_within_byte_limit_but_include_at_least_one(
    count: int, start: int, end: int | None, bytes_max: int | None
) -> None:
    kept = [entry(index) for index in range(1, 1 + count)]
    wanted = [one for one in kept if one.index >= start and (end is None or one.index < end)]
    while bytes_max is not None and len(wanted) > 1 and sum(len(one.content) for one in wanted) > bytes_max:
        wanted.pop()
    assert Entries(NOWHERE, kept).entries(start, end, bytes_max) == wanted


def test_entries_and_terms_are_read_by_index() -> None:
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
def test_invalid_change_raises_assertion_error_and_changes_nothing(name: str, arguments: list[Any]) -> None:
    log = opened(MemoryDisk())
    log.set_term(5, "a")
    extend(log, [entry(1, 2), entry(2, 2)])
    log.sync()
    with pytest.raises(AssertionError):
        change(log, name, *arguments)
    assert (log.last, log.term, log.voted_for, log.is_dirty) == ((2, 2), 5, "a", False)


# --- Durable and not -------------------------------------------------------------------------------------


def test_entries_count_as_synced_only_after_sync() -> None:
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


def test_changes_without_effect_leave_log_clean() -> None:
    log = opened(MemoryDisk())
    log.set_term(3, "a")
    log.append(entry(1))
    log.sync()
    log.set_term(3, "a")
    log.truncate(2)
    assert not log.is_dirty


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Draw a valid sequence of changes, with syncs, compactions and reopenings."""
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
def test_log_matches_list_model_through_any_history(
    history: list[tuple[Any, ...]], fills: list[int], has_spares: bool
) -> None:
    """The size of the fill may be any, and may differ from one run to the next."""
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


def test_log_on_real_disk_matches_list_model_after_reopening(tmp_path: Path) -> None:
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


# --- Making, rolling, compacting -------------------------------------------------------------------------


def test_opening_missing_log_raises_log_not_found_without_create_at() -> None:
    disk = MemoryDisk()
    for _ in range(2):
        with pytest.raises(LogNotFound, match="no Raft log"):
            opened(disk, create_at=None)
        disk.make_directory(DIRECTORY)
    assert opened(disk, create_at=LogIndex(5, 2)).base == (5, 2)
    log = opened(disk, create_at=LogIndex(9, 9))
    assert (log.base, log.last, log.synced, log.term, log.voted_for) == ((5, 2), (5, 2), (5, 2), 2, None)


def test_rolling_empty_segment_does_nothing() -> None:
    disk, log = rolled(1)
    log.roll()
    assert segments(disk) == ["log.1", "log.2"]


@pytest.mark.parametrize("keep_from", range(8))
def test_compaction_removes_whole_old_segments(keep_from: int) -> None:
    disk, log = rolled()
    log.compact(keep_from)
    first = max(keep_from, 1)
    assert segments(disk) == [f"log.{number}" for number in range(first, 8)]
    assert (log.base.index, len(log), log.last) == (first - 1, 8 - first, (6, 1))
    again = opened(disk.after_power_cut("all"))
    assert (again.base, list(again)) == (log.base, list(log))


def test_log_opens_with_any_removed_segments_restored() -> None:
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


def test_missing_middle_segment_moves_base_and_no_segment_is_removed() -> None:
    disk, log = rolled()
    log.close()
    disk.remove(f"{DIRECTORY}/log.3")
    before = segments(disk)
    log = opened(disk)
    assert (log.base, segments(disk)) == ((3, 1), before)
    log.compact(3)
    assert segments(disk) == before


def test_compaction_keeps_segment_until_truncation_is_synced() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    extend(log, [entry(index) for index in range(1, 11)])
    log.roll()
    log.truncate(8)
    log.compact(8)
    again = opened(disk.after_power_cut("none"))
    assert (again.base, again.last) == (NOWHERE, (10, 1))


def test_segment_header_repeats_term_and_vote() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.set_term(7, "b")
    log.append(entry(1))
    log.roll()
    log.compact(2)
    assert segments(disk) == ["log.2"]
    again = opened(disk)
    assert (again.term, again.voted_for, again.base) == (7, "b", (1, 1))


def test_segment_rolls_when_full() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    for index in range(1, 30):
        log.append(entry(index, size=60))
        log.sync()
    sizes = [len(disk.read(f"{DIRECTORY}/{name}")) for name in segments(disk)]
    assert len(sizes) > 5
    assert all(SEGMENT_BYTES <= size < SEGMENT_BYTES + 200 for size in sizes[:-1])

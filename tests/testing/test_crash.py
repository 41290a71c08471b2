"""The sweep: it cuts everywhere, finds what is planted, and names what a replay repeats."""

from __future__ import annotations

import doctest
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from disks import MemoryDisk, PowerCut, crash_sweep
from disks.crash_sweep import Cut, replay, sweep

from rt.log.disk import File

Log = list[Any]


def prepare(disk: MemoryDisk) -> None:
    disk.write("/log", b"")


def append(disk: MemoryDisk, log: Log, *, sync: bool = True) -> None:
    """Four records, each promised when it is there."""
    file = disk.open("/log", write=True)
    for number in range(4):
        add(file, log, number, sync=sync)


def add(file: File, log: Log, number: int, *, sync: bool = True) -> None:
    file.pwritev([bytes([number + 1])], number)
    if sync:
        file.sync()
    log.append(number)


def append_carelessly(disk: MemoryDisk, log: Log) -> None:
    append(disk, log, sync=False)


def keep_promises(disk: MemoryDisk, log: Log) -> None:
    content = disk.read("/log")
    assert all(content[number : number + 1] == bytes([number + 1]) for number in log), (content, log)


def accept(disk: MemoryDisk, log: Log, *, sync: bool = True) -> None:
    """Recover: from now on, every record that is there is promised."""
    file = disk.open("/log", write=True)
    content = file.pread(file.size(), 0)
    whole = next((at for at, byte in enumerate(content) if byte != at + 1), len(content))
    file.truncate(whole)
    if sync:
        file.sync()
    log.extend(range(whole))


def accept_carelessly(disk: MemoryDisk, log: Log) -> None:
    accept(disk, log, sync=False)


def nothing(disk: MemoryDisk, log: Log) -> None:
    """Neither changes nor checks anything."""


def test_the_example_of_the_module_runs() -> None:
    failed, attempted = doctest.testmod(crash_sweep)
    assert (failed, attempted > 0) == (0, True)


def test_each_change_is_cut_and_the_end_too_in_every_way() -> None:
    seen = []

    def note(disk: MemoryDisk, log: Log) -> None:
        seen.append((len(log), disk.read("/log")))

    assert sweep(append, note, prepare=prepare, strategies=["none"]) == 9
    assert [promised for promised, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert seen[-1] == (4, b"\1\2\3\4")
    assert sweep(append, note, prepare=prepare, strategies=["all", "none"], seeds=range(9)) == 9 * 2
    assert sweep(append, note, prepare=prepare, strategies=["some"], seeds=range(9)) == 9 * 9
    assert sweep(append, note, prepare=prepare) == 9 * 6


def test_a_program_without_changes_is_checked_once() -> None:
    assert sweep(nothing, nothing, strategies=["none"]) == 1


def test_kept_promises_pass() -> None:
    assert sweep(append, keep_promises, prepare=prepare, recover=accept) == 9 * 6 * 7


def test_a_promise_without_a_sync_is_caught_with_the_cut_that_shows_it() -> None:
    with pytest.raises(AssertionError) as caught:
        sweep(append_carelessly, keep_promises, prepare=prepare)
    cut = Cut(change=2, keep="none")
    assert f"cuts=[{cut}]" in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(AssertionError, match="assert"):
        replay(append_carelessly, keep_promises, [cut], prepare=prepare)
    replay(append_carelessly, keep_promises, [Cut(change=1, keep="none")], prepare=prepare)


def test_a_recovery_that_does_not_sync_what_it_accepts_is_caught_by_the_second_cut() -> None:
    assert sweep(append, keep_promises, prepare=prepare) > 0
    with pytest.raises(AssertionError) as caught:
        sweep(append, keep_promises, prepare=prepare, recover=accept_carelessly)
    message = str(caught.value)
    assert message.count("Cut(") == 2
    first, second = Cut(change=2, keep="all"), Cut(change=2, keep="none")
    with pytest.raises(AssertionError, match="assert"):
        replay(append, keep_promises, [first, second], prepare=prepare, recover=accept_carelessly)
    replay(append, keep_promises, [first, second], prepare=prepare, recover=accept)


def test_a_named_failure_of_a_drawn_second_cut_can_be_replayed() -> None:
    with pytest.raises(AssertionError) as caught:
        sweep(append, keep_promises, prepare=prepare, recover=accept_carelessly)
    named = str(caught.value).split("cuts=")[1].removesuffix(")")
    candidates = [
        [Cut(first, keep, seed), Cut(second, other, other_seed)]
        for first in range(1, 10)
        for second in range(1, 4)
        for keep in ("all", "none", "some")
        for other in ("all", "none", "some")
        for seed in range(4)
        for other_seed in range(4)
    ]
    (cuts,) = [cuts for cuts in candidates if str(cuts) == named]
    with pytest.raises(AssertionError, match="assert"):
        replay(append, keep_promises, cuts, prepare=prepare, recover=accept_carelessly)


def test_a_recovery_that_fails_is_named_with_the_cut_that_it_met() -> None:
    def refuse(disk: MemoryDisk, log: Log) -> None:
        if disk.size("/log"):
            raise ValueError("not empty")

    with pytest.raises(AssertionError, match=r"not empty.*cuts=\[Cut\(change=2, keep='all', seed=0\)\]"):
        sweep(append, nothing, prepare=prepare, recover=refuse)


def test_second_cuts_are_bounded_and_drawn_alike_each_time() -> None:
    def seen(recover_cuts: int) -> tuple[int, list[bytes]]:
        found: list[bytes] = []
        count = sweep(
            append,
            lambda disk, log: found.append(disk.read("/log")),
            prepare=prepare,
            recover=accept,
            recover_cuts=recover_cuts,
        )
        return count, found

    assert [seen(cuts)[0] for cuts in (0, 2, 10_000)] == [9 * 6, 9 * 6 * 3, 9 * 6 * (1 + 3 * 6)]
    assert seen(2) == seen(2)


def test_the_log_of_one_check_is_not_the_log_of_the_next() -> None:
    def spoil(disk: MemoryDisk, log: Log) -> None:
        keep_promises(disk, log)
        log.append(99)

    assert sweep(append, spoil, prepare=prepare, recover=accept) > 0


def test_a_program_that_swallows_the_cut_and_promises_is_caught() -> None:
    def deaf(disk: MemoryDisk, log: Log) -> None:
        file = disk.open("/log", write=True)
        for number in range(4):
            try:
                add(file, log, number)
            except PowerCut:
                log.append(number)

    with pytest.raises(AssertionError, match="a power cut broke it"):
        sweep(deaf, keep_promises, prepare=prepare)


def test_an_error_of_the_program_itself_is_no_power_cut() -> None:
    def broken(disk: MemoryDisk, log: Log) -> None:
        append(disk, log)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        sweep(broken, keep_promises, prepare=prepare)


def test_an_error_that_only_a_later_run_makes_is_not_taken_for_a_power_cut() -> None:
    runs = itertools.count()

    def breaking(disk: MemoryDisk, log: Log) -> None:
        if next(runs):
            raise ValueError("broken")
        append(disk, log)

    with pytest.raises(ValueError, match="broken"):
        sweep(breaking, nothing, prepare=prepare)


def test_how_the_program_dies_of_the_cut_does_not_matter() -> None:
    def translating(disk: MemoryDisk, log: Log) -> None:
        try:
            append(disk, log)
        except PowerCut as cut:
            raise ValueError("the disk is gone") from cut

    assert sweep(translating, keep_promises, prepare=prepare) == 9 * 6


def test_a_program_may_sync_on_another_thread() -> None:
    def threaded(disk: MemoryDisk, log: Log) -> None:
        with ThreadPoolExecutor(1) as other:
            file = disk.open("/log", write=True)
            for number in range(4):
                file.pwritev([bytes([number + 1])], number)
                other.submit(file.sync).result()
                log.append(number)

    assert sweep(threaded, keep_promises, prepare=prepare) == 9 * 6


def test_a_second_cut_needs_a_recovery() -> None:
    with pytest.raises(ValueError, match="recover"):
        replay(append, nothing, [Cut(1, "all"), Cut(1, "all")], prepare=prepare)

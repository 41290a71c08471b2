"""Tests the crash sweep: it cuts power at every change, detects bugs, and reports replayable cuts."""

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
    """Append four records, and promise each after it is written."""
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
    """Recover, and promise every record that is found."""
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
    """Change and check nothing."""


def test_module_doctest_passes() -> None:
    failed, attempted = doctest.testmod(crash_sweep)
    assert (failed, attempted > 0) == (0, True)


def test_sweep_cuts_at_every_change_and_at_end_with_every_strategy() -> None:
    seen = []

    def note(disk: MemoryDisk, log: Log) -> None:
        seen.append((len(log), disk.read("/log")))

    assert sweep(append, note, prepare=prepare, strategies=["none"]) == 9
    assert [promised for promised, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert seen[-1] == (4, b"\1\2\3\4")
    assert sweep(append, note, prepare=prepare, strategies=["all", "none"], seeds=range(9)) == 9 * 2
    assert sweep(append, note, prepare=prepare, strategies=["some"], seeds=range(9)) == 9 * 9
    assert sweep(append, note, prepare=prepare) == 9 * 6


def test_sweep_checks_program_without_changes_once() -> None:
    assert sweep(nothing, nothing, strategies=["none"]) == 1


def test_sweep_passes_program_with_synced_writes() -> None:
    assert sweep(append, keep_promises, prepare=prepare, recover=accept) == 9 * 6 * 7


def test_sweep_detects_missing_sync_and_reports_replayable_cut() -> None:
    with pytest.raises(AssertionError) as caught:
        sweep(append_carelessly, keep_promises, prepare=prepare)
    cut = Cut(change=2, keep="none")
    assert f"cuts=[{cut}]" in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(AssertionError, match="assert"):
        replay(append_carelessly, keep_promises, [cut], prepare=prepare)
    replay(append_carelessly, keep_promises, [Cut(change=1, keep="none")], prepare=prepare)


def test_sweep_detects_recovery_without_sync_by_second_cut() -> None:
    assert sweep(append, keep_promises, prepare=prepare) > 0
    with pytest.raises(AssertionError) as caught:
        sweep(append, keep_promises, prepare=prepare, recover=accept_carelessly)
    message = str(caught.value)
    assert message.count("Cut(") == 2
    first, second = Cut(change=2, keep="all"), Cut(change=2, keep="none")
    with pytest.raises(AssertionError, match="assert"):
        replay(append, keep_promises, [first, second], prepare=prepare, recover=accept_carelessly)
    replay(append, keep_promises, [first, second], prepare=prepare, recover=accept)


def test_reported_second_cut_reproduces_failure_in_replay() -> None:
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


def test_sweep_reports_failing_recovery_with_its_cut() -> None:
    def refuse(disk: MemoryDisk, log: Log) -> None:
        if disk.size("/log"):
            raise ValueError("not empty")

    with pytest.raises(AssertionError, match=r"not empty.*cuts=\[Cut\(change=2, keep='all', seed=0\)\]"):
        sweep(append, nothing, prepare=prepare, recover=refuse)


def test_second_cuts_are_limited_and_deterministic() -> None:
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


def test_log_changes_in_one_check_do_not_affect_next_check() -> None:
    def spoil(disk: MemoryDisk, log: Log) -> None:
        keep_promises(disk, log)
        log.append(99)

    assert sweep(append, spoil, prepare=prepare, recover=accept) > 0


def test_sweep_detects_program_promising_after_caught_power_cut() -> None:
    def deaf(disk: MemoryDisk, log: Log) -> None:
        file = disk.open("/log", write=True)
        for number in range(4):
            try:
                add(file, log, number)
            except PowerCut:
                log.append(number)

    with pytest.raises(AssertionError, match="a power cut broke it"):
        sweep(deaf, keep_promises, prepare=prepare)


def test_program_error_without_power_cut_propagates_from_sweep() -> None:
    def broken(disk: MemoryDisk, log: Log) -> None:
        append(disk, log)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        sweep(broken, keep_promises, prepare=prepare)


def test_program_error_in_later_run_is_not_treated_as_power_cut() -> None:
    runs = itertools.count()

    def breaking(disk: MemoryDisk, log: Log) -> None:
        if next(runs):
            raise ValueError("broken")
        append(disk, log)

    with pytest.raises(ValueError, match="broken"):
        sweep(breaking, nothing, prepare=prepare)


def test_sweep_accepts_program_translating_power_cut_to_another_error() -> None:
    def translating(disk: MemoryDisk, log: Log) -> None:
        try:
            append(disk, log)
        except PowerCut as cut:
            raise ValueError("the disk is gone") from cut

    assert sweep(translating, keep_promises, prepare=prepare) == 9 * 6


def test_sweep_supports_program_syncing_on_another_thread() -> None:
    def threaded(disk: MemoryDisk, log: Log) -> None:
        with ThreadPoolExecutor(1) as other:
            file = disk.open("/log", write=True)
            for number in range(4):
                file.pwritev([bytes([number + 1])], number)
                other.submit(file.sync).result()
                log.append(number)

    assert sweep(threaded, keep_promises, prepare=prepare) == 9 * 6


def test_replay_of_second_cut_without_recovery_raises_value_error() -> None:
    with pytest.raises(ValueError, match="recover"):
        replay(append, nothing, [Cut(1, "all"), Cut(1, "all")], prepare=prepare)

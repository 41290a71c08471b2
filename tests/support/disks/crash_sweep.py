"""Simulates power cuts at every change that a program makes, and at every change of its recovery.

`sweep` runs a program on a `MemoryDisk`, cuts the power at each change in turn, and calls a check on every
disk that may result. A failure lists its cuts, and `replay` repeats them. Invariant: what the program noted
in its log before the cut is a promise, and the check verifies it.

>>> from rt.log.whole_files import write_whole
>>> def prepare(disk):
...     disk.make_directory("/data")
...     disk.write("/data/name", b"old")
>>> def run(disk, log):
...     write_whole(disk, "/data/name", b"new")
...     log.append("new is durable")
>>> def check(disk, log):
...     assert disk.read("/data/name") in ([b"new"] if log else [b"old", b"new"])
>>> sweep(run, check, prepare=prepare)
36
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from disks import Keep, MemoryDisk, PowerCut

Log: TypeAlias = list[Any]
Step: TypeAlias = Callable[[MemoryDisk, Log], None]
Prepare: TypeAlias = Callable[[MemoryDisk], None]


@dataclass(frozen=True, slots=True)
class Cut:
    """A power cut at the `change`-th change of a step. `keep` and `seed` are passed to `after_power_cut`.

    If the step does not reach `change`, the cut comes just after it returned.
    """

    change: int
    keep: Keep
    seed: int = 0


def sweep(
    run: Step,
    check: Step,
    *,
    strategies: Sequence[Keep] = ("all", "none", "some"),
    seeds: Sequence[int] = range(4),
    prepare: Prepare | None = None,
    recover: Step | None = None,
    recover_cuts: int = 6,
) -> int:
    """Cut the power at each change of `run`, and once after it. Returns the number of disks checked.

    `run(disk, log)` must make the same changes each time. It appends its promises to `log`, for instance
    after each flush. `check(disk, log)` gets a disk of its own, and raises if a promise is broken. `prepare`
    sets up the new disk of each run, without cuts. `seeds` apply to "some" only, as the other strategies
    leave one disk.

    `check` must be deterministic: a disk that several cuts of a run leave is checked once, but counted each
    time.

    With `recover`, each disk is also recovered with a second cut at a change of `recover(disk, log)` or after
    it, and the result is checked. There are `recover_cuts` such cuts for each disk, the same in every sweep.

    Raises `AssertionError` with the cuts to replay, from the error of the check or of the recovery.
    """
    checked = 0
    for change in range(1, _count_changes(run, _prepared(prepare), []) + 2):
        dead = _prepared(prepare)
        log: Log = []
        _run_until(change, run, dead, log)
        once = _Once(check)
        for cut in _cuts(change, strategies, seeds):
            with _explained(cut):
                once(dead.after_power_cut(cut.keep, cut.seed), log)
            checked += 1
            if recover is not None:
                points = _recovery_cuts(recover, dead, log, cut, strategies, seeds)
                drawn = random.Random(repr(cut)).sample(points, min(recover_cuts, len(points)))
                for second in drawn:
                    _check_recovery(recover, once, dead, log, cut, second)
                checked += len(drawn)
    return checked


def replay(
    run: Step,
    check: Step,
    cuts: Sequence[Cut],
    *,
    prepare: Prepare | None = None,
    recover: Step | None = None,
) -> None:
    """Repeat the cuts of a failed `sweep`, the first in `run`, the others in `recover`, and check."""
    if len(cuts) > 1 and recover is None:
        raise ValueError("a second cut needs recover")
    disk = _prepared(prepare)
    log: Log = []
    for step, cut in zip(itertools.chain([run], itertools.repeat(recover)), cuts, strict=False):
        assert step is not None
        _run_until(cut.change, step, disk, log)
        disk = disk.after_power_cut(cut.keep, cut.seed)
    check(disk, log)


class _Once:
    """A check that runs once for each disk and log. It gets a log of its own."""

    def __init__(self, check: Step) -> None:
        self._check = check
        self._sound: defaultdict[Hashable, list[Log]] = defaultdict(list)

    def __call__(self, disk: MemoryDisk, log: Log) -> None:
        logs = self._sound[disk.state()]
        if log not in logs:
            self._check(disk, list(log))
            logs.append(list(log))


def _prepared(prepare: Prepare | None) -> MemoryDisk:
    disk = MemoryDisk()
    if prepare is not None:
        prepare(disk)
    return disk


def _count_changes(step: Step, disk: MemoryDisk, log: Log) -> int:
    before = disk.changes
    step(disk, log)
    return disk.changes - before


def _run_until(change: int, step: Step, disk: MemoryDisk, log: Log) -> None:
    disk.cut_power_at(disk.changes + change)
    try:
        step(disk, log)
    except PowerCut:
        pass
    except Exception:
        # After the power cut, an error is only the program's reaction to it.
        if not disk.is_off:
            raise


def _cuts(change: int, strategies: Sequence[Keep], seeds: Sequence[int]) -> Iterator[Cut]:
    for keep in strategies:
        for seed in seeds if keep == "some" else (0,):
            yield Cut(change, keep, seed)


def _recovery_cuts(
    recover: Step, dead: MemoryDisk, log: Log, cut: Cut, strategies: Sequence[Keep], seeds: Sequence[int]
) -> list[Cut]:
    with _explained(cut):
        changes = _count_changes(recover, dead.after_power_cut(cut.keep, cut.seed), list(log))
    return [second for change in range(1, changes + 2) for second in _cuts(change, strategies, seeds)]


def _check_recovery(recover: Step, check: Step, dead: MemoryDisk, log: Log, first: Cut, second: Cut) -> None:
    with _explained(first, second):
        disk, log = dead.after_power_cut(first.keep, first.seed), list(log)
        _run_until(second.change, recover, disk, log)
        check(disk.after_power_cut(second.keep, second.seed), log)


@contextlib.contextmanager
def _explained(*cuts: Cut) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"a power cut broke it: {error!r}; replay(..., cuts={list(cuts)})") from error

"""CPU time of the programs that a process has started, by program. Linux only.

Unlike the wall-clock time, it is the same on a shared machine.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from rt.bench.measure import seconds

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class CpuUsage(NamedTuple):
    """Wall-clock seconds, and CPU seconds in the JVM and in everything else."""

    clock: float
    java: float
    others: float

    @property
    def processor(self) -> float:
        """CPU seconds of all programs."""
        return self.java + self.others


class _Process(NamedTuple):
    name: str
    own: float
    waited: float
    """CPU seconds of its children that have ended."""


def used_by(work: Callable[[], object]) -> CpuUsage:
    """What one call uses in all processes below this one."""
    java, others = _below(os.getpid())
    clock = seconds(work)
    java_after, others_after = _below(os.getpid())
    return CpuUsage(clock, java_after - java, others_after - others)


def _below(pid: int) -> tuple[float, float]:
    """CPU seconds of Java and of others below the process."""
    children: dict[int, list[tuple[int, _Process]]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                head, _, tail = file.read().rpartition(")")
                fields = tail.split()
                own, waited = (int(fields[at]) + int(fields[at + 1]) for at in (11, 13))
                process = _Process(head.partition("(")[2], own / _TICKS, waited / _TICKS)
                children[int(fields[1])].append((int(entry), process))
    java = others = 0.0
    left = [pid]
    while left:
        for child, process in children[left.pop()]:
            left.append(child)
            others += process.waited
            if process.name == "java":
                java += process.own
            else:
                others += process.own
    return java, others

"""Processor time of the programs that a process has started, apart by program: Linux only.

Beside the clock, because it is the same on a machine that others use as well.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from rt.bench.measure import seconds

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """Seconds of the clock, and of the processor: in the JVM, and in what is not Java."""

    clock: float
    java: float
    others: float

    @property
    def processor(self) -> float:
        """Of all programs."""
        return self.java + self.others


class _Process(NamedTuple):
    name: str
    own: float
    waited: float
    """Of its children that have ended."""


def used_by(work: Callable[[], object]) -> Used:
    """What one call takes in all processes below this one."""
    java, others = _below(os.getpid())
    clock = seconds(work)
    java_after, others_after = _below(os.getpid())
    return Used(clock, java_after - java, others_after - others)


def _below(pid: int) -> tuple[float, float]:
    """Seconds that Java and others have used up, below the process."""
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

"""What processes have used of the machine, as the kernel says: processor time and memory.

A process that is gone has used nothing, as far as it is asked now.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor time of a process, all its threads, in the kernel and outside."""
    return sum(_times(pid)[:2]) / _TICKS


def children_cpu_s(pid: int) -> float:
    """The same of all processes that it started and that these started, whether they still run or not."""
    ended = sum(_times(pid)[2:]) / _TICKS
    return ended + sum(cpu_s(child) + children_cpu_s(child) for child in children(pid))


def children(pid: int) -> list[int]:
    """The processes that it has started, by whichever of its threads."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Of a process, MB."""

    peak_mb: float = 0.0
    """The most that it ever had resident."""
    file_mb: float = 0.0
    """Of what it has now, pages of files: of its program and libraries, which it shares with others."""

    def most(self, other: MemoryUsage) -> MemoryUsage:
        """Of the same process at another time, or of one that took its place."""
        return MemoryUsage(max(self.peak_mb, other.peak_mb), max(self.file_mb, other.file_mb))


def memory(pid: int) -> MemoryUsage:
    """What a process has had of the memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return MemoryUsage()
    found = {name: text for name, _, text in (line.partition(":") for line in lines)}
    # A process that has ended, and nobody has waited for, has no memory.
    peak, file = (int(found.get(name, "0 kB").split()[0]) for name in ("VmHWM", "RssFile"))
    return MemoryUsage(peak * 1024 / 1e6, file * 1024 / 1e6)


def anonymous_mb(pid: int) -> float:
    """Memory that a process has now and shares with nobody, MB: no pages of files. 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon:"))


def age_s(pid: int) -> float:
    """How long ago a process was started; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS


def together_mb(processes: Iterable[MemoryUsage]) -> float:
    """The most that processes of one program can have had at once: what they share counts once."""
    found = list(processes)
    return sum(one.peak_mb - one.file_mb for one in found) + max(one.file_mb for one in found)


def _times(pid: int) -> list[int]:
    """Ticks: its own outside the kernel and in it, then those of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [0, 0, 0, 0]
    return [int(field) for field in fields[11:15]]

"""CPU time and memory of processes, from /proc. A process that has ended counts as 0."""

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
    """CPU time of a process, with all its threads."""
    return sum(_times(pid)[:2]) / _TICKS


def children_cpu_s(pid: int) -> float:
    """CPU time of all its descendants, also of those that have ended."""
    ended = sum(_times(pid)[2:]) / _TICKS
    return ended + sum(cpu_s(child) + children_cpu_s(child) for child in children(pid))


def children(pid: int) -> list[int]:
    """The running processes that it started."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory of a process, MB."""

    peak_mb: float = 0.0
    """Peak of the resident memory."""
    file_mb: float = 0.0
    """Resident pages of files now: its program and libraries, which processes share."""

    def most(self, other: MemoryUsage) -> MemoryUsage:
        """The maximum of both: the same process at another time, or its successor."""
        return MemoryUsage(max(self.peak_mb, other.peak_mb), max(self.file_mb, other.file_mb))


def memory(pid: int) -> MemoryUsage:
    return MemoryUsage(_status_mb(pid, "VmHWM"), _status_mb(pid, "RssFile"))


def anonymous_mb(pid: int) -> float:
    """Resident memory that is not pages of files, MB."""
    return _status_mb(pid, "RssAnon")


def age_s(pid: int) -> float:
    """Seconds since the process was started."""
    fields = _stat(pid)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS if fields else 0.0


def together_mb(processes: Iterable[MemoryUsage]) -> float:
    """Upper bound of the memory of processes of one program. Shared pages count once."""
    found = list(processes)
    return sum(one.peak_mb - one.file_mb for one in found) + max(one.file_mb for one in found)


def _times(pid: int) -> list[int]:
    """Ticks: user and system time, then those of its children that have ended."""
    return [int(field) for field in _stat(pid)[11:15]]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _status_mb(pid: int, name: str) -> float:
    """A size in /proc/PID/status, MB. A process that has ended has no such line, even before it is reaped."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))

"""The processes of this machine, their CPU time and their memory, from /proc. Linux only.

A process that has ended counts as 0. CPU time, unlike wall-clock time, hardly depends on other load.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from rt.bench.measure import seconds

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    program: str
    is_running: bool
    """False: it has ended, and its parent has not waited for it yet."""
    parent: int
    cpu_s: float
    """CPU time of all its threads."""
    ended_children_cpu_s: float
    started_s: float
    """Seconds from the boot of the machine to its start."""


class ProcessTable:
    """All processes at the moment when the table is made."""

    def __init__(self) -> None:
        self._stats: dict[int, ProcessStat] = {}
        self._children: dict[int, list[int]] = defaultdict(list)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if (stat := read_stat(pid)) is not None:
                self._stats[pid] = stat
                self._children[stat.parent].append(pid)

    def children(self, pid: int) -> list[int]:
        """The running processes that it started."""
        return [child for child in self._children[pid] if self._stats[child].is_running]

    def descendants(self, pid: int) -> Iterator[ProcessStat]:
        for child in self._children[pid]:
            yield self._stats[child]
            yield from self.descendants(child)

    def cpu_s(self, pid: int) -> float:
        return self._stats[pid].cpu_s if pid in self._stats else 0.0

    def descendants_cpu_s(self, pid: int) -> float:
        """CPU time of all its descendants, also of those that have ended."""
        ended_s = self._stats[pid].ended_children_cpu_s if pid in self._stats else 0.0
        return ended_s + sum(each.cpu_s + each.ended_children_cpu_s for each in self.descendants(pid))


def read_stat(pid: int) -> ProcessStat | None:
    """Read the figures of a process; None if it has ended."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    user, system, children_user, children_system, started = (
        int(fields[at]) / _TICKS for at in (11, 12, 13, 14, 19)
    )
    return ProcessStat(
        head.partition("(")[2],
        fields[0] != "Z",
        int(fields[1]),
        user + system,
        children_user + children_system,
        started,
    )


def cpu_s(pid: int) -> float:
    """CPU time of a process, with all its threads."""
    stat = read_stat(pid)
    return 0.0 if stat is None else stat.cpu_s


def context_switches(pid: int) -> int:
    """The number of context switches of all its threads that have not ended."""
    count = 0
    for status in Path("/proc").glob(f"{pid}/task/*/status"):
        with contextlib.suppress(OSError):  # The thread has ended.
            lines = status.read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return count


class CpuUsage(NamedTuple):
    """Wall-clock seconds, and CPU seconds in the JVM and in everything else."""

    wall_s: float
    java_s: float
    others_s: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all programs."""
        return self.java_s + self.others_s


def measure_descendants(work: Callable[[], object]) -> CpuUsage:
    """The time that one call uses in all descendants of this process."""
    java_s, all_s = _descendants_cpu_s()
    wall_s = seconds(work)
    java_after_s, all_after_s = _descendants_cpu_s()
    java_s = java_after_s - java_s
    return CpuUsage(wall_s, java_s, all_after_s - all_s - java_s)


def _descendants_cpu_s() -> tuple[float, float]:
    """CPU seconds of Java, and of all programs."""
    table, pid = ProcessTable(), os.getpid()
    java_s = sum(each.cpu_s for each in table.descendants(pid) if each.program == "java")
    return java_s, table.descendants_cpu_s(pid)


class MemoryUsage(Struct, frozen=True):
    """Resident memory of a process, MB."""

    peak_mb: float = 0.0
    file_mb: float = 0.0
    """Pages of files now: its program and libraries, which processes share."""
    anonymous_mb: float = 0.0
    """Everything but pages of files, now."""

    def maximum(self, other: MemoryUsage) -> MemoryUsage:
        """The maximum of both: the same process at another time, or its successor."""
        return MemoryUsage(
            max(self.peak_mb, other.peak_mb),
            max(self.file_mb, other.file_mb),
            max(self.anonymous_mb, other.anonymous_mb),
        )


def memory(pid: int) -> MemoryUsage:
    """The memory of a process. A process that has ended has no memory lines in /proc, even before its parent
    waits for it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return MemoryUsage()
    sizes = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
    return MemoryUsage(
        *(
            int(sizes[name][0]) * 1024 / 1e6 if name in sizes else 0.0
            for name in ("VmHWM", "RssFile", "RssAnon")
        )
    )


def peak_memory_mb() -> float:
    return memory(os.getpid()).peak_mb


def joint_peak_mb(processes: Iterable[MemoryUsage]) -> float:
    """Upper bound of the memory of processes of one program. Shared pages count once."""
    found = list(processes)
    return sum(one.peak_mb - one.file_mb for one in found) + max(one.file_mb for one in found)

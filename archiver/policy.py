"""The limits of a merged log, and by how much each is exceeded.

Pure. Invariant: a time is reached, or disks are too full, only if a majority of the members reports it. So a
member whose clock jumped, or whose disk is filled by other data, trims nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from msgspec import Struct

from rt.units import NS_PER_MINUTE


class RetentionPolicy(Struct, frozen=True):
    """A sealed segment that exceeds one of these limits is trimmed, the oldest first."""

    retention_minutes: int = 7 * 24 * 60
    """Age since it was sealed; 0: never by age."""
    retention_bytes: int = 0
    """Size of all kept segments, the active one included; 0: never by size."""
    retention_disk_percent: int = 90
    """Used share of the file systems of a majority; 0: never by disk usage."""
    hold_bytes_max: int = 10 << 30
    """Most bytes that are kept only for holds; 0: holds are ignored."""

    def __post_init__(self) -> None:
        limits = (self.retention_minutes, self.retention_bytes, self.hold_bytes_max)
        if min(limits) < 0 or not 0 <= self.retention_disk_percent <= 100:
            raise ValueError(f"a limit is out of range: {self}")


class DiskUse(NamedTuple):
    """The file system of one member, as last reported."""

    size_bytes: int
    free_bytes: int


def majority_of(members: int) -> int:
    return members // 2 + 1


def reached_ns(clocks: Collection[int], members: int) -> int | None:
    """The latest time that the clocks of a majority have reached; None if too few are known."""
    majority = majority_of(members)
    return None if len(clocks) < majority else sorted(clocks, reverse=True)[majority - 1]


def expired_ns(policy: RetentionPolicy, clocks: Collection[int], members: int) -> int | None:
    """The time limit: a segment that was sealed at or before it is too old. None if no segment is too old."""
    now_ns = reached_ns(clocks, members)
    if now_ns is None or not policy.retention_minutes:
        return None
    return now_ns - policy.retention_minutes * NS_PER_MINUTE


def size_excess(policy: RetentionPolicy, kept_bytes: int) -> int:
    """Bytes above the size limit; 0 or less: none."""
    return kept_bytes - policy.retention_bytes if policy.retention_bytes else 0


def disk_excess(policy: RetentionPolicy, disks: Collection[DiskUse], members: int) -> int:
    """Bytes to trim until fewer than a majority of the disks are too full; 0 or less: none.

    0 as well if the disks of too few members are known.
    """
    majority = majority_of(members)
    if not policy.retention_disk_percent or len(disks) < majority:
        return 0
    return sorted((_excess(policy, disk) for disk in disks), reverse=True)[majority - 1]


def _excess(policy: RetentionPolicy, disk: DiskUse) -> int:
    allowed = disk.size_bytes * policy.retention_disk_percent // 100
    return disk.size_bytes - disk.free_bytes - allowed

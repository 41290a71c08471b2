"""What is to be kept of a merged log, and how far each rule is from being kept to.

Pure. The law: a clock, or a disk, counts only with a majority of the members behind it, so a node whose clock
jumped, or whose disk is full of something else, trims nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

MINUTE_NS: Final = 60 * 10**9


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Sealed segments that meet one of these are trimmed, the oldest first."""

    retention_minutes: int = 7 * 24 * 60
    """Since it was sealed; 0: never by age."""
    retention_bytes: int = 0
    """Of all that is kept, the growing segment too; 0: never by size."""
    retention_disk_percent: int = 90
    """Used of the file systems of a majority; 0: never for want of space."""
    hold_bytes_max: int = 10 << 30
    """Most that is kept for holds alone; 0: holds hold nothing back."""

    def __post_init__(self) -> None:
        if (
            min(
                self.retention_minutes, self.retention_bytes, self.retention_disk_percent, self.hold_bytes_max
            )
            < 0
        ):
            raise ValueError(f"a policy below nothing: {self}")
        if self.retention_disk_percent > 100:
            raise ValueError(f"a disk that is {self.retention_disk_percent} percent full")


class DiskUse(NamedTuple):
    """The file system of one member, as it was last reported."""

    size_bytes: int
    free_bytes: int

    @property
    def percent(self) -> float:
        """How much of it is used; 0 of one of which nothing is known."""
        if self.size_bytes <= 0:
            return 0.0
        return 100 * (self.size_bytes - self.free_bytes) / self.size_bytes


def majority_of(members: int) -> int:
    """How many of so many members are more than half."""
    return members // 2 + 1


def reached_ns(clocks: Collection[int], members: int) -> int | None:
    """The latest time that the clocks of a majority have reached; None if too few are known."""
    majority = majority_of(members)
    return None if len(clocks) < majority else sorted(clocks, reverse=True)[majority - 1]


def expired_ns(policy: RetentionPolicy, clocks: Collection[int], members: int) -> int | None:
    """What was sealed at this time or before is too old; None if nothing is."""
    now_ns = reached_ns(clocks, members)
    if now_ns is None or not policy.retention_minutes:
        return None
    return now_ns - policy.retention_minutes * MINUTE_NS


def size_excess(policy: RetentionPolicy, kept_bytes: int) -> int:
    """So many bytes too many are kept; 0 or less: none."""
    return kept_bytes - policy.retention_bytes if policy.retention_bytes else 0


def disk_excess(policy: RetentionPolicy, disks: Collection[DiskUse], members: int) -> int:
    """So many bytes must go before fewer than a majority of disks are too full; 0 or less: none.

    0 as well if the disks of too few members are known.
    """
    majority = majority_of(members)
    if not policy.retention_disk_percent or len(disks) < majority:
        return 0
    return sorted((_excess(policy, disk) for disk in disks), reverse=True)[majority - 1]


def _excess(policy: RetentionPolicy, disk: DiskUse) -> int:
    allowed = disk.size_bytes * policy.retention_disk_percent // 100
    return disk.size_bytes - disk.free_bytes - allowed

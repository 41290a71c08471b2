"""Which sealed segments of a merged log are to be trimmed.

Pure: the caller lists the segments, reads clocks and disks, and does the trimming. Laws. What goes is a
prefix of the sealed segments; the growing one is not among them. For age and size no segment goes of which a
hold wants anything, as long as what is kept for holds alone is within their limit; for want of space it does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from archiver.policy import DiskUse, RetentionPolicy, disk_excess, expired_ns, size_excess
from rt.log.format.segment_table import TrimReason


class Segment(Protocol):
    """A sealed merged segment that is kept."""

    @property
    def end(self) -> int:
        """One past its last position."""

    @property
    def size_bytes(self) -> int:
        """Of its file."""

    @property
    def sealed_ns(self) -> int:
        """In sequencing time."""


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """Every sealed segment that ends at position `up_to` or before is to go."""

    up_to: int
    reason: TrimReason
    segments: int
    size_bytes: int
    overridden: tuple[str, ...] = ()
    """Who holds some of it back, by name."""


class ExpiryDue(NamedTuple):
    """How many of the oldest segments age and size trim, as far as holds let them."""

    by_time: int
    by_size: int


def due(
    segments: Sequence[Segment],
    active_bytes: int,
    policy: RetentionPolicy,
    clocks: Collection[int],
    holds: Mapping[str, int],
    *,
    members: int,
) -> ExpiryDue:
    """What goes whatever the disks say; see `plan_trim`."""
    for earlier, later in pairwise(segments):
        assert earlier.end <= later.end, (earlier, later)
    by_time = _count_expired(segments, expired_ns(policy, clocks, members))
    kept_bytes = sum(one.size_bytes for one in segments) + active_bytes
    by_size = _count_bytes(segments, size_excess(policy, kept_bytes))
    free = _count_free(segments[: max(by_time, by_size)], policy, holds)
    return ExpiryDue(min(by_time, free), min(by_size, free))


def plan_trim(
    segments: Sequence[Segment],
    active_bytes: int,
    policy: RetentionPolicy,
    clocks: Collection[int],
    disks: Collection[DiskUse],
    holds: Mapping[str, int],
    *,
    members: int,
    freed_bytes: int = 0,
) -> TrimPlan | None:
    """What is to be trimmed first; None if nothing is. Asked again once that is done, it says what is next.

    `segments` are the sealed ones that are kept, oldest first, `active_bytes` the size of the growing one.
    `clocks`, in ns, and `disks` are those of members that were heard of just now, of `members` in all.
    `holds` are positions, by name, below which nothing is wanted. `freed_bytes` were trimmed so recently that
    `disks` may not show it.
    """
    by_time, by_size = due(segments, active_bytes, policy, clocks, holds, members=members)
    by_disk = _count_bytes(segments, disk_excess(policy, disks, members) - freed_bytes)
    for reason, count in (
        (TrimReason.TIME, by_time),
        (TrimReason.SIZE, by_size),
        (TrimReason.DISK, by_disk),
    ):
        if count:
            return _plan(segments[:count], reason, holds)
    return None


def _plan(gone: Sequence[Segment], reason: TrimReason, holds: Mapping[str, int]) -> TrimPlan:
    last = gone[-1]
    return TrimPlan(
        last.end,
        reason,
        len(gone),
        sum(one.size_bytes for one in gone),
        tuple(name for name, position in sorted(holds.items()) if position < last.end),
    )


def _count_expired(segments: Sequence[Segment], expired: int | None) -> int:
    """How many are too old; a young one shields those behind it."""
    if expired is None:
        return 0
    return next((at for at, one in enumerate(segments) if one.sealed_ns > expired), len(segments))


def _count_bytes(segments: Sequence[Segment], excess: int) -> int:
    """How many hold so many bytes, or all of them."""
    count = 0
    while excess > 0 and count < len(segments):
        excess -= segments[count].size_bytes
        count += 1
    return count


def _count_free(segments: Sequence[Segment], policy: RetentionPolicy, holds: Mapping[str, int]) -> int:
    """How many of the segments that are to go may go, for all that is held back."""
    floor = min(holds.values(), default=None)
    if floor is None:
        return len(segments)
    free = next((at for at, one in enumerate(segments) if one.end > floor), len(segments))
    held_bytes = sum(one.size_bytes for one in segments[free:])
    return free + _count_bytes(segments[free:], held_bytes - policy.hold_bytes_max)

"""The sealed segments of a merged log to trim.

Pure. Invariants:
- Only a prefix of the sealed segments is trimmed, never the active one.
- A segment with data that a hold needs is not trimmed by age or size, as long as the bytes that are kept only
  for holds are within their limit. It is trimmed if the disks are too full.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from msgspec import Struct

from archiver.policy import DiskUse, RetentionPolicy, disk_excess, expired_ns, size_excess
from rt.log.format.segment_table import TrimReason


class Segment(Protocol):
    """A sealed merged segment that is not trimmed."""

    @property
    def end(self) -> int:
        """One past its last position."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def sealed_ns(self) -> int:
        """Sequencing time at which it was sealed."""


class TrimPlan(Struct, frozen=True):
    """Trim every sealed segment that ends at position `up_to` or before."""

    up_to: int
    reason: TrimReason
    segments: int
    size_bytes: int
    overridden: tuple[str, ...] = ()
    """Names of the holds that need this data. It is trimmed because they hold too much, or the disks are too
    full.
    """


class ExpiryPlan(NamedTuple):
    """How many of the oldest segments may be trimmed by age, and by size. Holds are taken into account."""

    by_time: int
    by_size: int


def plan_expiry(
    segments: Sequence[Segment],
    active_bytes: int,
    policy: RetentionPolicy,
    clocks: Collection[int],
    holds: Mapping[str, int],
    *,
    members: int,
) -> ExpiryPlan:
    """The segments to trim regardless of the disks; see `plan_trim`."""
    for earlier, later in pairwise(segments):
        assert earlier.end <= later.end, (earlier, later)
    by_time = _count_expired(segments, expired_ns(policy, clocks, members))
    kept_bytes = sum(one.size_bytes for one in segments) + active_bytes
    by_size = _count_bytes(segments, size_excess(policy, kept_bytes))
    unheld = _count_unheld(segments[: max(by_time, by_size)], policy, holds)
    return ExpiryPlan(min(by_time, unheld), min(by_size, unheld))


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
    """The next trim; None if there is none. Call it again after that trim to get the following one.

    `segments` are the sealed segments that are kept, oldest first. `active_bytes` is the size of the active
    segment. `clocks` (ns) and `disks` are the values of the members that reported recently, out of `members`.
    `holds` has a position for each name: the holder needs no data before its position. `freed_bytes` were
    trimmed so recently that `disks` may not show it.
    """
    by_time, by_size = plan_expiry(segments, active_bytes, policy, clocks, holds, members=members)
    by_disk = _count_bytes(segments, disk_excess(policy, disks, members) - freed_bytes)
    for reason, count in ((TrimReason.TIME, by_time), (TrimReason.SIZE, by_size), (TrimReason.DISK, by_disk)):
        if count:
            return _plan(segments[:count], reason, holds)
    return None


def _plan(trimmed: Sequence[Segment], reason: TrimReason, holds: Mapping[str, int]) -> TrimPlan:
    last = trimmed[-1]
    return TrimPlan(
        last.end,
        reason,
        len(trimmed),
        sum(one.size_bytes for one in trimmed),
        tuple(name for name, position in sorted(holds.items()) if position < last.end),
    )


def _count_expired(segments: Sequence[Segment], expired: int | None) -> int:
    """Number of segments that are too old, up to the first segment that is not."""
    if expired is None:
        return 0
    return next((at for at, one in enumerate(segments) if one.sealed_ns > expired), len(segments))


def _count_bytes(segments: Sequence[Segment], excess: int) -> int:
    """Number of the first segments that together have at least `excess` bytes; all of them if they have
    less.
    """
    count = 0
    while excess > 0 and count < len(segments):
        excess -= segments[count].size_bytes
        count += 1
    return count


def _count_unheld(segments: Sequence[Segment], policy: RetentionPolicy, holds: Mapping[str, int]) -> int:
    """Number of `segments` that holds allow to trim."""
    floor = min(holds.values(), default=None)
    if floor is None:
        return len(segments)
    unheld = next((at for at, one in enumerate(segments) if one.end > floor), len(segments))
    held_bytes = sum(one.size_bytes for one in segments[unheld:])
    return unheld + _count_bytes(segments[unheld:], held_bytes - policy.hold_bytes_max)

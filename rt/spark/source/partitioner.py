"""Splits a range of positions into partitions, and limits micro-batches. Pure: the caller passes the outline
of the log.

Invariants:
- Partitions follow each other without gap or overlap, and each has at least one position.
- A cut lies between blocks if the end of a block is near.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from rt.log.read.outline import Waypoint


class PositionRange(NamedTuple):
    """Positions from `start` up to, not including, `end`."""

    start: int
    end: int


def plan_parts(
    waypoints: Sequence[Waypoint], start: int, end: int, *, min_parts: int, max_part_bytes: int
) -> list[PositionRange]:
    """Split `start` to `end` into `min_parts` or more partitions of about equal bytes, each at most
    `max_part_bytes`.

    `waypoints` are the outline of the log there. There are never more partitions than positions.
    """
    if start >= end:
        return []
    waypoints = _covering(waypoints, start, end)
    first, last = bytes_at(waypoints, start), bytes_at(waypoints, end)
    total = max(last - first, 1)
    count = min(max(min_parts, -(-total // max_part_bytes)), end - start)
    cuts = [start]
    for index in range(1, count):
        # The remaining bytes go to the remaining partitions, so that each gets a position.
        low, high = cuts[-1] + 1, end - (count - index)
        target_bytes = first + total * index // count
        cuts.append(min(max(_cut(waypoints, target_bytes, total // count), low), high))
    return [PositionRange(*pair) for pair in zip(cuts, [*cuts[1:], end], strict=True)]


def end_within(waypoints: Iterable[Waypoint], start: int, end: int, bytes_max: int) -> int:
    """The last position up to `end` that is within `bytes_max` bytes of `start`, but at least `start` + 1.

    `waypoints` may be lazy: only the needed ones are consumed.
    """
    before, limit = Waypoint(start, 0), None
    for waypoint in waypoints:
        if waypoint.position > start:
            if limit is None:
                limit = bytes_at((before, waypoint), start) + bytes_max
            if waypoint.log_bytes > limit:
                return min(max(position_at((before, waypoint), limit), start + 1), end)
        if waypoint.position >= end:
            break
        before = waypoint
    return end


def bytes_at(waypoints: Sequence[Waypoint], position: int) -> int:
    """The bytes before `position`, interpolated between waypoints."""
    at = min(max(bisect_right(waypoints, position, key=attrgetter("position")), 1), len(waypoints) - 1)
    before, after = waypoints[at - 1], waypoints[at]
    share = (position - before.position) / max(after.position - before.position, 1)
    return before.log_bytes + round((after.log_bytes - before.log_bytes) * share)


def position_at(waypoints: Sequence[Waypoint], log_bytes: int) -> int:
    """The position after `log_bytes`, interpolated between waypoints."""
    at = min(max(bisect_right(waypoints, log_bytes, key=attrgetter("log_bytes")), 1), len(waypoints) - 1)
    before, after = waypoints[at - 1], waypoints[at]
    share = (log_bytes - before.log_bytes) / max(after.log_bytes - before.log_bytes, 1)
    return before.position + int((after.position - before.position) * share)


def _cut(waypoints: Sequence[Waypoint], log_bytes: int, part_bytes: int) -> int:
    """The position of the waypoint that is nearest to `log_bytes`. If it is further away than a quarter of a
    partition, the interpolated position.
    """
    at = bisect_right(waypoints, log_bytes, key=attrgetter("log_bytes"))
    near = min(waypoints[max(at - 1, 0) : at + 1], key=lambda waypoint: abs(waypoint.log_bytes - log_bytes))
    if abs(near.log_bytes - log_bytes) <= part_bytes // 4:
        return near.position
    return position_at(waypoints, log_bytes)


def _covering(waypoints: Sequence[Waypoint], start: int, end: int) -> list[Waypoint]:
    """The waypoints, with one at or before `start` and one at or after `end`."""
    covering = list(waypoints)
    if not covering or covering[0].position > start:
        covering.insert(0, Waypoint(start, covering[0].log_bytes if covering else 0))
    if covering[-1].position < end:
        covering.append(Waypoint(end, covering[-1].log_bytes))
    return covering if len(covering) > 1 else [Waypoint(start, covering[0].log_bytes), *covering]

"""Sharing out a range of positions: the parts that are read in parallel, and where a micro-batch ends.

Pure: the caller brings the outline of the log. Law: the parts follow each other without gap or overlap, each
holds at least one position, and cuts fall between blocks where a block's end is near.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rt.log.waypoints import Waypoint


class Part(NamedTuple):
    """Positions from `start` up to, not including, `end`."""

    start: int
    end: int


def plan_parts(
    waypoints: Sequence[Waypoint], start: int, end: int, *, min_parts: int, max_part_bytes: int
) -> list[Part]:
    """Cut `start` to `end` into parts of about the same bytes, `max_part_bytes` at most, `min_parts` or more.

    `waypoints` are the outline of the log there. There are never more parts than positions.
    """
    if start >= end:
        return []
    waypoints = _covering(waypoints, start, end)
    first, last = bytes_at(waypoints, start), bytes_at(waypoints, end)
    total = max(last - first, 1)
    count = min(max(min_parts, -(-total // max_part_bytes)), end - start)
    cuts = [start]
    for index in range(1, count):
        # What is left goes to the parts that are left, so that each gets a position.
        low, high = cuts[-1] + 1, end - (count - index)
        wanted = first + total * index // count
        cuts.append(min(max(_cut(waypoints, wanted, total // count), low), high))
    return [Part(*pair) for pair in zip(cuts, [*cuts[1:], end], strict=True)]


def end_within(waypoints: Iterable[Waypoint], start: int, end: int, bytes_max: int) -> int:
    """The furthest position up to `end` that `bytes_max` from `start` on lead to; one further at least.

    `waypoints` may be drawn from as they come: no more are taken than it needs.
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
    """The bytes before `position`, as if all messages between two waypoints were of one size."""
    at = min(max(bisect_right(waypoints, position, key=_position), 1), len(waypoints) - 1)
    before, behind = waypoints[at - 1], waypoints[at]
    share = (position - before.position) / max(behind.position - before.position, 1)
    return before.log_bytes + round((behind.log_bytes - before.log_bytes) * share)


def position_at(waypoints: Sequence[Waypoint], log_bytes: int) -> int:
    """The position that `log_bytes` lie before, as if all messages between two waypoints were of one size."""
    at = min(max(bisect_right(waypoints, log_bytes, key=_bytes), 1), len(waypoints) - 1)
    before, behind = waypoints[at - 1], waypoints[at]
    share = (log_bytes - before.log_bytes) / max(behind.log_bytes - before.log_bytes, 1)
    return before.position + int((behind.position - before.position) * share)


def _cut(waypoints: Sequence[Waypoint], log_bytes: int, part_bytes: int) -> int:
    """The waypoint that is nearest, unless it is further than a quarter of a part."""
    at = bisect_right(waypoints, log_bytes, key=_bytes)
    near = min(waypoints[max(at - 1, 0) : at + 1], key=lambda waypoint: abs(waypoint.log_bytes - log_bytes))
    if abs(near.log_bytes - log_bytes) <= part_bytes // 4:
        return near.position
    return position_at(waypoints, log_bytes)


def _covering(waypoints: Sequence[Waypoint], start: int, end: int) -> list[Waypoint]:
    """The waypoints, with one at `start` or before and one at `end` or behind."""
    covering = list(waypoints)
    if not covering or covering[0].position > start:
        covering.insert(0, Waypoint(start, covering[0].log_bytes if covering else 0))
    if covering[-1].position < end:
        covering.append(Waypoint(end, covering[-1].log_bytes))
    return covering if len(covering) > 1 else [Waypoint(start, covering[0].log_bytes), *covering]


def _position(waypoint: Waypoint) -> int:
    return waypoint.position


def _bytes(waypoint: Waypoint) -> int:
    return waypoint.log_bytes

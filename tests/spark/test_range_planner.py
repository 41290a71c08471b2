"""Partition planning and micro-batch ends: complete, disjoint, not empty, near block boundaries."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rt.log.read.outline import Waypoint
from rt.spark.source.partitioner import PositionRange, end_within, plan_parts


def even(count: int, *, messages: int = 100, size: int = 1000) -> list[Waypoint]:
    return [Waypoint(i * messages, i * size) for i in range(count + 1)]


@st.composite
def outlines(draw: st.DrawFn) -> list[Waypoint]:
    steps = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5000)), min_size=1, max_size=30))
    waypoints = [Waypoint(draw(st.integers(0, 20)), 0)]
    for positions, size in steps:
        waypoints.append(Waypoint(waypoints[-1].position + positions, waypoints[-1].log_bytes + size))
    return waypoints


@given(outlines(), st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 12), st.integers(1, 20_000))
def test_parts_cover_range_without_gap_overlap_or_empty_part(
    waypoints: list[Waypoint], start: int, count: int, min_parts: int, part_bytes: int
) -> None:
    parts = plan_parts(waypoints, start, start + count, min_parts=min_parts, max_part_bytes=part_bytes)
    if not count:
        assert parts == []
        return
    assert parts[0].start == start
    assert parts[-1].end == start + count
    assert all(part.start < part.end for part in parts)
    assert all(one.end == other.start for one, other in itertools.pairwise(parts))
    assert len(parts) >= min(min_parts, count)


def test_part_boundaries_fall_on_nearby_block_boundaries() -> None:
    parts = plan_parts(even(10), 0, 1000, min_parts=3, max_part_bytes=10**9)
    assert parts == [PositionRange(0, 300), PositionRange(300, 700), PositionRange(700, 1000)]


def test_parts_respect_max_part_bytes() -> None:
    parts = plan_parts(even(100), 0, 10_000, min_parts=1, max_part_bytes=10_000)
    assert len(parts) == 10
    assert {part.end - part.start for part in parts} == {1000}


def test_single_block_is_split_to_reach_min_parts() -> None:
    assert plan_parts(even(1), 0, 100, min_parts=4, max_part_bytes=10**9) == [
        PositionRange(0, 25),
        PositionRange(25, 50),
        PositionRange(50, 75),
        PositionRange(75, 100),
    ]


def test_parts_are_at_most_as_many_as_positions() -> None:
    assert plan_parts(even(1), 7, 9, min_parts=5, max_part_bytes=1) == [
        PositionRange(7, 8),
        PositionRange(8, 9),
    ]


def test_parts_are_balanced_by_bytes_not_positions() -> None:
    waypoints = [Waypoint(0, 0), Waypoint(1000, 100), Waypoint(1001, 10_000), Waypoint(1002, 20_000)]
    assert plan_parts(waypoints, 0, 1002, min_parts=2, max_part_bytes=10**9) == [
        PositionRange(0, 1001),
        PositionRange(1001, 1002),
    ]


@given(outlines(), st.integers(0, 300), st.integers(1, 500), st.integers(1, 20_000))
def test_byte_limit_always_allows_one_message(
    waypoints: list[Waypoint], start: int, count: int, limit: int
) -> None:
    assert start < end_within(iter(waypoints), start, start + count, limit) <= start + count


def test_byte_limit_ends_range_at_used_up_bytes() -> None:
    assert end_within(iter(even(10)), 0, 1000, 3000) == 300
    assert end_within(iter(even(10)), 50, 1000, 3000) == 350
    assert end_within(iter(even(10)), 0, 1000, 10**9) == 1000
    assert end_within(iter(even(10)), 0, 120, 10**9) == 120


def test_byte_limit_reads_only_needed_waypoints_of_outline() -> None:
    waypoints = iter(even(1000))
    end_within(waypoints, 0, 100_000, 2500)
    assert next(waypoints).position == 400

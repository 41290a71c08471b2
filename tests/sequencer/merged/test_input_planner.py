"""Input that a waiting merger fetches, and peers from which it copies merged bytes."""

from __future__ import annotations

import pytest
from nodes_bench import Story

from rt.log.format.running_checksum import ChecksummedBoundary
from rt.log.format.segment import SegmentId
from sequencer.merged.fetched_ranges import FetchedRanges
from sequencer.sessions.batch_index import BatchIndex
from sequencer.sessions.input_planner import (
    SLOW_S,
    STUCK_S,
    FetchedRange,
    SessionRange,
    is_due,
    peers_ahead,
    plan_ranges,
)
from sequencer.state.write_plan import BlockWrite

STORY = Story.drawn()
BLOCKS = [block for plan in STORY.plans for block in plan.blocks if not block.is_declaration]


def in_halves() -> Story:
    """A story whose instructions merge one half of a segment after the other."""
    story = Story()
    drawn = Story.drawn()
    story.state, story.sessions = Story.drawn(instructions=0).state, drawn.sessions
    one = drawn.sessions[1]
    for roll in range(3):
        last = len(one.marks[0, roll]) - 1
        story.merge(one.range_of(1, 0, roll, 0, 1))
        if last > 1:
            story.merge(one.range_of(1, 0, roll, 1, last))
    return story


def test_ranges_of_first_plan_are_fetched_fully_and_of_later_plans_up_to_byte_limit() -> None:
    first = [block for block in STORY.plans[0].blocks if not block.is_declaration]
    found = plan_ranges(STORY.plans, lambda _: False, bytes_max=1)
    assert [(one.session_id, one.segment, one.start, one.end, one.chain_end) for one in found] == [
        (block.session_id, SegmentId(block.run, block.roll), block.start, block.end, block.chain_end)
        for block in first
    ]
    assert len(plan_ranges(STORY.plans, lambda _: False)) == len(BLOCKS), "each is of another segment"


def test_ranges_already_present_are_not_fetched() -> None:
    assert plan_ranges(STORY.plans, lambda _: True) == []
    wanted = BLOCKS[4]
    (found,) = plan_ranges(STORY.plans, lambda block: block is not wanted)
    assert (found.session_id, found.start, found.end) == (wanted.session_id, wanted.start, wanted.end)


def test_adjacent_ranges_of_segment_are_joined_unless_range_between_is_present() -> None:
    story = in_halves()
    blocks = [block for plan in story.plans for block in plan.blocks if not block.is_declaration]
    found = plan_ranges(story.plans, lambda _: False)
    assert [one.segment.roll for one in found] == sorted({block.roll for block in blocks})
    for one in found:
        of_it = [block for block in blocks if block.roll == one.segment.roll]
        assert (one.start, one.end, one.chain_end) == (64, of_it[-1].end, of_it[-1].chain_end)
    second = next(block for block in blocks if block.start > 64)
    found = plan_ranges(story.plans, lambda block: block.roll == second.roll and block is not second)
    (alone,) = [one for one in found if one.segment.roll == second.roll]
    before = next(block for block in blocks if block.roll == second.roll and block.end == second.start)
    assert (alone.start, alone.chain_start) == (second.start, before.chain_end)


@pytest.mark.parametrize(
    ("waited_s", "still_s", "is_coming", "due"),
    [
        pytest.param(0, 0, False, True, id="nobody sends"),
        pytest.param(0.1, 0.1, True, False, id="it is only a little late"),
        pytest.param(STUCK_S, STUCK_S, True, True, id="a stream that stands still"),
        pytest.param(SLOW_S - 0.1, 0.1, True, False, id="a stream that comes nearer"),
        pytest.param(SLOW_S, 0.1, True, True, id="a stream that takes too long"),
    ],
)
def test_missing_input_is_fetched_only_if_no_stream_delivers_it_in_time(
    waited_s: float, still_s: float, is_coming: bool, due: bool
) -> None:
    assert is_due(waited_s=waited_s, still_s=still_s, is_coming=is_coming) == due


def test_merged_bytes_are_copied_only_from_peers_ahead_furthest_first() -> None:
    ends = {"a": 10, "b": 12, "c": 30}
    assert peers_ahead(ends, 10, is_cut_off=False) == ["c", "b"]
    assert peers_ahead(ends, 30, is_cut_off=False) == []
    assert peers_ahead({}, 0, is_cut_off=True) == []
    assert peers_ahead(ends, 10, is_cut_off=True) == ["c", "b", "a"], "it may have a segment's header more"


def fetched_of(block: BlockWrite, *, chain_end: int) -> FetchedRange:
    marks = BatchIndex()
    marks.add(
        [
            ChecksummedBoundary(block.start, 0, 1, 5, 5, 0),
            ChecksummedBoundary(block.end, 3, chain_end, 6, 9, 0),
        ]
    )
    one = SessionRange(
        block.session_id, SegmentId(block.run, block.roll), block.start, 1, block.end, chain_end
    )
    return FetchedRange(one, memoryview(bytes(block.end - block.start)), marks)


def test_fetched_range_is_found_by_matching_checksum_until_merged() -> None:
    block, other = BLOCKS[:2]
    ranges = FetchedRanges()
    ranges.add(fetched_of(block, chain_end=block.chain_end ^ 1))
    assert ranges.find(block) is None
    ranges.add(good := fetched_of(block, chain_end=block.chain_end))
    assert ranges.find(block) is good
    assert ranges.find(other) is None
    range_info = good.range_info(block)
    assert range_info is not None
    assert range_info.timestamp_low_ns == 6
    assert len(good.bytes_of(block)) == block.end - block.start
    ranges.forget(STORY.plans[0])
    assert ranges.find(block) is None
    assert ranges.total_bytes == 0

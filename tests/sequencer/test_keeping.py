"""Trims and holds as commands: a prefix of the sealed segments goes, a hold only moves forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequencing import must, new_state, refusal

from rt.log.segment import SegmentId
from rt.log.table import TRIMMED_ENTRIES_MAX, TrimReason
from sequencer import state as kept
from sequencer.apply import apply
from sequencer.commands import Command, Hold, Release, Trim
from sequencer.outcomes import Held, Refused, Released, Trimmed
from sequencer.state import HOLDS_MAX, MergedEnd, MergedSegment, State
from sequencer.state_encoding import decode_state, encode_state


def sealed(count: int) -> State:
    """So many sealed segments of ten messages and 100 bytes, and one that grows."""
    state = new_state()
    state.segments.extend(
        MergedSegment(SegmentId(0, y), 10 * y, 10 * (y + 1), 100, y, y + 1) for y in range(count)
    )
    state.merged = MergedEnd(SegmentId(0, count), first=10 * count)
    state.position = 10 * count + 5
    return state


def test_a_trim_takes_all_sealed_segments_before_its_place_with_reason_and_time() -> None:
    state = sealed(4)
    assert state.log_start == 0
    trimmed = must(Trimmed, apply(state, Trim(0, 2, TrimReason.SIZE, 77)))
    assert trimmed == Trimmed(SegmentId(0, 2), TrimReason.SIZE, 77, 20, 2, 200)
    assert [(one.reason, one.trimmed_ns) for one in state.segments] == [
        (TrimReason.SIZE, 77),
        (TrimReason.SIZE, 77),
        (TrimReason.NONE, 0),
        (TrimReason.NONE, 0),
    ]
    assert [one.size_bytes for one in state.segments] == [100] * 4
    trimmed = must(Trimmed, apply(state, Trim(0, 4, TrimReason.TIME, 5)))
    assert (trimmed.log_start, trimmed.segments) == (40, 2)
    assert [one.reason for one in state.segments][:3] == [TrimReason.SIZE, TrimReason.SIZE, TrimReason.TIME]
    assert state.log_start == state.merged.first


def test_of_trimmed_segments_the_newest_entries_are_remembered() -> None:
    state = sealed(TRIMMED_ENTRIES_MAX + 7)
    apply(state, Trim(0, 3, TrimReason.TIME, 1))
    assert len(state.segments) == TRIMMED_ENTRIES_MAX + 7
    apply(state, Trim(0, TRIMMED_ENTRIES_MAX + 5, TrimReason.TIME, 2))
    assert len(state.segments) == TRIMMED_ENTRIES_MAX + 2
    assert state.segments[0].id == SegmentId(0, 5)
    assert sum(one.is_trimmed for one in state.segments) == TRIMMED_ENTRIES_MAX


def test_a_trim_names_whose_hold_it_overrides() -> None:
    state = sealed(4)
    for name, position in (("late", 19), ("early", 0), ("on-time", 20), ("ahead", 45)):
        assert apply(state, Hold(name, position, 1)) == Held(name, position)
    trimmed = must(Trimmed, apply(state, Trim(0, 2, TrimReason.DISK, 1)))
    assert trimmed.overridden == ("early", "late")


def test_a_hold_moves_forward_may_be_told_again_and_is_released() -> None:
    state = sealed(2)
    apply(state, Hold("reader", 3, 50))
    assert apply(state, Hold("reader", 3, 40)) == Held("reader", 3)
    assert state.holds == {"reader": kept.Hold(3, 50)}
    apply(state, Hold("reader", 25, 60))
    assert state.holds == {"reader": kept.Hold(25, 60)}
    assert "not 24" in refusal(state, Hold("reader", 24, 70)).why
    assert apply(state, Release("reader")) == Released("reader")
    assert apply(state, Hold("reader", 0, 80)) == Held("reader", 0)


def test_where_holds_are_at_their_limit_those_that_are_there_go_on() -> None:
    state = sealed(2)
    for number in range(HOLDS_MAX):
        apply(state, Hold(f"r{number}", 0, 0))
    assert isinstance(apply(state, Hold("another", 0, 0)), Refused)
    assert apply(state, Hold("r7", 9, 0)) == Held("r7", 9)
    apply(state, Release("r8"))
    assert apply(state, Hold("another", 0, 0)) == Held("another", 0)


COMMANDS: st.SearchStrategy[Command] = st.one_of(
    st.builds(Trim, st.integers(0, 1), st.integers(0, 8), st.just(TrimReason.SIZE), st.integers(1, 9)),
    st.builds(Hold, st.sampled_from("abc"), st.integers(0, 70), st.integers(0, 9)),
    st.builds(Release, st.sampled_from("abc")),
)


@given(st.integers(0, 6), st.lists(COMMANDS, max_size=12))
def test_whatever_is_trimmed_is_a_prefix_and_no_hold_goes_back(count: int, commands: list[Command]) -> None:
    state = sealed(count)
    for command in commands:
        before, holds, start = encode_state(state), dict(state.holds), state.log_start
        outcome = apply(state, command)
        flags = [one.is_trimmed for one in state.segments]
        assert flags == sorted(flags, reverse=True)
        assert state.log_start >= start
        assert (encode_state(state) == before) or not isinstance(outcome, Refused)
        assert decode_state(encode_state(state)) == state
        if isinstance(command, Hold):
            assert all(state.holds[name].position >= one.position for name, one in holds.items())
        if isinstance(outcome, Trimmed):
            assert outcome.log_start == state.log_start > start
            wanted = {name for name, one in state.holds.items() if one.position < outcome.log_start}
            assert set(outcome.overridden) == wanted


@pytest.mark.parametrize("place", [(1, 0), (0, 5)])
def test_the_growing_segment_is_never_trimmed(place: tuple[int, int]) -> None:
    state = sealed(4)
    assert "beyond the growing" in refusal(state, Trim(*place, TrimReason.REQUEST, 1)).why
    apply(state, Trim(0, 4, TrimReason.REQUEST, 1))
    assert state.merged.segment == SegmentId(0, 4)

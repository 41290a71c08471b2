"""Trim and hold commands: trims remove a prefix of sealed segments, holds only move forward."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sequencer_core import must, new_state, refusal

from archiver.retention import plan_trim
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TRIMMED_ENTRIES_MAX, TrimReason
from rt.units import NS_PER_MINUTE
from sequencer.state import state as kept
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, HoldMoved, HoldReleased, SegmentsTrimmed
from sequencer.state.commands import TRIM_REASONS, Command, Configure, HoldPosition, ReleaseHold, TrimSegments
from sequencer.state.retention import held_positions, policy_of
from sequencer.state.state import HOLDS_MAX, MergedEnd, MergedSegment, SequencerState
from sequencer.state.state_codec import decode_state, encode_state


def sealed(count: int) -> SequencerState:
    """Return a state with `count` sealed segments of ten messages and 100 bytes, and one growing segment."""
    state = new_state()
    state.segments.extend(
        MergedSegment(SegmentId(0, roll), 10 * roll, 10 * (roll + 1), 100, roll, roll + 1)
        for roll in range(count)
    )
    state.merged = MergedEnd(SegmentId(0, count), first=10 * count)
    state.position = 10 * count + 5
    return state


def test_trim_marks_sealed_segments_before_position_with_reason_and_time() -> None:
    state = sealed(4)
    assert state.log_start == 0
    trimmed = must(SegmentsTrimmed, apply(state, TrimSegments(20, TrimReason.DISK, 77)))
    assert trimmed == SegmentsTrimmed(TrimReason.DISK, 77, 20, 2, 200)
    assert [(one.reason, one.trimmed_ns) for one in state.segments] == [
        (TrimReason.DISK, 77),
        (TrimReason.DISK, 77),
        (TrimReason.NONE, 0),
        (TrimReason.NONE, 0),
    ]
    assert [one.size_bytes for one in state.segments] == [100] * 4
    trimmed = must(SegmentsTrimmed, apply(state, TrimSegments(45, TrimReason.REQUEST, 5)))
    assert (trimmed.log_start, trimmed.segments) == (40, 2)
    assert [one.reason for one in state.segments][:3] == [
        TrimReason.DISK,
        TrimReason.DISK,
        TrimReason.REQUEST,
    ]
    assert state.log_start == state.merged.first


def test_newest_trimmed_segment_entries_are_kept_up_to_limit() -> None:
    state = sealed(TRIMMED_ENTRIES_MAX + 7)
    apply(state, TrimSegments(30, TrimReason.REQUEST, 1))
    assert len(state.segments) == TRIMMED_ENTRIES_MAX + 7
    apply(state, TrimSegments(10 * (TRIMMED_ENTRIES_MAX + 5), TrimReason.REQUEST, 2))
    assert len(state.segments) == TRIMMED_ENTRIES_MAX + 2
    assert state.segments[0].id == SegmentId(0, 5)
    assert sum(one.is_trimmed for one in state.segments) == TRIMMED_ENTRIES_MAX


def test_trim_reports_names_of_overridden_holds() -> None:
    state = sealed(4)
    for name, position in (("late", 19), ("early", 0), ("on-time", 20), ("ahead", 45)):
        assert apply(state, HoldPosition(name, position, 1)) == HoldMoved(name, position)
    trimmed = must(SegmentsTrimmed, apply(state, TrimSegments(20, TrimReason.DISK, 1)))
    assert trimmed.overridden == ("early", "late")


def test_hold_moves_forward_only_may_be_repeated_and_is_released() -> None:
    state = sealed(2)
    apply(state, HoldPosition("reader", 3, 50))
    assert apply(state, HoldPosition("reader", 3, 40)) == HoldMoved("reader", 3)
    assert state.holds == {"reader": kept.SubscriberHold(3, 50)}
    apply(state, HoldPosition("reader", 25, 60))
    assert state.holds == {"reader": kept.SubscriberHold(25, 60)}
    assert "not 24" in refusal(state, HoldPosition("reader", 24, 70)).why
    assert apply(state, ReleaseHold("reader")) == HoldReleased("reader")
    assert apply(state, HoldPosition("reader", 0, 80)) == HoldMoved("reader", 0)


def test_existing_holds_still_move_when_hold_limit_is_reached() -> None:
    state = sealed(2)
    for number in range(HOLDS_MAX):
        apply(state, HoldPosition(f"r{number}", 0, 0))
    assert isinstance(apply(state, HoldPosition("another", 0, 0)), CommandRejected)
    assert apply(state, HoldPosition("r7", 9, 0)) == HoldMoved("r7", 9)
    apply(state, ReleaseHold("r8"))
    assert apply(state, HoldPosition("another", 0, 0)) == HoldMoved("another", 0)


COMMANDS: st.SearchStrategy[Command] = st.one_of(
    st.builds(
        TrimSegments,
        st.integers(0, 80),
        st.sampled_from(sorted(TRIM_REASONS)),
        st.integers(1, 9 * NS_PER_MINUTE),
    ),
    st.builds(Configure, retention_minutes=st.integers(0, 5), retention_bytes=st.integers(0, 700)),
    st.builds(HoldPosition, st.sampled_from("abc"), st.integers(0, 70), st.integers(0, 9)),
    st.builds(ReleaseHold, st.sampled_from("abc")),
)


@given(st.integers(0, 6), st.lists(COMMANDS, max_size=12))
def test_trims_remove_a_prefix_and_holds_never_move_back(count: int, commands: list[Command]) -> None:
    state = sealed(count)
    for command in commands:
        before, holds, start = encode_state(state), dict(state.holds), state.log_start
        outcome = apply(state, command)
        flags = [one.is_trimmed for one in state.segments]
        assert flags == sorted(flags, reverse=True)
        assert state.log_start >= start
        assert (encode_state(state) == before) or not isinstance(outcome, CommandRejected)
        assert decode_state(encode_state(state)) == state
        if isinstance(command, HoldPosition):
            assert all(state.holds[name].position >= one.position for name, one in holds.items())
        if isinstance(outcome, SegmentsTrimmed):
            assert outcome.log_start == state.log_start >= start
            assert bool(outcome.segments) == (state.log_start > start)
            assert outcome.segments or outcome.reason is TrimReason.REQUEST
            wanted = {name for name, one in state.holds.items() if one.position < outcome.log_start}
            assert set(outcome.overridden) == wanted


def test_growing_segment_is_never_trimmed_and_trim_may_be_repeated() -> None:
    state = sealed(4)
    assert "beyond the merged log" in refusal(state, TrimSegments(46, TrimReason.REQUEST, 1)).why
    outcomes = [
        must(SegmentsTrimmed, apply(state, TrimSegments(45, TrimReason.REQUEST, 1))) for _ in range(2)
    ]
    assert [(one.log_start, one.segments, one.size_bytes) for one in outcomes] == [(40, 4, 400), (40, 0, 0)]
    assert state.merged.segment == SegmentId(0, 4)


def test_trim_of_empty_log_removes_no_segments() -> None:
    assert must(SegmentsTrimmed, apply(new_state(), TrimSegments(0, TrimReason.REQUEST, 1))).segments == 0


# Changes between the proposal of a trim and its application


def by_policy() -> SequencerState:
    """Return a state with four sealed segments. By age the first three are trimmed at minute 63, by size the
    first two.
    """
    state = sealed(4)
    state.segments = deque(
        replace(one, sealed_ns=at * NS_PER_MINUTE) for at, one in enumerate(state.segments, start=1)
    )
    apply(state, Configure(retention_minutes=60, retention_bytes=64 + 200))
    return state


BY_AGE = TrimSegments(30, TrimReason.TIME, 63 * NS_PER_MINUTE)
BY_SIZE = TrimSegments(20, TrimReason.SIZE, NS_PER_MINUTE)


def test_trim_by_age_or_size_removes_segments_exceeding_policy() -> None:
    assert must(SegmentsTrimmed, apply(by_policy(), BY_AGE)).log_start == 30
    assert must(SegmentsTrimmed, apply(by_policy(), BY_SIZE)).log_start == 20


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (Configure(retention_minutes=0, retention_bytes=0), None),
        (Configure(retention_minutes=63, retention_bytes=64 + 400), None),
        (Configure(retention_minutes=62, retention_bytes=64 + 300), 10),
        (Configure(retention_minutes=1, retention_bytes=1), {"TIME": 30, "SIZE": 20}),
        (HoldPosition("reader", 0, 1), None),
        (HoldPosition("reader", 10, 1), 10),
        (HoldPosition("reader", 19, 1), 10),
        (HoldPosition("reader", 45, 1), {"TIME": 30, "SIZE": 20}),
    ],
)
@pytest.mark.parametrize("trim", [BY_AGE, BY_SIZE])
def test_trim_is_limited_by_policy_and_holds_when_applied(
    trim: TrimSegments, change: Command, start: dict[str, int] | int | None
) -> None:
    state = by_policy()
    apply(state, change)
    before = encode_state(state)
    outcome = apply(state, trim)
    wanted = start[trim.reason.name] if isinstance(start, dict) else start
    if wanted is None:
        assert "may be trimmed" in must(CommandRejected, outcome).why
        assert encode_state(state) == before
    else:
        assert must(SegmentsTrimmed, outcome).log_start == wanted
        assert state.log_start == wanted


def test_trim_overrides_hold_only_for_bytes_over_hold_limit() -> None:
    state = by_policy()
    apply(state, HoldPosition("reader", 0, 1))
    apply(state, Configure(hold_bytes_max=150))
    assert must(SegmentsTrimmed, apply(state, BY_AGE)).overridden == ("reader",)
    assert state.log_start == 20


def test_disk_trim_overrides_holds_but_is_rejected_without_disk_limit() -> None:
    state, trim = by_policy(), TrimSegments(20, TrimReason.DISK, 1)
    apply(state, HoldPosition("reader", 0, 1))
    apply(state, Configure(retention_disk_percent=0))
    refusal(state, trim)
    apply(state, Configure(retention_disk_percent=50))
    assert must(SegmentsTrimmed, apply(state, trim)).overridden == ("reader",)


@given(st.lists(COMMANDS, max_size=6), st.integers(1, 80 * NS_PER_MINUTE))
def test_planned_trim_applied_to_same_state_removes_all_planned_segments(
    commands: list[Command], clock_ns: int
) -> None:
    state = by_policy()
    for command in commands:
        apply(state, command)
    plan = plan_trim(
        [one for one in state.segments if not one.is_trimmed],
        state.merged.offset,
        policy_of(state.configuration),
        [clock_ns],
        [],
        held_positions(state),
        members=1,
    )
    if plan is not None:
        trimmed = must(SegmentsTrimmed, apply(state, TrimSegments(plan.up_to, plan.reason, clock_ns)))
        assert (trimmed.segments, trimmed.size_bytes) == (plan.segments, plan.size_bytes)
        assert trimmed.overridden == plan.overridden

"""Soft, hard and forced resets of the replicated state: what they keep and where merging continues."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from sequencer_core import (
    do_close,
    do_fence,
    do_merge,
    do_open,
    do_roll,
    merging,
    must,
    new_state,
    opening,
    piece,
    refusal,
)

from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TRIMMED_ENTRIES_MAX, TrimReason
from sequencer.state.apply import apply
from sequencer.state.apply_result import ClusterReset, LeasesGranted, RunOpened
from sequencer.state.commands import MergeRange, ResetCluster
from sequencer.state.leases.leases import TOKEN_END, AcquireLeases
from sequencer.state.operations.resets import run_starts
from sequencer.state.session_commands import FenceRun
from sequencer.state.state import (
    BEGIN,
    ClearedRange,
    End,
    ForcedQuorum,
    LastReset,
    MergedSegment,
    SequencerState,
)
from sequencer.state.state_codec import decode_state, encode_state

REQUEST = b"R" * 16


def reset(state: SequencerState, *, is_hard: bool, epoch: int = 2) -> ClusterReset:
    return must(ClusterReset, apply(state, ResetCluster(is_hard, epoch, 77, REQUEST)))


def busy() -> SequencerState:
    """Return a state with three sessions: partly merged, never merged, wholly merged. It has two merged
    segments.
    """
    state = new_state()
    do_open(state, "a")
    do_open(state, "b", incarnation=1)
    do_open(state, "c", incarnation=2)
    do_merge(state, piece(1), piece(3, first=5))
    do_roll(state)
    do_merge(state, piece(1, start=128, end=256, first=10))
    do_fence(state, 3)
    end = state.sessions[3].consumed
    assert end is not None
    do_close(state, 3, 0, end.end)
    return state


def test_soft_reset_changes_only_last_reset_record() -> None:
    state, before = busy(), busy()
    assert reset(state, is_hard=False) == ClusterReset(False, 2)
    assert state.last_reset == LastReset(False, 2, 77, REQUEST, "")
    state.last_reset = None
    assert encode_state(state) == encode_state(before)


def forced(generation: int, request: bytes, *, is_hard: bool = False, lease_token: int = 0) -> SequencerState:
    """Return the state with which a cluster continues after a force, and acquire one lease in it."""
    state = new_state()
    state.lease_token = lease_token
    must(ClusterReset, apply(state, ResetCluster(is_hard, generation << 16, 77, request, "n1")))
    must(LeasesGranted, apply(state, AcquireLeases(b"a" * 16, "owner", 1000, ("g/q",))))
    return state


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(1, 255))
def test_rival_forced_resets_of_one_generation_give_distinct_tokens(
    one: bytes, other: bytes, generation: int
) -> None:
    assume(one[:3] != other[:3])  # In practice the ids are random.
    tokens = [forced(generation, request).leases["g/q"].token for request in (one, other)]
    assert abs(tokens[0] - tokens[1]) >= 1 << 31, "so many may be given before the ranges meet"
    assert all(0 < token < TOKEN_END for token in tokens)


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(1, 254))
def test_forced_reset_of_later_generation_gives_greater_tokens(
    one: bytes, other: bytes, generation: int
) -> None:
    earlier = forced(generation, one).lease_token + (1 << 30)
    for known in (0, earlier):
        later = forced(generation + 1, other, lease_token=known)
        assert later.leases["g/q"].token > earlier


def test_reset_committed_by_majority_keeps_lease_token() -> None:
    state = forced(1, REQUEST)
    token = state.lease_token
    reset(state, is_hard=True, epoch=(1 << 16) + 1)
    assert state.lease_token == token


def test_hard_reset_trims_all_merged_segments_including_growing_one() -> None:
    state = busy()
    position, chain, total = state.position, state.merged.chain, state.merged.total_bytes
    instruction, sequenced_ns = state.instruction, state.sequenced_ns
    assert reset(state, is_hard=True) == ClusterReset(True, 2)
    assert [(one.id, one.reason, one.trimmed_ns) for one in state.segments] == [
        (SegmentId(0, 0), TrimReason.RESET, 77),
        (SegmentId(0, 1), TrimReason.RESET, 77),
    ]
    assert state.segments[-1].end == state.position == position == state.log_start
    assert (state.merged.segment, state.merged.first) == (None, position)
    assert (state.merged.chain, state.merged.total_bytes) == (chain, total)
    assert (state.instruction, state.sequenced_ns) == (instruction, sequenced_ns)
    assert state.cleared == ClearedRange(2, position, state.next_session_id, 2)


def test_positions_continue_after_hard_reset_in_segment_of_new_run() -> None:
    state = busy()
    position = state.position
    reset(state, is_hard=True)
    do_open(state, "a", run=1)
    order = do_merge(state, piece(1, run=1, first=900))
    assert (order.segment, order.offset, order.first_position) == (SegmentId(2, 0), 0, position)
    assert do_roll(state).segment == SegmentId(2, 1)
    assert do_merge(state, piece(1, run=1, start=128, end=256, first=910)).segment == SegmentId(2, 1)
    reset(state, is_hard=True, epoch=3)
    do_open(state, "a", run=2)
    assert do_merge(state, piece(1, run=2, first=950)).segment == SegmentId(3, 0)


def test_hard_reset_ends_every_open_run_at_its_merged_end() -> None:
    state = busy()
    merged = state.sessions[1].consumed
    assert merged is not None
    whole = state.sessions[3]
    reset(state, is_hard=True)
    assert (state.sessions[1].done, state.sessions[1].fenced_end) == ((0, merged.end), 1)
    assert (state.sessions[2].done, state.sessions[2].fenced_end) == ((0, End(*BEGIN, 0)), 1)
    assert state.sessions[3] == whole, "it was merged whole"
    assert all(not session.active_runs and session.consumed is None for session in state.sessions.values())
    refusal(state, FenceRun(1, 0))


def test_hard_reset_ends_all_waiting_runs_of_session() -> None:
    state = busy()
    do_open(state, "a", run=4)
    do_open(state, "a", run=6)
    number = 20
    reset(state, is_hard=True)
    assert state.sessions[1].done == (6, End(*BEGIN, number))
    assert state.sessions[1].fenced_end == 7


def test_directory_continues_with_next_run_but_not_earlier_one_after_hard_reset() -> None:
    state = busy()
    reset(state, is_hard=True)
    refused = refusal(state, opening("a", run=0))
    assert refused.is_fenced
    assert must(RunOpened, apply(state, opening("a", run=1, newest=1))) == RunOpened(1, 1)


def test_dedup_watermarks_survive_hard_reset() -> None:
    state = new_state()
    do_open(state, "t", dedup="twins")
    do_merge(state, piece(1, first=100))
    reset(state, is_hard=True)
    assert state.wanted == {"twins": 110}


def test_dedup_numbers_dropped_by_hard_reset_are_merged_from_another_session() -> None:
    state = new_state()
    do_open(state, "t", dedup="twins")
    do_merge(state, piece(1, count=50))
    reset(state, is_hard=True)
    must(RunOpened, apply(state, opening("t", run=1, dedup="twins", newest=1)))
    waiting = piece(1, run=1, first=60)
    assert "dedup id 60 where 50 is expected" in refusal(state, merging(state, waiting)).why
    anew = do_open(state, "t", incarnation=1, dedup="twins")
    assert (
        "an older incarnation, session 1, is not" in refusal(state, merging(state, piece(anew, first=50))).why
    )
    do_merge(state, piece(do_open(state, "t~2", incarnation=2, dedup="twins"), first=50))
    do_merge(state, waiting)
    assert state.wanted == {"twins": 70}


def test_hard_reset_remembers_trimmed_segments_up_to_limit() -> None:
    state = busy()
    state.segments.extend(
        MergedSegment(SegmentId(0, 2 + roll), 20 + roll, 21 + roll, 9, 1, 2)
        for roll in range(TRIMMED_ENTRIES_MAX)
    )
    reset(state, is_hard=True)
    assert len(state.segments) == TRIMMED_ENTRIES_MAX
    assert all(segment.is_trimmed for segment in state.segments)


def test_reset_records_survive_state_encoding() -> None:
    state = busy()
    reset(state, is_hard=True)
    reset(state, is_hard=False, epoch=3)
    assert decode_state(encode_state(state)) == state
    assert state.cleared is not None
    assert state.cleared.epoch == 2


def force(
    state: SequencerState, epoch: int = 1 << 16, *, is_hard: bool = False, request: bytes = REQUEST
) -> None:
    must(ClusterReset, apply(state, ResetCluster(is_hard, epoch, 77, request, "n1")))


def merged_in(state: SequencerState, *pieces: MergeRange) -> SegmentId:
    """Merge the pieces, and return the segment of their blocks."""
    return do_merge(state, *pieces).segment


def test_merging_continues_in_segment_of_new_run_after_forced_soft_reset() -> None:
    state = busy()
    growing, position, chain = state.merged.segment, state.position, state.merged.chain
    force(state)
    assert state.force == ForcedQuorum(REQUEST, "n1")
    assert (state.merged.segment, state.position, state.merged.chain) == (growing, position, chain)
    assert decode_state(encode_state(state)) == state
    assert merged_in(state, piece(1, start=256, end=384, first=20)) == SegmentId(1 << 16, 0)
    assert (state.segments[-1].id, state.segments[-1].end, state.merged.first) == (
        growing,
        position,
        position,
    )
    do_roll(state)
    assert merged_in(state, piece(1, start=384, end=512, first=30)) == SegmentId(1 << 16, 1)


def test_merging_continues_in_segment_of_new_run_after_force_with_empty_growing_segment() -> None:
    state = busy()
    do_roll(state)
    empty, position = state.merged.segment, state.position
    force(state)
    assert merged_in(state, piece(1, start=256, end=384, first=20)) == SegmentId(1 << 16, 0)
    assert (state.segments[-1].id, state.segments[-1].first, state.segments[-1].end) == (
        empty,
        position,
        position,
    )


def test_merging_continues_in_segment_of_new_run_after_force_with_empty_log() -> None:
    state = new_state()
    do_open(state, "a")
    force(state)
    assert merged_in(state, piece(1)) == SegmentId(1 << 16, 0)


def test_merging_continues_in_segment_of_new_run_after_force_following_hard_reset() -> None:
    state = busy()
    position = state.position
    reset(state, is_hard=True)
    force(state)
    assert state.cleared is not None
    assert (state.cleared.epoch, state.cleared.run, state.cleared.position) == (2, 1 << 16, position)
    do_open(state, "a", run=1, newest=1)
    assert merged_in(state, piece(1, run=1, first=10)) == SegmentId(1 << 16, 0)


def test_merging_starts_in_segment_of_forced_run_after_forced_hard_reset() -> None:
    state = busy()
    force(state, is_hard=True)
    assert (state.merged.segment, state.merged.next_run) == (None, 0)
    do_open(state, "a", run=1, newest=1)
    assert merged_in(state, piece(1, run=1, first=10)) == SegmentId(1 << 16, 0)
    assert state.force == ForcedQuorum(REQUEST, "n1")


def test_forced_quorum_record_is_kept_by_majority_reset_and_replaced_by_next_force() -> None:
    state = busy()
    force(state)
    reset(state, is_hard=False, epoch=(1 << 16) + 1)
    assert state.force == ForcedQuorum(REQUEST, "n1")
    force(state, 2 << 16, request=b"S" * 16)
    assert state.force == ForcedQuorum(b"S" * 16, "n1")


def test_run_starts_report_log_position_at_each_reset() -> None:
    assert run_starts(new_state()) == {0: 0}
    state = busy()
    assert run_starts(state) == {0: 0}
    hard = state.position
    reset(state, is_hard=True)
    assert run_starts(state) == {0: 0, 2: hard}
    do_open(state, "a", run=1, newest=1)
    merged_in(state, piece(1, run=1, first=10))
    assert run_starts(state) == {0: 0, 2: hard}
    assert (forced := state.position) > hard
    force(state, request=b"S" * 16)
    assert run_starts(state) == {0: 0, 2: hard, 1 << 16: forced}
    merged_in(state, piece(1, run=1, start=128, end=256, first=20))
    assert run_starts(state) == {0: 0, 2: hard, 1 << 16: forced}

"""Sealed runs, opened with their ends, merge without fence or close and otherwise behave as open runs."""

from __future__ import annotations

import pytest
from sequencer_core import (
    do_close,
    do_fence,
    do_merge,
    do_open,
    merging,
    must,
    new_state,
    newest_of,
    opening,
    piece,
    refusal,
)

from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, RangesMerged, RunFenced, RunOpened
from sequencer.state.session_commands import CloseSession, OpenSealedRuns, SealedRun
from sequencer.state.state import RUNS_MAX, End, SequencerState
from sequencer.state.state_codec import decode_state, encode_state

END = End(0, 128, 10)
EMPTY = End(0, 64, 0)


def sealing(
    state: SequencerState, *xs: int, end: End = END, name: str = "a", incarnation: int = 0
) -> OpenSealedRuns:
    whose = opening(name, incarnation=incarnation)
    runs = tuple(SealedRun(x, opening(name, x, incarnation=incarnation).run_id, end) for x in xs)
    newest = newest_of(state, name)
    return OpenSealedRuns(whose.session, whose.incarnation, whose.dedup_id, runs, newest)


def do_seal(state: SequencerState, *xs: int, end: End = END) -> int:
    return must(RunOpened, apply(state, sealing(state, *xs, end=end))).session_id


def ends(state: SequencerState, session_id: int = 1) -> list[tuple[int, End | None]]:
    return [(active.run, active.end) for active in state.sessions[session_id].active_runs]


def test_sealed_runs_are_merged_in_order_without_fence_or_close() -> None:
    state = new_state()
    session_id = do_seal(state, 0, 1, 2)
    assert ends(state) == [(0, END), (1, END), (2, END)]
    order = do_merge(state, piece(), piece(run=1), piece(run=2))
    assert [(block.run, block.message_count) for block in order.blocks if not block.is_declaration] == [
        (0, 10),
        (1, 10),
        (2, 10),
    ]
    assert [end.run for end in order.consumed] == [2]
    session = state.sessions[session_id]
    assert (session.active_runs, session.done, session.last_run, state.position) == ((), (2, END), 2, 30)


def test_ranges_of_several_runs_merge_equally_in_one_or_several_instructions() -> None:
    together, apart = new_state(), new_state()
    for state in (together, apart):
        do_seal(state, 0, 1, 4)
    do_merge(together, piece(), piece(run=1), piece(run=4))
    for x in (0, 1, 4):
        do_merge(apart, piece(run=x))
    assert together.sessions == apart.sessions
    assert together.position == apart.position


def test_instruction_skipping_a_run_is_rejected_and_changes_no_state() -> None:
    state = new_state()
    do_seal(state, 0, 1, 2)
    before = encode_state(state)
    command = merging(state, piece(), piece(run=2))
    assert "run 2 where run 1 is merged" in refusal(state, command).why
    assert encode_state(state) == before


def test_range_beyond_end_of_sealed_run_is_rejected() -> None:
    state = new_state()
    do_seal(state, 0)
    command = merging(state, piece(end=192, count=20))
    assert "beyond the end" in refusal(state, command).why


def test_sealing_skips_open_or_finished_runs_and_keeps_their_ends() -> None:
    state = new_state()
    do_open(state, run=0)
    do_seal(state, 0, 1, 2)
    assert ends(state) == [(0, None), (1, END), (2, END)]
    do_fence(state)
    do_close(state, 1, 0, EMPTY)
    do_merge(state, piece(run=1))
    assert ends(state) == [(2, END)]
    do_seal(state, 0, 1, 2, 3, end=End(0, 256, 20))
    assert ends(state) == [(2, END), (3, End(0, 256, 20))]


def test_sealing_only_finished_runs_is_rejected_with_same_error_as_opening_one() -> None:
    state = new_state()
    do_seal(state, 0, 1)
    do_merge(state, piece(), piece(run=1))
    do_open(state, run=5)
    assert refusal(state, sealing(state, 0, 1)) == refusal(state, opening(run=0, newest=1))


def test_sealing_rejected_at_first_run_opens_no_later_run() -> None:
    state = new_state()
    do_open(state, run=1, active=99)
    assert refusal(state, sealing(state, 1, 2)).is_fenced
    assert ends(state) == [(1, None)]


def test_sealing_opens_as_many_runs_as_fit_limit() -> None:
    state = new_state()
    for start in range(0, RUNS_MAX - 6, 250):
        do_seal(state, *range(start, min(start + 250, RUNS_MAX - 6)))
    do_seal(state, *range(RUNS_MAX - 6, RUNS_MAX + 100))
    assert len(ends(state)) == RUNS_MAX
    assert "wait to be merged" in refusal(state, sealing(state, RUNS_MAX)).why
    do_merge(state, piece())
    do_seal(state, *range(RUNS_MAX - 6, RUNS_MAX + 100))
    assert ends(state)[-1] == (RUNS_MAX, END)


def test_empty_sealed_runs_finish_in_turn_without_merge() -> None:
    state = new_state()
    do_seal(state, 0, 1, end=EMPTY)
    assert ends(state) == []
    do_seal(state, 2)
    do_seal(state, 3, 4, end=EMPTY)
    assert ends(state) == [(2, END), (3, EMPTY), (4, EMPTY)]
    do_merge(state, piece(run=2))
    assert (ends(state), state.sessions[1].done) == ([], (4, EMPTY))


def test_empty_sealed_run_of_new_incarnation_waits_for_older_incarnation() -> None:
    state = new_state()
    do_open(state)
    newer = must(RunOpened, apply(state, sealing(state, 0, end=EMPTY, incarnation=1))).session_id
    assert ends(state, newer) == [(0, None)]
    must(RunOpened, apply(state, sealing(state, 1, incarnation=1)))
    assert "is not merged completely" in refusal(state, merging(state, piece(newer))).why


@pytest.mark.parametrize("by", ["leader", "operator"])
def test_fenced_sealed_run_is_closed_at_end_reported_by_nodes(by: str) -> None:
    state = new_state()
    do_seal(state, 0)
    if by == "leader":
        do_fence(state)
    else:
        must(RunFenced, apply(state, CloseSession("a")))
    assert ends(state) == [(0, None)]
    nearer = End(0, 96, 4)
    do_close(state, 1, 0, nearer)
    do_fence(state)
    assert ends(state) == [(0, nearer)]
    do_merge(state, piece(end=96, count=4))
    assert ends(state) == []


def test_sealed_runs_survive_snapshot() -> None:
    state = new_state()
    do_seal(state, 0, 1)
    again = decode_state(encode_state(state))
    assert again.sessions == state.sessions
    assert encode_state(again) == encode_state(state)
    must(RangesMerged, apply(again, merging(again, piece())))


def test_sealing_runs_of_fenced_directory_is_rejected() -> None:
    state = new_state()
    do_open(state)
    do_open(state, incarnation=1)
    outcome = must(CommandRejected, apply(state, sealing(state, 1, 2)))
    assert outcome.is_fenced

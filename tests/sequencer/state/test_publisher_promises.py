"""What a publisher promised about its silence, in the replicated state: made, ended, and never again."""

from __future__ import annotations

import pytest
from sequencing import do_close, do_fence, do_open, must, new_state, opening

from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, Forgotten, RunFenced, RunOpened, SilenceLimited
from sequencer.state.run_lifecycle import is_promise_settled
from sequencer.state.session_commands import CloseSession, Forget, LimitSilence
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state


def promised(milliseconds: int = 60_000) -> SequencerState:
    """Session 1 promised in its run 0."""
    state = new_state()
    do_open(state)
    must(SilenceLimited, apply(state, LimitSilence(1, 0, milliseconds)))
    return state


def test_a_promise_is_kept_in_the_state_and_in_its_bytes() -> None:
    state = promised(1500)
    for one in (state, decode_state(encode_state(state))):
        assert [*one.promising] == [1]
        assert (one.sessions[1].silence_ms_max, one.sessions[1].is_closed_in_order) == (1500, False)


def test_a_promise_that_ended_in_order_is_not_made_again_by_a_late_command() -> None:
    state = promised()
    must(SilenceLimited, apply(state, LimitSilence(1, 0, 0)))
    assert not state.promising
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    state = decode_state(encode_state(state))
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    assert not state.promising
    assert state.sessions[1].is_closed_in_order


def test_the_end_of_a_promise_may_be_committed_before_the_promise() -> None:
    state = new_state()
    do_open(state)
    must(SilenceLimited, apply(state, LimitSilence(1, 0, 0)))
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    assert not state.promising


def test_a_later_run_ends_the_promise_and_makes_its_own() -> None:
    state = promised()
    must(RunOpened, apply(state, opening("a", run=1, newest=1)))
    assert not state.promising
    for milliseconds in (60_000, 0):
        must(CommandRejected, apply(state, LimitSilence(1, 0, milliseconds)))
        must(CommandRejected, apply(state, LimitSilence(1, 2, milliseconds)))
    must(SilenceLimited, apply(state, LimitSilence(1, 1, 2000)))
    assert state.sessions[1].silence_ms_max == 2000


def test_a_directory_that_was_superseded_promises_nothing() -> None:
    state = promised()
    do_open(state, "a", 1)
    assert not state.promising
    assert not decode_state(encode_state(state)).promising


@pytest.mark.parametrize("is_over", [False, True])
def test_an_operator_who_closes_the_session_ends_the_promise(is_over: bool) -> None:
    """Also after the cluster had closed the session by itself: the alarm lasts until somebody acts."""
    state = promised()
    if is_over:
        do_fence(state)
        do_close(state, 1, 0, (0, 64, 0))
        assert [*state.closed] == [*state.promising] == [1]
    must(RunFenced, apply(state, CloseSession("a")))
    assert not state.promising
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    if is_over:
        must(CommandRejected, apply(state, CloseSession("a")))


def test_a_record_that_is_deleted_takes_its_promise_along() -> None:
    state = promised()
    do_fence(state)
    do_close(state, 1, 0, (0, 64, 0))
    must(Forgotten, apply(state, Forget((1,))))
    assert not state.promising
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))


def test_what_is_left_to_commit_is_what_a_command_would_change() -> None:
    state = promised()
    for step in ("promised", "fenced", "closed in order", "opened again"):
        if step == "fenced":
            do_fence(state)
        elif step == "closed in order":
            apply(state, LimitSilence(1, 0, 0))
        elif step == "opened again":
            do_close(state, 1, 0, (0, 64, 0))
            do_open(state, run=1)
        for run in (0, 1):
            for milliseconds in (0, 1000):
                trial = decode_state(encode_state(state))
                session, changes = trial.sessions[1], LimitSilence(1, run, milliseconds)
                is_known = run <= session.last_run
                is_left = is_known and not is_promise_settled(session, run, milliseconds)
                assert isinstance(apply(trial, changes), SilenceLimited) == is_left, (step, changes)

"""A publisher's promise to limit its silence: made, ended and not made again in the replicated state."""

from __future__ import annotations

import pytest
from sequencer_core import do_close, do_fence, do_open, must, new_state, opening

from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, Forgotten, RunFenced, RunOpened, SilenceLimited
from sequencer.state.run_lifecycle import is_promise_settled
from sequencer.state.session_commands import CloseSession, Forget, LimitSilence
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state


def promised(milliseconds: int = 60_000) -> SequencerState:
    """Return a state in which session 1 made a promise in its run 0."""
    state = new_state()
    do_open(state)
    must(SilenceLimited, apply(state, LimitSilence(1, 0, milliseconds)))
    return state


def test_silence_promise_survives_state_encoding() -> None:
    state = promised(1500)
    for one in (state, decode_state(encode_state(state))):
        assert [*one.promising] == [1]
        assert (one.sessions[1].silence_ms_max, one.sessions[1].is_closed_in_order) == (1500, False)


def test_silence_promise_ended_in_order_is_not_made_again_by_late_command() -> None:
    state = promised()
    must(SilenceLimited, apply(state, LimitSilence(1, 0, 0)))
    assert not state.promising
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    state = decode_state(encode_state(state))
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    assert not state.promising
    assert state.sessions[1].is_closed_in_order


def test_silence_promise_is_rejected_if_its_end_was_committed_first() -> None:
    state = new_state()
    do_open(state)
    must(SilenceLimited, apply(state, LimitSilence(1, 0, 0)))
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))
    assert not state.promising


def test_later_run_ends_silence_promise_and_makes_its_own() -> None:
    state = promised()
    must(RunOpened, apply(state, opening("a", run=1, newest=1)))
    assert not state.promising
    for milliseconds in (60_000, 0):
        must(CommandRejected, apply(state, LimitSilence(1, 0, milliseconds)))
        must(CommandRejected, apply(state, LimitSilence(1, 2, milliseconds)))
    must(SilenceLimited, apply(state, LimitSilence(1, 1, 2000)))
    assert state.sessions[1].silence_ms_max == 2000


def test_superseded_directory_loses_its_silence_promise() -> None:
    state = promised()
    do_open(state, "a", 1)
    assert not state.promising
    assert not decode_state(encode_state(state)).promising


@pytest.mark.parametrize("is_over", [False, True])
def test_operator_closing_session_ends_silence_promise(is_over: bool) -> None:
    """This holds also after the cluster itself has closed the session: the alarm lasts until an operator
    acts.
    """
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


def test_deleted_session_record_removes_its_silence_promise() -> None:
    state = promised()
    do_fence(state)
    do_close(state, 1, 0, (0, 64, 0))
    must(Forgotten, apply(state, Forget((1,))))
    assert not state.promising
    must(CommandRejected, apply(state, LimitSilence(1, 0, 60_000)))


def test_silence_promise_of_known_run_is_unsettled_exactly_if_command_is_accepted() -> None:
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

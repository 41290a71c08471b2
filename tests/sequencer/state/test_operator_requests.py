"""Operator requests in the replicated state are carried out at most once and never after their deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequencer_core import new_state, refusal

from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, ConfigurationChanged, RequestLapsed, RequestWaits
from sequencer.state.commands import Configure, DecideRequest, Operation, ReleaseHold, SubmitRequest
from sequencer.state.operations.operator_requests import to_decide
from sequencer.state.state import ASKED_MAX
from sequencer.state.state_codec import decode_state, encode_state


def request(number: int = 0) -> bytes:
    return number.to_bytes(16, "big")


def asked(number: int = 0, until_ns: int = 100, operation: Operation | None = None) -> SubmitRequest:
    return SubmitRequest(request(number), until_ns, operation or Configure(roll_minutes=number))


def decided(number: int = 0, at_ns: int = 50) -> DecideRequest:
    return DecideRequest(request(number), at_ns)


def test_request_waits_until_decided_and_is_then_carried_out() -> None:
    state = new_state()
    assert apply(state, asked(5)) == RequestWaits()
    assert state.configuration.roll_minutes == 0
    assert [*to_decide(state, 50)] == [request(5)]
    assert apply(state, decided(5)) == ConfigurationChanged()
    assert state.configuration.roll_minutes == 5
    assert [*to_decide(state, 50)] == []


def test_decided_request_returns_rejection_of_its_command() -> None:
    state = new_state()
    apply(state, asked(operation=ReleaseHold("nobody")))
    assert "holds nothing back" in refusal(state, decided()).why


@pytest.mark.parametrize("again", [asked(5), decided(5)], ids=["asked", "decided"])
def test_repeated_request_is_not_carried_out_again(again: SubmitRequest | DecideRequest) -> None:
    state = new_state()
    apply(state, asked(5))
    apply(state, decided(5))
    apply(state, Configure(roll_minutes=9))
    apply(state, again)
    apply(state, decided(5))
    assert state.configuration.roll_minutes == 9


def test_request_is_carried_out_at_its_deadline_and_lapses_after_it() -> None:
    state = new_state()
    apply(state, asked(5))
    assert apply(state, decided(5, at_ns=100)) == ConfigurationChanged()
    state = new_state()
    apply(state, asked(5))
    assert apply(state, decided(5, at_ns=101)) == RequestLapsed(may_be_done=False)
    assert state.configuration.roll_minutes == 0
    assert not state.asked


def test_request_received_after_its_deadline_lapses_at_once() -> None:
    state = new_state()
    apply(state, asked(1))
    apply(state, decided(1, at_ns=101))
    assert apply(state, asked(2, until_ns=100)) == RequestLapsed(may_be_done=True)
    assert apply(state, asked(2, until_ns=101)) == RequestWaits()


def test_clock_moving_back_does_not_revive_lapsed_request() -> None:
    state = new_state()
    for number, until_ns in ((1, 100), (2, 1000)):
        apply(state, asked(number, until_ns))
    apply(state, decided(2, at_ns=500))
    assert apply(state, decided(1, at_ns=50)) == RequestLapsed(may_be_done=False)
    assert state.decided_ns == 500


def test_decided_request_is_forgotten_only_after_its_deadline() -> None:
    state = new_state()
    for number in (1, 2):
        apply(state, asked(number))
        apply(state, decided(number))
    assert [*to_decide(state, 100)] == []
    (one,) = to_decide(state, 101)
    assert apply(state, DecideRequest(one, 101)) == RequestLapsed(may_be_done=True)
    assert not state.asked
    assert apply(state, asked(1)) == RequestLapsed(may_be_done=True)


def test_request_over_limit_is_rejected_until_deadline_of_earlier_one_has_passed() -> None:
    state = new_state()
    for number in range(ASKED_MAX):
        apply(state, asked(number))
        apply(state, decided(number))
    assert "requests of operators" in refusal(state, asked(ASKED_MAX)).why
    (one,) = to_decide(state, 101)
    apply(state, DecideRequest(one, 101))
    assert apply(state, asked(ASKED_MAX, 200)) == RequestWaits()


NUMBERS = st.integers(0, 3)
COMMANDS = st.one_of(
    NUMBERS.map(lambda number: asked(number, until_ns=3 * number + 2)),
    st.builds(decided, NUMBERS, st.integers(1, 14)),
)


@given(st.lists(COMMANDS, max_size=40))
def test_request_is_carried_out_at_most_once_and_not_after_its_deadline(
    commands: list[SubmitRequest | DecideRequest],
) -> None:
    state = new_state()
    done: list[bytes] = []
    for command in commands:
        before = encode_state(state)
        outcome = apply(state, command)
        assert decode_state(encode_state(state)) == state
        match command, outcome:
            case _, CommandRejected():
                assert encode_state(state) == before
            case DecideRequest(), ConfigurationChanged():
                done.append(command.id)
                assert state.decided_ns <= 3 * int.from_bytes(command.id, "big") + 2
            case DecideRequest(), RequestLapsed(may_be_done):
                assert may_be_done == (command.id in done)
                assert state.decided_ns > 3 * int.from_bytes(command.id, "big") + 2
    assert len(done) == len(set(done))

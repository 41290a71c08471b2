"""Leases in the replicated state: one owner at a time, rising tokens, renewal, release and expiry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencer_core import must, new_state, refusal

from sequencer.leader.lease_expiry import POLL_NS, LeaseExpiry
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, LeasesExpired, LeasesGranted
from sequencer.state.commands import Command, ResetCluster
from sequencer.state.leases.leases import (
    LEASES_PER_COMMAND_MAX,
    AcquireLeases,
    ExpireLeases,
    HeldLease,
    IdleLease,
    ReleaseLeases,
    RenewLeases,
)
from sequencer.state.state import LEASES_MAX, LEASES_PER_GROUP_MAX, RELEASED_MAX, SequencerState
from sequencer.state.state_codec import decode_state, encode_state

S = 10**9
NUMBERS = itertools.count(1)


def request(number: int | None = None) -> bytes:
    return (next(NUMBERS) if number is None else number).to_bytes(16, "big")


def acquiring(*names: str, owner: str = "h1", by: bytes | None = None, seconds: int = 10) -> AcquireLeases:
    return AcquireLeases(by or request(), owner, seconds * 1000, names)


def do(state: SequencerState, command: Command) -> tuple[int, ...]:
    return must(LeasesGranted, apply(state, command)).tokens


def renew(state: SequencerState, *held: tuple[str, int], owner: str = "h1") -> tuple[int, ...]:
    return do(state, RenewLeases(request(), owner, tuple(HeldLease(*one) for one in held)))


def release(state: SequencerState, *held: tuple[str, int], owner: str = "h1") -> tuple[int, ...]:
    return do(state, ReleaseLeases(request(), owner, tuple(HeldLease(*one) for one in held)))


def test_free_lease_is_granted_and_held_lease_is_not() -> None:
    state = new_state()
    assert do(state, acquiring("g/q1", "g/q2")) == (1, 2)
    assert do(state, acquiring("g/q2", "g/q3", owner="h2")) == (0, 3)
    assert do(state, acquiring("g/q2")) == (0,), "its owner asks anew: it may be another process of that name"
    assert {name: one.owner for name, one in state.leases.items()} == {
        "g/q1": "h1",
        "g/q2": "h1",
        "g/q3": "h2",
    }


def test_repeated_acquire_request_returns_same_tokens_and_changes_no_state() -> None:
    state = new_state()
    ask = acquiring("g/q1", "g/q2")
    do(state, acquiring("g/q1", owner="h2"))
    assert do(state, ask) == (0, 2)
    before = encode_state(state)
    assert must(LeasesGranted, apply(state, ask)) == LeasesGranted(ask.request, (0, 2))
    assert encode_state(state) == before
    stranger = AcquireLeases(ask.request, "h3", 10_000, ask.names)
    assert do(state, stranger) == (0, 0)


def test_released_lease_is_granted_to_new_request_but_not_to_repeated_one() -> None:
    state = new_state()
    ask, other = acquiring("g/q1", "g/q2"), acquiring("g/q3")
    do(state, ask)
    do(state, other)
    release(state, ("g/q1", 1))
    apply(state, ExpireLeases((IdleLease("g/q3", 3, 0),)))
    state = decode_state(encode_state(state))
    assert do(state, ask) == (0, 2)
    assert do(state, other) == (0,)
    assert sorted(state.leases) == ["g/q2"]
    assert do(state, acquiring("g/q1")) == (4,)
    release(state, ("g/q1", 4))
    assert do(state, ask) == (0, 2), "whoever had it meanwhile"


def test_released_requests_are_remembered_up_to_released_max() -> None:
    state = new_state()
    first = acquiring("g/q1", "g/q2")
    do(state, first)
    release(state, ("g/q1", 1), ("g/q2", 2))
    for token in range(3, 3 + RELEASED_MAX):
        assert do(state, first) == (0, 0)
        do(state, acquiring("g/q1"))
        release(state, ("g/q1", token))
    assert len(state.released) == RELEASED_MAX
    assert do(state, first) != (0, 0)


def test_lease_is_renewed_or_released_only_by_its_owner_with_its_token() -> None:
    state = new_state()
    do(state, acquiring("g/q1"))
    before = encode_state(state)
    for held, owner in ((("g/q1", 1), "h2"), (("g/q1", 2), "h1"), (("g/q2", 1), "h1")):
        assert renew(state, held, owner=owner) == release(state, held, owner=owner) == (0,)
    assert encode_state(state) == before
    assert renew(state, ("g/q2", 9), ("g/q1", 1)) == (0, 1)
    assert state.leases["g/q1"].renewals == 1
    assert release(state, ("g/q1", 1)) == (1,)
    assert release(state, ("g/q1", 1)) == (0,)
    assert not state.leases


def test_token_is_greater_than_all_earlier_ones_after_release_and_restart() -> None:
    state = new_state()
    assert do(state, acquiring("g/q1")) == (1,)
    release(state, ("g/q1", 1))
    state = decode_state(encode_state(state))
    assert do(state, acquiring("g/q1", owner="h2")) == (2,)
    assert renew(state, ("g/q1", 1)) == (0,)


@pytest.mark.parametrize("is_hard", [False, True])
def test_reset_keeps_leases_and_forced_reset_raises_next_token_above_2_to_40(
    is_hard: bool,
) -> None:
    state = new_state()
    do(state, acquiring("g/q1", "g/q2"))
    apply(state, ResetCluster(is_hard, 2, 0, b"R" * 16))
    assert do(state, acquiring("g/q3")) == (3,)
    apply(state, ResetCluster(is_hard, 1 << 16, 0, b"S" * 16, "n1"))
    assert renew(state, ("g/q1", 1)) == (1,)
    (token,) = do(state, acquiring("g/q4"))
    assert token > 1 << 40


def test_expire_command_skips_leases_renewed_or_granted_again_since_measurement() -> None:
    state = new_state()
    do(state, acquiring("g/q1", "g/q2", "g/q3"))
    renew(state, ("g/q2", 2))
    release(state, ("g/q3", 3))
    do(state, acquiring("g/q3", owner="h2"))
    idle = tuple(IdleLease(f"g/q{token}", token, 0) for token in (1, 2, 3))
    assert apply(state, ExpireLeases(idle)) == LeasesExpired(("g/q1",))
    assert sorted(state.leases) == ["g/q2", "g/q3"]
    assert "renewed, released or free" in refusal(state, ExpireLeases(idle)).why


def test_acquire_over_group_or_total_lease_limit_is_rejected_as_a_whole() -> None:
    state = new_state()

    def fill(group: str, count: int) -> None:
        names = [f"{group}/{number}" for number in range(count)]
        for start in range(0, count, LEASES_PER_COMMAND_MAX):
            do(state, acquiring(*names[start : start + LEASES_PER_COMMAND_MAX]))

    fill("a", LEASES_PER_GROUP_MAX)
    assert "leases of group a" in refusal(state, acquiring("b/x", "a/x")).why
    assert "b/x" not in state.leases
    assert do(state, acquiring("a/1", "b/x"))[0] == 0, "what is held takes no room"
    release(state, ("b/x", state.lease_token))
    for group in "bcd":
        fill(group, (LEASES_MAX - LEASES_PER_GROUP_MAX) // 3)
    assert "leases are held at most" in refusal(state, acquiring("e/x")).why
    assert len(encode_state(state)) < 1 << 20


def test_brief_of_expire_command_is_bounded_for_many_leases() -> None:
    tokens = range(1, LEASES_PER_COMMAND_MAX + 1)
    over = ExpireLeases(tuple(IdleLease(f"g/{token:0250}", token, 0) for token in tokens))
    assert len(over.brief) < 500


def due(clock: LeaseExpiry, now_ns: int) -> Sequence[str]:
    found = clock.due(now_ns)
    return [] if found is None else [one.name for one in found.leases]


def test_lease_expires_after_full_duration_since_leader_saw_its_renewal() -> None:
    state = new_state()
    do(state, acquiring("g/q1", "g/q2", seconds=10))
    clock = LeaseExpiry(state)
    assert due(clock, 5 * S) == []
    renew(state, ("g/q2", 2))
    assert due(clock, 6 * S) == []
    assert due(clock, 15 * S - 1) == []
    assert due(clock, 15 * S + POLL_NS) == ["g/q1"]
    assert due(clock, 16 * S + POLL_NS) == ["g/q1", "g/q2"], "it is said until it is applied"
    assert due(LeaseExpiry(state), 100 * S) == [], "another leader begins to measure anew"


def test_lease_granted_again_after_release_has_full_duration() -> None:
    state = new_state()
    do(state, acquiring("g/q1"))
    clock = LeaseExpiry(state)
    assert due(clock, 0) == []
    release(state, ("g/q1", 1))
    do(state, acquiring("g/q1", owner="h2"))
    assert due(clock, 11 * S) == []
    assert due(clock, 21 * S) == ["g/q1"]


def test_leader_checks_expiry_once_per_poll_interval_and_not_without_leases() -> None:
    state = new_state()
    clock = LeaseExpiry(state)
    assert due(clock, 0) == []
    do(state, acquiring("g/q1", seconds=1))
    assert due(clock, 1) == []
    assert due(clock, 1 + POLL_NS - 1) == []
    assert due(clock, 1 + S) == ["g/q1"]
    assert due(clock, 1 + S + POLL_NS - 1) == []


HOSTS = st.sampled_from(["h1", "h2"])
LEASES = st.sampled_from(["g/q1", "g/q1", "g/q2"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "renew", "release", "again", "leader", "wait"]),
        HOSTS,
        LEASES,
        st.integers(0, 99),
    ),
    min_size=40,
    max_size=80,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_lease_has_one_owner_at_a_time_with_late_lost_or_repeated_commands(
    steps: list[tuple[str, str, str, int]],
) -> None:
    """An owner relies on a lease for its duration from the start of the request. Commands are applied
    late.
    """
    state, now_ns = new_state(), 0
    leader = LeaseExpiry(state)
    log: list[Command] = []
    counts_on: dict[str, tuple[str, int, int]] = {}
    """By lease: the owner that may rely on it, the token, and the end time."""
    mine: dict[tuple[str, str], int] = {}
    tokens: list[int] = []

    def commit(command: Command, began_ns: int) -> None:
        outcome = apply(state, command)
        assert decode_state(encode_state(state)) == state
        if isinstance(outcome, CommandRejected | LeasesExpired) or isinstance(command, ReleaseLeases):
            return
        assert isinstance(outcome, LeasesGranted)
        assert isinstance(command, AcquireLeases | RenewLeases)
        names = command.names if isinstance(command, AcquireLeases) else [one.name for one in command.leases]
        for name, token in zip(names, outcome.tokens, strict=True):
            if not token:
                continue
            owner, other, until_ns = counts_on.get(name, ("", 0, 0))
            if token != other:
                assert until_ns <= began_ns or until_ns <= now_ns, (owner, "still counts on", name)
                assert token > max(tokens, default=0)
                tokens.append(token)
            counts_on[name] = (command.owner, token, max(until_ns, began_ns + 10 * S))
            mine[command.owner, name] = token

    for kind, host, name, choice in steps:
        now_ns += S
        token = mine.get((host, name), 0)
        match kind:
            case "acquire":
                log.append(acquiring(name, owner=host))
                commit(log[-1], now_ns)
            case "renew" if token:
                log.append(RenewLeases(request(), host, (HeldLease(name, token),)))
                commit(log[-1], now_ns)
            case "release" if token:
                owner, held, _ = counts_on[name]
                if (owner, held) == (host, token):
                    counts_on[name] = (owner, held, 0)
                log.append(ReleaseLeases(request(), host, (HeldLease(name, mine.pop((host, name))),)))
                commit(log[-1], now_ns)
            case "again" if log:
                apply(state, log[choice % len(log)])  # The requester has its answer, or waits no more.
            case "leader":
                leader = LeaseExpiry(state)
            case "wait":
                now_ns += 4 * S
        over = leader.due(now_ns)
        if over is not None:
            log.append(over)
            commit(over, now_ns)
    assert tokens == sorted(set(tokens))

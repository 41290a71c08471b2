"""Leases in simulated clusters under faults: one holder at a time, rising tokens, each request to an owner is
carried out once at most. The simulation can fail.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from simulation import machine, owner_requests
from simulation.lease_holders import DURATION_MS, Holder, Holders
from simulation.owner_requests import OwnerRequests
from simulation.simulate import SimulationFailed, simulate

from sequencer.leader import lease_expiry
from sequencer.leader.lease_expiry import LeaseExpiry
from sequencer.state.apply_result import LeasesExpired, LeasesGranted, Outcome, PostAnswer
from sequencer.state.leases import leases, requests, tables
from sequencer.state.leases.leases import AcquireLeases, ExpireLeases, RenewLeases
from sequencer.state.leases.table_rows import LeaseTable
from sequencer.state.leases.tables import WriteTable
from sequencer.state.state import LeaseState, SequencerState

Patch = pytest.MonkeyPatch

CALM: dict[str, Any] = {"propose_every_s": 1.0, "burst": 0.0, "large": 0.0, "holders": 3, "nodes": 3}
TURNS: dict[str, Any] = {"faults": {"kill": 2, "hand_over": 2, "pause": 2, "jump": 1}, "fault_every_s": 0.3}


def test_no_two_holders_count_on_one_lease_whatever_fails() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += simulate(seed, **CALM).leases
    assert all(seen[kind] for kind in ("granted", "renewed", "released", "expired")), seen


def test_leases_outlive_resets_and_tokens_are_greater_after_a_forced_one() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        report = simulate(seed, faults={"reset": 1, "force": 1, "kill": 1}, fault_every_s=0.3, **CALM)
        seen += report.seen + report.leases
    assert seen["epoch_over"]
    assert seen["epoch_forced"]
    assert seen["granted"]


@pytest.mark.slow
def test_no_two_holders_count_on_one_lease_with_more_seeds() -> None:
    for seed in range(100, 103):
        simulate(seed, holders=3)


def finds(what: str, seeds: range = range(12), **settings: Any) -> None:
    """One of the seeds fails by what was planted."""
    for seed in seeds:
        try:
            simulate(seed, **{**CALM, **TURNS, **settings})
        except SimulationFailed as error:
            found = repr(error.__cause__)
            assert what in found, (seed, found)
            return
    pytest.fail(f"nothing found with {seeds}")


def test_a_lease_that_expires_though_it_was_renewed_meanwhile(monkeypatch: Patch) -> None:
    def expire(state: SequencerState, command: ExpireLeases) -> Outcome:
        over = [one.name for one in command.leases if state.leases.pop(one.name, None) is not None]
        return LeasesExpired(tuple(over))

    monkeypatch.setattr(leases, "expire", expire)
    storms = {"faults": {"storm": 3, "pause": 2}, "fault_every_s": 0.2, "seconds": 3.0}
    finds("two holders of one lease", seeds=range(12, 40), **storms)


def test_a_leader_that_measures_the_time_of_others(monkeypatch: Patch) -> None:
    due = LeaseExpiry.due

    def due_as_if_seen_before(self: LeaseExpiry, now_ns: int) -> ExpireLeases | None:
        for name, lease in self.state.leases.items():
            self._seen.setdefault(name, (lease.token, lease.renewals, now_ns - DURATION_MS * 10**6))
        return due(self, now_ns)

    monkeypatch.setattr(LeaseExpiry, "due", due_as_if_seen_before)
    finds("two holders of one lease")


def test_renewals_that_the_leader_does_not_see(monkeypatch: Patch) -> None:
    def renew(state: SequencerState, command: RenewLeases) -> Outcome:
        held = leases._held(state, command)
        tokens = tuple(held.get(one.name, 0) for one in command.leases)
        return LeasesGranted(command.request, tokens, renewed=len(held))

    monkeypatch.setattr(leases, "renew", renew)
    finds("two holders of one lease")


def test_a_holder_that_counts_from_when_it_hears_the_answer(monkeypatch: Patch) -> None:
    def until_s(self: Holders, holder: Holder, _: float) -> float:
        return holder.clock.read() + DURATION_MS / 1000

    monkeypatch.setattr(Holders, "_until_s", until_s)
    monkeypatch.setattr(lease_expiry, "POLL_NS", 0)
    exact = {"drift": 0.0, "faults": {"kill": 1}, "fault_every_s": 0.6}
    finds("two holders of one lease", seeds=range(14, 40), seconds=4.0, **exact)


def test_a_lease_that_whoever_asks_gets(monkeypatch: Patch) -> None:
    def acquire(state: SequencerState, command: AcquireLeases) -> Outcome:
        for name in command.names:
            state.lease_token += 1
            state.leases[name] = LeaseState(
                command.owner, state.lease_token, command.duration_ms, command.request, 0
            )
        return LeasesGranted(command.request, (state.lease_token,), granted=1)

    monkeypatch.setattr(leases, "acquire", acquire)
    finds("two holders of one lease")


def test_tokens_that_a_snapshot_forgets(monkeypatch: Patch) -> None:
    decode_state = machine.decode_state

    def forgets(data: bytes) -> SequencerState:
        state = decode_state(data)
        state.lease_token = max((one.token for one in state.leases.values()), default=0)
        return state

    monkeypatch.setattr(machine, "decode_state", forgets)
    cuts = {"faults": {"kill": 1, "power_cut_all": 1}, "fault_every_s": 0.3, "seconds": 3.0}
    finds("a token that is not greater", seeds=range(9, 40), snapshot_ms=50, **cuts)


# Requests to the owners


ASKING: dict[str, Any] = {**CALM, "askers": 3}


@pytest.mark.slow
def test_no_request_is_lost_or_carried_out_twice_whatever_fails() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += simulate(seed, **ASKING).requests
        seen += simulate(seed, **{**ASKING, **TURNS, "snapshot_ms": 50}).requests
    kinds = ("post waiting", "post answered", "carried out", "late", "commit written", "commit not-owner")
    assert all(seen[kind] for kind in (*kinds, "commit out-of-order")), seen


def test_an_owner_that_reads_requests_on_a_node_that_misses_its_commit(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OwnerRequests, "_misses", lambda *_: False)
    finds("a request carried out twice", **ASKING)


def test_requests_that_are_forgotten_before_their_time(monkeypatch: Patch) -> None:
    monkeypatch.setattr(requests, "_is_over", lambda *_: True)
    finds("a request that waited is lost", **ASKING)


def test_answers_that_are_forgotten_before_their_time(monkeypatch: Patch) -> None:
    def is_over(until_ns: int, at_ns: int) -> bool:
        return until_ns < at_ns

    monkeypatch.setattr(requests, "_is_over", is_over)
    monkeypatch.setattr(owner_requests, "SKEW_S", 0.6)
    finds("a request", seeds=range(40), **ASKING)


def test_a_message_that_waited_for_its_node_and_has_all_its_time_left(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OwnerRequests, "_late_ns", lambda _: 60 * 10**9)
    finds("a request carried out twice", seeds=range(14, 50), **ASKING)


def test_a_request_that_is_kept_again_after_its_answer(monkeypatch: Patch) -> None:
    def look_up(table: LeaseTable, request: bytes) -> tuple[PostAnswer, bytes]:
        is_waiting = table.rows.get(f"requests\0{request.hex()}") is not None
        return (PostAnswer.WAITING if is_waiting else PostAnswer.UNKNOWN), b""

    monkeypatch.setattr(requests, "look_up", look_up)
    monkeypatch.setattr(OwnerRequests, "_require_known", lambda *_: None)
    finds("a request carried out twice", **ASKING)


def test_a_commit_that_counts_though_its_number_does_not_follow(monkeypatch: Patch) -> None:
    write_table = tables.write_table

    def write(state: SequencerState, command: WriteTable) -> Outcome:
        table = state.tables.get(command.by.lease)
        commits = 0 if table is None else table.commits
        return write_table(state, replace(command, by=command.by._replace(commit=commits + 1)))

    monkeypatch.setattr(tables, "write_table", write)
    finds("a request carried out twice", **ASKING)

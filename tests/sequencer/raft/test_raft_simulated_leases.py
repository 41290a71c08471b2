"""Leases and owner requests in simulated clusters under faults, and planted bugs that must be found."""

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


def test_lease_has_one_holder_at_a_time_under_faults() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += simulate(seed, **CALM).leases
    assert all(seen[kind] for kind in ("granted", "renewed", "released", "expired")), seen


def test_leases_survive_resets_and_tokens_rise_after_forced_reset() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        report = simulate(seed, faults={"reset": 1, "force": 1, "kill": 1}, fault_every_s=0.3, **CALM)
        seen += report.seen + report.leases
    assert seen["epoch_over"]
    assert seen["epoch_forced"]
    assert seen["granted"]


@pytest.mark.slow
def test_lease_has_one_holder_at_a_time_with_more_seeds() -> None:
    for seed in range(100, 103):
        simulate(seed, holders=3)


def finds(what: str, seeds: range = range(12), **settings: Any) -> None:
    """Check that one of the seeds fails because of the planted bug."""
    for seed in seeds:
        try:
            simulate(seed, **{**CALM, **TURNS, **settings})
        except SimulationFailed as error:
            found = repr(error.__cause__)
            assert what in found, (seed, found)
            return
    pytest.fail(f"nothing found with {seeds}")


def test_simulation_finds_expiry_of_lease_renewed_meanwhile(monkeypatch: Patch) -> None:
    def expire(state: SequencerState, command: ExpireLeases) -> Outcome:
        over = [one.name for one in command.leases if state.leases.pop(one.name, None) is not None]
        return LeasesExpired(tuple(over))

    monkeypatch.setattr(leases, "expire", expire)
    storms = {"faults": {"storm": 3, "pause": 2}, "fault_every_s": 0.2, "seconds": 3.0}
    finds("two holders of one lease", seeds=range(12, 40), **storms)


def test_simulation_finds_leader_expiring_leases_before_their_full_duration(monkeypatch: Patch) -> None:
    due = LeaseExpiry.due

    def due_as_if_seen_before(self: LeaseExpiry, now_ns: int) -> ExpireLeases | None:
        for name, lease in self.state.leases.items():
            self._seen.setdefault(name, (lease.token, lease.renewals, now_ns - DURATION_MS * 10**6))
        return due(self, now_ns)

    monkeypatch.setattr(LeaseExpiry, "due", due_as_if_seen_before)
    finds("two holders of one lease")


def test_simulation_finds_renewals_not_recorded_in_lease(monkeypatch: Patch) -> None:
    def renew(state: SequencerState, command: RenewLeases) -> Outcome:
        held = leases._held(state, command)
        tokens = tuple(held.get(one.name, 0) for one in command.leases)
        return LeasesGranted(command.request, tokens, renewed=len(held))

    monkeypatch.setattr(leases, "renew", renew)
    finds("two holders of one lease")


def test_simulation_finds_holder_counting_lease_from_arrival_of_answer(monkeypatch: Patch) -> None:
    def until_s(self: Holders, holder: Holder, _: float) -> float:
        return holder.clock.read() + DURATION_MS / 1000

    monkeypatch.setattr(Holders, "_until_s", until_s)
    monkeypatch.setattr(lease_expiry, "POLL_NS", 0)
    exact = {"drift": 0.0, "faults": {"kill": 1}, "fault_every_s": 0.6}
    finds("two holders of one lease", seeds=range(14, 40), seconds=4.0, **exact)


def test_simulation_finds_lease_granted_while_already_held(monkeypatch: Patch) -> None:
    def acquire(state: SequencerState, command: AcquireLeases) -> Outcome:
        for name in command.names:
            state.lease_token += 1
            state.leases[name] = LeaseState(
                command.owner, state.lease_token, command.duration_ms, command.request, 0
            )
        return LeasesGranted(command.request, (state.lease_token,), granted=1)

    monkeypatch.setattr(leases, "acquire", acquire)
    finds("two holders of one lease")


def test_simulation_finds_lease_token_counter_lost_in_snapshot(monkeypatch: Patch) -> None:
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
def test_owner_requests_are_neither_lost_nor_executed_twice_under_faults() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += simulate(seed, **ASKING).requests
        seen += simulate(seed, **{**ASKING, **TURNS, "snapshot_ms": 50}).requests
    kinds = ("post waiting", "post answered", "carried out", "late", "commit written", "commit not-owner")
    assert all(seen[kind] for kind in (*kinds, "commit out-of-order")), seen


def test_simulation_finds_owner_reading_requests_on_node_missing_its_commit(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OwnerRequests, "_misses", lambda *_: False)
    finds("a request carried out twice", **ASKING)


def test_simulation_finds_waiting_requests_forgotten_too_early(monkeypatch: Patch) -> None:
    monkeypatch.setattr(requests, "_is_over", lambda *_: True)
    finds("a request that waited is lost", **ASKING)


def test_simulation_finds_answers_forgotten_too_early(monkeypatch: Patch) -> None:
    def is_over(until_ns: int, at_ns: int) -> bool:
        return until_ns < at_ns

    monkeypatch.setattr(requests, "_is_over", is_over)
    monkeypatch.setattr(owner_requests, "SKEW_S", 0.6)
    finds("a request", seeds=range(40), **ASKING)


def test_simulation_finds_delayed_request_not_refused_as_late(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OwnerRequests, "_late_ns", lambda _: 60 * 10**9)
    finds("a request carried out twice", seeds=range(14, 50), **ASKING)


def test_simulation_finds_answered_request_accepted_again(monkeypatch: Patch) -> None:
    def look_up(table: LeaseTable, request: bytes) -> tuple[PostAnswer, bytes]:
        is_waiting = table.rows.get(f"requests\0{request.hex()}") is not None
        return (PostAnswer.WAITING if is_waiting else PostAnswer.UNKNOWN), b""

    monkeypatch.setattr(requests, "look_up", look_up)
    monkeypatch.setattr(OwnerRequests, "_require_known", lambda *_: None)
    finds("a request carried out twice", **ASKING)


def test_simulation_finds_table_commit_accepted_out_of_order(monkeypatch: Patch) -> None:
    write_table = tables.write_table

    def write(state: SequencerState, command: WriteTable) -> Outcome:
        table = state.tables.get(command.by.lease)
        commits = 0 if table is None else table.commits
        return write_table(state, replace(command, by=command.by._replace(commit=commits + 1)))

    monkeypatch.setattr(tables, "write_table", write)
    finds("a request carried out twice", **ASKING)

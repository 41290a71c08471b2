"""The simulation detects planted bugs in membership changes: each rule is broken once."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.simulate import SimulationFailed, simulate

from sequencer.raft.core.member_changes import MemberChanges
from sequencer.raft.core.voter_disks import VoterDisks
from sequencer.raft.lifecycle.membership import Membership
from sequencer.raft.model.entry_codec import JoinEntry
from sequencer.raft.storage import open_directory

pytestmark = pytest.mark.slow
Patch = pytest.MonkeyPatch

LIGHT: dict[str, Any] = {"spares": 3, "propose_every_s": 0.1, "burst": 0.0, "large": 0.0}
PARTED: dict[str, Any] = {"faults": {"cut_off_leader": 3, "split": 2, "kill": 1}, "fault_every_s": 0.2}


STORMY: dict[str, Any] = {"faults": {"storm": 3, "cut_off_leader": 3, "hand_over": 3}, "fault_every_s": 0.1}
IN_FORCE = "not the newest list is in force"


def finds(*expected: str, seeds: range, **settings: Any) -> None:
    """Check that one of the seeds fails, and that the first failure comes from the planted bug and nothing
    else.
    """
    for seed in seeds:
        try:
            simulate(seed, **LIGHT, **settings)
        except SimulationFailed as error:
            found = repr(error.__cause__)
            assert any(what in found for what in expected), (seed, found)
            return
    pytest.fail(f"nothing found with {seeds}")


UNSAFE = (
    "two committed entries at one index",
    "committed without a majority",
    "elected without a majority",
    "a leader without a committed entry",
    "two leaders in one term",
    "an election that nobody supports",
    "a committed entry differs",
)


def count_all(monkeypatch: Patch) -> None:
    refresh = VoterDisks.refresh

    def refresh_with_learners(self: Any) -> None:
        on_members, self.on_members = self.on_members, lambda: None
        refresh(self)
        self.voters = frozenset(self.members)
        self.other_voters = self.voters - {self._name}
        self.on_members = on_members
        on_members()

    monkeypatch.setattr(VoterDisks, "refresh", refresh_with_learners)


def test_simulation_finds_learners_counted_as_voters(monkeypatch: Patch) -> None:
    count_all(monkeypatch)
    finds(IN_FORCE, *UNSAFE, seeds=range(20), nodes=3, **PARTED)


def test_simulation_finds_learner_becoming_candidate(monkeypatch: Patch) -> None:
    monkeypatch.setattr(VoterDisks, "votes_here", VoterDisks.counts_here)
    finds(*UNSAFE, seeds=range(13, 40), nodes=3, **PARTED)


def test_simulation_finds_member_list_not_rolled_back_on_truncation(monkeypatch: Patch) -> None:
    def drop_joins_only(self: Any, index: int) -> None:
        for known, (entry, _) in list(self._pending.items()):
            if known >= index and isinstance(entry, JoinEntry):
                del self._pending[known]

    monkeypatch.setattr(VoterDisks, "on_truncated", drop_joins_only)
    finds(IN_FORCE, *UNSAFE, seeds=range(31, 90), nodes=3, **STORMY)


def test_simulation_finds_member_list_in_force_only_when_applied(monkeypatch: Patch) -> None:
    refresh = VoterDisks.refresh

    def refresh_applied(self: Any) -> None:
        pending, self._pending = self._pending, {}
        refresh(self)
        self._pending = pending

    monkeypatch.setattr(VoterDisks, "refresh", refresh_applied)
    finds(IN_FORCE, *UNSAFE, seeds=range(20), nodes=3, **PARTED)


def append_at_once(monkeypatch: Patch) -> None:
    """Skip the round in which a majority of the new list answers, because that round implies the other
    rules.
    """
    check_quorum = MemberChanges._check_quorum
    monkeypatch.setattr(
        MemberChanges, "_check_quorum", lambda self, members, _: check_quorum(self, members, 0)
    )


def test_simulation_finds_member_change_before_entry_of_leaders_own_term(monkeypatch: Patch) -> None:
    append_at_once(monkeypatch)
    monkeypatch.setattr(MemberChanges, "_check_own_term", lambda self: None)
    expected = "a list before an entry of its leader's term"
    finds(expected, *UNSAFE, seeds=range(60), nodes=3, **STORMY)


def test_simulation_finds_two_member_changes_in_flight(monkeypatch: Patch) -> None:
    append_at_once(monkeypatch)
    monkeypatch.setattr(MemberChanges, "_check_one_at_a_time", lambda self: None)
    finds("two changes of the members in flight", *UNSAFE, seeds=range(60), nodes=3, **STORMY)


def test_simulation_finds_removal_losing_the_majority(monkeypatch: Patch) -> None:
    monkeypatch.setattr(MemberChanges, "_check_quorum", lambda self, members, index: None)
    finds("no leader", "not all run", seeds=range(7, 40), faults={"wipe": 3, "kill": 1}, fault_every_s=0.2)


def test_simulation_finds_second_join_undone_by_older_snapshot(monkeypatch: Patch) -> None:
    def joined(identity: Any, state: Any) -> Any:
        claim = state.disks.get(identity.name)
        is_admitted = claim is not None and claim.disk == identity.disk
        return open_directory.replace(identity, joined=claim.joined) if is_admitted else identity

    monkeypatch.setattr(open_directory, "joined_identity", joined)
    finds("not well", seeds=range(60), faults={"kill": 1}, fault_every_s=0.3)


def test_simulation_finds_removed_nodes_unaware_of_removal(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Membership, "_is_removed", lambda self, leaderless_s: False)
    finds("removed, and do not know", seeds=range(10), nodes=3, **PARTED)

"""The simulation detects planted bugs: each invariant of the Raft nodes is broken once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from simulation.simulate import SimulationFailed, simulate

from sequencer.raft.core import election, follower
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.election import Ballot, Election
from sequencer.raft.core.follower import AppendMatched, AppendRejected, FollowerRole, Verdict, compare
from sequencer.raft.core.leader import LeaderRole
from sequencer.raft.core.leadership_transfer import LeadershipTransfer
from sequencer.raft.core.pysyncobj_adapter import Journal
from sequencer.raft.core.voter_disks import VoterDisks
from sequencer.raft.lifecycle.epoch_transition import EpochTransition
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller
from sequencer.raft.lifecycle.snapshotter import Snapshotter
from sequencer.raft.model.cluster_state import ClusterState, decode_state
from sequencer.raft.model.epochs import next_epoch
from sequencer.raft.model.messages import AppendEntries, InstallSnapshot, LogIndex, RaftEntry
from sequencer.raft.node import RaftNode
from sequencer.raft.storage import open_directory
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshot_file import PendingSnapshot
from sequencer.raft.storage.snapshots import SnapshotStore

Patch = pytest.MonkeyPatch


LIGHT: dict[str, Any] = {"propose_every_s": 0.1, "burst": 0.0, "large": 0.0}


def finds(*expected: str, seeds: range, **settings: Any) -> None:
    """Check that one of the seeds fails, and that the first failure comes from the planted bug and nothing
    else.
    """
    for seed in seeds:
        try:
            simulate(seed, **settings)
        except SimulationFailed as error:
            found = repr(error.__cause__)
            assert any(what in found for what in expected), (seed, found)
            return
    pytest.fail(f"nothing found with {seeds}")


def test_simulation_finds_messages_sent_before_log_sync(monkeypatch: Patch) -> None:
    def send_then_persist(self: Any) -> None:
        self._network.flush()
        self._sync()

    monkeypatch.setattr(SyncObj, "_persist_then_send", send_then_persist)
    finds("something leaves before the sync", seeds=range(5))


def test_simulation_finds_vote_sent_before_log_sync(monkeypatch: Patch) -> None:
    answer = Election._answer

    def answer_at_once(self: Any, *args: Any, **kwargs: Any) -> None:
        answer(self, *args, **kwargs)
        self._raft._network.flush()

    monkeypatch.setattr(Election, "_answer", answer_at_once)
    finds("something leaves before the sync", seeds=range(5), nodes=3)


def test_simulation_finds_vote_not_written_to_log(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Journal, "setCurrentTerm", lambda self, term, _: self._log.set_term(term, None))
    finds("a vote that is not in the log", seeds=range(5), nodes=3)


def test_simulation_finds_fsync_without_effect(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DurableLog, "_sync_file", lambda self: None)
    damaged = "synced bytes of the Raft log are corrupt", "does not continue the previous one"
    gone = "synced entries are gone", "a vote was forgotten", "a term was forgotten"
    finds(*damaged, *gone, seeds=range(20), nodes=3, faults={"power_cut": 1}, **LIGHT)


def test_simulation_finds_snapshot_without_sync(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PendingSnapshot, "sync", lambda self: None)
    expected = (
        "wrong magic of a snapshot header",
        "a snapshot header is truncated",
        "wrong checksum of a snapshot header",
        "the snapshot's size differs from its header",
        "the snapshot's content does not match its digest",
    )
    finds(*expected, seeds=range(20), nodes=3, faults={"power_cut": 1}, **LIGHT)


def test_simulation_finds_commit_index_accepted_unchecked(monkeypatch: Patch) -> None:
    on_append = FollowerRole.on_append

    def on_append_unclamped(self: Any, peer: str, message: AppendEntries) -> None:
        on_append(self, peer, message)
        raft = self._raft
        if message.term == raft.term:
            last = self._log.last.index
            raft._SyncObj__raftCommitIndex = max(raft.committed, min(message.commit, last))

    monkeypatch.setattr(FollowerRole, "on_append", on_append_unclamped)
    faults = {"cut_off_leader": 3, "kill": 1, "split": 1}
    finds(
        "two committed entries at one index",
        *("applied what is not committed", "a follower commits first"),
        seeds=range(40),
        nodes=3,
        faults=faults,
        fault_every_s=0.3,
        **LIGHT,
    )


def test_simulation_finds_earlier_term_entry_committed_by_counting_replicas(monkeypatch: Patch) -> None:
    entries = SyncObj._SyncObj__getEntries

    def in_the_present_term(self: Any, start: int, *args: Any) -> list[tuple[bytes, int, int]]:
        return [(content, index, self.term) for content, index, _ in entries(self, start, *args)]

    monkeypatch.setattr(SyncObj, "_SyncObj__getEntries", in_the_present_term)
    slow = {"append_bytes": 1, "in_flight_messages": 1}
    finds("an earlier term's entry committed", seeds=range(3, 40), nodes=3, **slow, **LIGHT)


def test_simulation_finds_votes_for_candidate_missing_entries(monkeypatch: Patch) -> None:
    grants = election.grants
    monkeypatch.setattr(
        election, "grants", lambda request, **kwargs: grants(request, **{**kwargs, "last": LogIndex(0, 0)})
    )
    finds("a leader without a committed entry", seeds=range(5, 60), nodes=3, **LIGHT)


def cut_what_matches(message: AppendEntries, log: Any, committed: int) -> Verdict:
    verdict = compare(message, log, committed)
    first = max(message.prev.index, committed) + 1
    if isinstance(verdict, AppendRejected) or log.last.index < first:
        return verdict
    return AppendMatched(
        verdict.matched, first, tuple(entry for entry in message.entries if entry.index >= first)
    )


def test_simulation_finds_truncation_of_matching_entries(monkeypatch: Patch) -> None:
    monkeypatch.setattr(follower, "compare", cut_what_matches)
    finds("a leader replaced its own entries", seeds=range(40), nodes=3, doubled=0.2, overtaken=0.2, **LIGHT)


def test_simulation_finds_wiped_disk_counted_in_majority_at_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(VoterDisks, "counts", lambda self, member, claim: True)
    monkeypatch.setattr(VoterDisks, "may_get_vote", lambda self, member, claim: True)
    expected = "committed without a majority", "elected without a majority"
    finds(*expected, seeds=range(20), nodes=3, faults={"wipe": 3, "kill": 1, "cut_off": 1}, **LIGHT)


def test_simulation_finds_commands_applied_as_often_as_committed(monkeypatch: Patch) -> None:
    def apply_all(self: ClusterState, pack: Any) -> int:
        self.index += len(pack.commands)
        return self.index - len(pack.commands) + 1

    monkeypatch.setattr(ClusterState, "_apply_commands", apply_all)
    finds("a command lost, doubled or out of its order", seeds=range(1, 20), **LIGHT)


def test_simulation_finds_snapshot_installed_over_newer_applied_state(monkeypatch: Patch) -> None:
    def on_install_snapshot(self: Any, peer: str, chunk: InstallSnapshot) -> None:
        if chunk.term >= self._raft.term:
            self._follow(peer, chunk.term)
            self._install_snapshot(peer, chunk)

    def roll_back(self: Any, *args: Any) -> None:
        self.incoming, self.is_installing = None, False
        self._adopt_state(*args[-2:])

    monkeypatch.setattr(FollowerRole, "on_install_snapshot", on_install_snapshot)
    monkeypatch.setattr(SnapshotInstaller, "_on_installed", roll_back)
    monkeypatch.setattr(SnapshotStore, "_require_above", lambda self, meta: None)
    late = {"doubled": 0.5, "overtaken": 0.3, "faults": {"wipe": 1}, "fault_every_s": 0.2, "worker_s": 0.03}
    sizes = {"keep_entries": (1, 200), "padding": 0, "chunk_bytes": 1 << 20, "segment_bytes": 512}
    expected = "applied entries were undone", "a commit index went back"
    finds(*expected, seeds=range(4, 40), nodes=3, **late, **sizes, **LIGHT)


def test_simulation_finds_log_cleared_because_snapshot_is_newer_than_its_start(monkeypatch: Patch) -> None:
    def connect(log: DurableLog, at: ClusterState, _directory: str) -> None:
        if log.base != at.applied:
            log.reset(at.applied)
            log.sync()

    monkeypatch.setattr(open_directory, "_connect", connect)
    finds("synced entries are gone", "two committed entries at one index", seeds=range(2, 20))


def test_simulation_finds_log_compacted_before_snapshot_is_durable(monkeypatch: Patch) -> None:
    take = Snapshotter.take_snapshot

    def compact_and_take(self: Any) -> None:
        self.compact(self._own.state.applied)
        take(self)

    monkeypatch.setattr(Snapshotter, "take_snapshot", compact_and_take)
    often = {"faults": {"kill": 1}, "fault_every_s": 0.2, "worker_s": 0.1}
    small = {"keep_entries": (1,), "segment_bytes": 512}
    finds("the Raft log starts after the snapshot", seeds=range(20), nodes=3, **often, **small, **LIGHT)


def test_simulation_finds_pre_votes_counted_twice(monkeypatch: Patch) -> None:
    def on_support(self: Ballot, voter: str) -> bool:
        if self.supporters is None:
            return False
        self.supporters |= {voter, f"{voter} again"}
        self.is_supported = self._is_majority(1 + len(self.supporters))
        return self.is_supported

    monkeypatch.setattr(Ballot, "on_support", on_support)
    finds("an election that nobody supports", seeds=range(1, 20), nodes=5, **LIGHT)


def test_simulation_finds_votes_counted_twice(monkeypatch: Patch) -> None:
    def on_vote(self: Ballot, voter: str) -> bool:
        self.voters |= {voter, f"{voter} again"}
        return self._is_majority(1 + len(self.voters))

    monkeypatch.setattr(Ballot, "on_vote", on_vote)
    storms = {"faults": {"storm": 1, "cut_off_leader": 1}, "fault_every_s": 0.1}
    finds("elected without a majority", seeds=range(40), nodes=5, **storms, **LIGHT)


def test_simulation_finds_acknowledgements_of_earlier_term_counted(monkeypatch: Patch) -> None:
    def is_answer(self: Any, term: int) -> bool:
        if term > self._raft.term:
            self._raft.adopt_term(term)
        return bool(self._raft.leads)

    monkeypatch.setattr(LeaderRole, "_is_answer", is_answer)
    late = {"overtaken": 0.3, "faults": {"jump": 3, "storm": 1}, "fault_every_s": 0.1}
    finds("an acknowledgement from nowhere", seeds=range(9, 90), nodes=3, **late, **LIGHT)


RESETTING: dict[str, Any] = {"nodes": 3, "faults": {"reset": 1, "kill": 1}, "fault_every_s": 0.2}


def test_simulation_finds_entries_applied_after_reset(monkeypatch: Patch) -> None:
    monkeypatch.setattr(RaftNode, "is_over", lambda self: False)
    expected = "machines differ", "a gap in the history", "a follower commits first"
    finds(*expected, seeds=range(10), **RESETTING)


def test_simulation_finds_epoch_started_from_stale_snapshot(monkeypatch: Patch) -> None:
    def leave_with_the_newest_snapshot(self: Any) -> None:
        began, state = self._raft.round_began, self._own.state
        if self._epoch_exit.should_leave(began, is_awaited=False):
            _, machine_bytes = decode_state(self._snapshots.read())
            stale = replace(state, index=decode_state(self._snapshots.read())[0].index)
            self._epoch_exit.write(next_epoch(stale, b""), lambda: machine_bytes, began)

    monkeypatch.setattr(EpochTransition, "leave", leave_with_the_newest_snapshot)
    expected = "machines differ", "a gap in the history", "nobody has all that was applied"
    finds(*expected, seeds=range(10), **RESETTING)


class EndsAtOnce(RaftNode):
    def _make_parts(self, *args: Any) -> None:
        super()._make_parts(*args)
        voter_disks = self._raft._voter_disks
        on_appended = voter_disks.on_appended

        def end(entry: RaftEntry) -> None:
            on_appended(entry)
            if entry.content[:1] == bytes([17]):
                self._epoch_exit.start(0.0)

        voter_disks.on_appended = end  # type: ignore[method-assign]


def test_simulation_finds_epoch_ended_by_uncommitted_reset() -> None:
    expected = "machines differ", "states differ at one index", "a follower commits first"
    finds(*expected, seeds=range(20), node_class=EndsAtOnce, **RESETTING)


HANDING: dict[str, Any] = {"nodes": 3, "faults": {"hand_over": 1}, "fault_every_s": 0.1, "retry_ms": 100}


def test_simulation_finds_leadership_transfer_to_member_missing_entries(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        LeadershipTransfer, "choose", lambda self, matched, _: min(matched, key=matched.__getitem__)
    )
    finds("called before it has everything", seeds=range(5), **HANDING)


def test_simulation_finds_election_without_pre_vote(monkeypatch: Patch) -> None:
    start = Ballot.start

    def start_without_pre_vote(self: Ballot) -> bool:
        self.skip_pre_vote()
        return start(self)

    monkeypatch.setattr(Ballot, "start", start_without_pre_vote)
    finds("an election that nobody supports", seeds=range(5), **HANDING)

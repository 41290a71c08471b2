"""The simulation can fail: each promise of the nodes is broken here once, and is seen to be broken."""

from __future__ import annotations

from typing import Any

import pytest

from sequencer.raft import hardened, opening
from sequencer.raft.disks import Admissions
from sequencer.raft.election import Ballot
from sequencer.raft.following import Matched, Refused, Verdict, compare
from sequencer.raft.hardened import SyncObj
from sequencer.raft.log import DurableLog
from sequencer.raft.messages import Append, Chunk, Place
from sequencer.raft.node import RaftNode
from sequencer.raft.snapshot_file import AsideFile
from sequencer.raft.state import ClusterState, decode_state
from sequencer.raft.stock import Journal
from sequencer.testing.simulate import SimulationFailed, simulate

Patch = pytest.MonkeyPatch


LIGHT: dict[str, Any] = {"propose_every_s": 0.1, "burst": 0.0, "large": 0.0}


def found(seeds: range, **settings: Any) -> str:
    """What the first seed finds that finds anything."""
    for seed in seeds:
        try:
            simulate(seed, **settings)
        except SimulationFailed as error:
            return str(error.__cause__)
    return "nothing"


def test_messages_that_leave_before_the_sync(monkeypatch: Patch) -> None:
    def send_then_persist(self: Any) -> None:
        self._network.flush()
        self._sync()

    monkeypatch.setattr(SyncObj, "_persist_then_send", send_then_persist)
    assert "before the sync" in found(range(5))


def test_a_vote_that_leaves_before_the_sync(monkeypatch: Patch) -> None:
    answer = SyncObj._answer

    def answer_at_once(self: Any, *args: Any, **kwargs: Any) -> None:
        answer(self, *args, **kwargs)
        self._network.flush()

    monkeypatch.setattr(SyncObj, "_answer", answer_at_once)
    assert "before the sync" in found(range(5), nodes=3)


def test_a_vote_that_is_not_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Journal, "setCurrentTerm", lambda self, term, _: self._log.set_term(term, None))
    assert "a vote that is not in the log" in found(range(5), nodes=3)


def test_an_fsync_that_does_nothing(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DurableLog, "_sync_file", lambda self: None)
    assert found(range(20), nodes=3, faults={"power_cut": 1}, **LIGHT) != "nothing"


def test_a_snapshot_that_is_not_synced(monkeypatch: Patch) -> None:
    monkeypatch.setattr(AsideFile, "sync", lambda self: None)
    assert found(range(20), nodes=3, faults={"power_cut": 1}, **LIGHT) != "nothing"


def test_a_commit_index_that_is_taken_as_it_comes(monkeypatch: Patch) -> None:
    on_append = SyncObj._on_append

    def on_append_unclamped(self: Any, peer: str, message: Append) -> None:
        on_append(self, peer, message)
        if message.term == self.term:
            last = self._log.last.index
            self._SyncObj__raftCommitIndex = max(self.committed, min(message.commit, last))

    monkeypatch.setattr(SyncObj, "_on_append", on_append_unclamped)
    faults = {"cut_off_leader": 3, "kill": 1, "split": 1}
    assert found(range(40), nodes=3, faults=faults, fault_every_s=0.3, **LIGHT) != "nothing"


def test_an_earlier_terms_entry_that_is_committed_by_counting(monkeypatch: Patch) -> None:
    entries = SyncObj._SyncObj__getEntries

    def in_the_present_term(self: Any, start: int, *args: Any) -> list[tuple[bytes, int, int]]:
        return [(content, index, self.term) for content, index, _ in entries(self, start, *args)]

    monkeypatch.setattr(SyncObj, "_SyncObj__getEntries", in_the_present_term)
    assert "an earlier term's entry committed" in found(
        range(40), nodes=3, append_bytes=1, in_flight_messages=1, **LIGHT
    )


def test_votes_for_a_candidate_that_lacks_entries(monkeypatch: Patch) -> None:
    grants = hardened.grants
    monkeypatch.setattr(
        hardened, "grants", lambda request, **kwargs: grants(request, **{**kwargs, "last": Place(0, 0)})
    )
    assert "a leader without a committed entry" in found(range(40), nodes=3, **LIGHT)


def cut_what_matches(message: Append, log: Any, committed: int) -> Verdict:
    verdict = compare(message, log, committed)
    first = max(message.prev.index, committed) + 1
    if isinstance(verdict, Refused) or log.last.index < first:
        return verdict
    return Matched(verdict.matched, first, tuple(entry for entry in message.entries if entry.index >= first))


def test_matching_entries_that_are_cut(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardened, "compare", cut_what_matches)
    assert found(range(40), nodes=3, doubled=0.2, overtaken=0.2, **LIGHT) != "nothing"


def test_a_wiped_disk_that_counts_at_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Admissions, "counts", lambda self, member, claim: True)
    monkeypatch.setattr(Admissions, "may_get_vote", lambda self, member, claim: True)
    faults = {"wipe": 3, "kill": 1, "cut_off": 1}
    assert found(range(20), nodes=3, faults=faults) != "nothing"


def test_commands_that_are_applied_as_often_as_they_are_committed(monkeypatch: Patch) -> None:
    def apply_all(self: ClusterState, pack: Any) -> int:
        self.index += len(pack.commands)
        return self.index - len(pack.commands) + 1

    monkeypatch.setattr(ClusterState, "_apply_commands", apply_all)
    assert "lost, doubled or out of its order" in found(range(10), **LIGHT)


class RollsBack(RaftNode):
    def _on_installed(self, *args: Any) -> None:
        self._incoming, self._is_installing = None, False
        self._become(*decode_state(args[-1]))


def test_a_snapshot_that_is_taken_though_more_is_applied(monkeypatch: Patch) -> None:
    def on_chunk(self: Any, peer: str, chunk: Chunk) -> None:
        if chunk.term >= self.term:
            self._follow(peer, chunk.term)
            self._host.on_chunk(peer, chunk)

    monkeypatch.setattr(SyncObj, "_on_chunk", on_chunk)
    late = {"doubled": 0.2, "overtaken": 0.3, "faults": {"storm": 2, "cut_off": 3, "kill": 3}}
    sizes = {"keep_entries": (1, 200), "padding": 0, "snapshot_ms": 500, "segment_bytes": 512}
    assert found(range(20), nodes=3, node_class=RollsBack, **late, **sizes, **LIGHT) != "nothing"


def test_a_log_that_is_cleared_because_the_snapshot_is_newer_than_its_start(monkeypatch: Patch) -> None:
    def connect(log: DurableLog, at: ClusterState, _directory: str) -> None:
        if log.base != at.applied:
            log.reset(at.applied)
            log.sync()

    monkeypatch.setattr(opening, "_connect", connect)
    assert found(range(10)) != "nothing"


class CompactsTooEarly(RaftNode):
    def _take_snapshot(self) -> None:
        self._compact(self.state.applied)
        super()._take_snapshot()


def test_a_log_that_is_compacted_before_the_snapshot_is_durable() -> None:
    assert "the log begins behind the snapshot" in found(
        range(20), node_class=CompactsTooEarly, keep_entries=(1,), faults={"kill": 1, "kill_in_change": 1}
    )


def test_support_that_is_counted_twice(monkeypatch: Patch) -> None:
    def on_support(self: Ballot, voter: str) -> bool:
        if self.supporters is None:
            return False
        self.supporters |= {voter, f"{voter} again"}
        self.is_supported = self._is_majority(1 + len(self.supporters))
        return self.is_supported

    monkeypatch.setattr(Ballot, "on_support", on_support)
    assert "an election that nobody supports" in found(range(10), nodes=5)


def test_votes_that_are_counted_twice(monkeypatch: Patch) -> None:
    def on_vote(self: Ballot, voter: str) -> bool:
        self.voters |= {voter, f"{voter} again"}
        return self._is_majority(1 + len(self.voters))

    monkeypatch.setattr(Ballot, "on_vote", on_vote)
    assert "elected without a majority" in found(
        range(40), nodes=5, faults={"split": 1, "break": 1}, fault_every_s=0.1, **LIGHT
    )


def test_acknowledgements_of_an_earlier_term_that_are_counted(monkeypatch: Patch) -> None:
    def is_answer(self: Any, term: int) -> bool:
        if term > self.term:
            self._adopt_term(term)
        return bool(self.role == "leader")

    monkeypatch.setattr(SyncObj, "_is_answer", is_answer)
    assert "an acknowledgement from nowhere" in found(
        range(60), nodes=3, overtaken=0.3, faults={"jump": 3, "storm": 1}, fault_every_s=0.1, **LIGHT
    )

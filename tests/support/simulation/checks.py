"""Checks the laws of Raft and of docs/raft.md in a cluster at every moment, whatever fails.

`Checks` receives the actions of nodes in one epoch, and remembers them over all their runs. It relies as
little as possible on the nodes' own statements: it counts elections from the votes that were sent, and
commits from the synced logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.entry_codec import decode_members
from sequencer.raft.model.members import Members, voters_of
from sequencer.raft.model.messages import DiskClaim, LogIndex, RaftEntry
from sequencer.raft.node import RaftNode
from sequencer.raft.storage.log import DurableLog
from simulation.history import require
from simulation.promises import DiskRecord, Promises, View


class Checks:
    """All observations of one epoch. Every method raises `Violation`."""

    def __init__(self, state: ClusterState | None = None, voters: Iterable[str] = ()) -> None:
        """`state`: the initial state of this epoch. None for the first epoch, which starts with `voters`."""
        self.disks: dict[bytes, DiskRecord] = {}
        self.entries: dict[LogIndex, tuple[bytes, int]] = {}
        """Every entry ever seen in a log: its content, and the term of the entry before."""
        self.committed: dict[int, RaftEntry] = {}
        self.commit_end = 1 if state is None else state.applied.index
        """Index of the last entry known to be committed."""
        self.disks_that_count: dict[str, DiskClaim] = {} if state is None else dict(state.disks)
        """By member, as of the last entry that was applied anywhere."""
        self.promises = Promises()
        self._lists: dict[LogIndex, Members] = {}
        """Every list of members ever seen in a log."""
        first = None if state is None else state.members
        names = voters if state is None else state.disks
        self._had_list, self._first_voters = (
            first is not None,
            frozenset(names) if first is None else voters_of(first),
        )
        self.elections = 0
        self._newest = 0
        self._chains: dict[int, int] = {}
        self._leaders: dict[int, int] = {}

    # A run

    def on_open(self, name: str, run: int, node: RaftNode) -> View:
        """Check that a node that opened its directory remembers everything that it sent in earlier runs."""
        disk, log = node.claim.disk, node._log
        record = self.disks.setdefault(disk, DiskRecord(name))
        before = record.log
        require(log.term >= record.term, "a term was forgotten", name, log.term, record.term)
        if log.term == record.term and record.vote is not None:
            kept = log.voted_for == record.vote
            require(kept, "a vote was forgotten", name, log.term, log.voted_for, record.vote)
        if before is not None:
            self._require_synced(name, record.synced, before, log)
        record.log = log
        view = View(name, run, node, record, lambda: self.voters(log), term=log.term)
        self.look(view)
        return view

    def _require_synced(self, name: str, synced: LogIndex, before: DurableLog, log: DurableLog) -> None:
        """Check that the synced entries still exist.

        Exceptions: they were about to be truncated, or a snapshot includes or contradicts them.
        """
        if before.term_at(synced.index) != synced.term or log.base.index > synced.index:
            return
        known = self.committed.get(log.base.index)
        if before.term_at(log.base.index) != log.base.term and known is not None and known.place == log.base:
            return
        kept = log.term_at(synced.index)
        require(kept == synced.term, "synced entries are gone", name, synced, kept, log.base, log.last)

    def look(self, view: View) -> None:
        """Check the new state of a node after it did something."""
        node, raft = view.node, view.node._raft
        log = node._log
        view.record.claims.add(node.claim)
        require(
            log.term >= view.term and raft.term == log.term,
            "a term went back",
            view.name,
            log.term,
            raft.term,
            view.term,
        )
        view.term = log.term
        if not log.is_dirty:
            view.record.on_synced(log)
        self.scan(view)
        if self._lists and node.state.epoch:
            self._require_newest(view)
        is_leader = raft.role == "leader"
        if is_leader and not view.is_leader:
            self._on_elected(view)
        if is_leader:
            self._look_at_followers(view)
        view.is_leader = is_leader
        if raft.committed > view.committed:
            self.on_committed(view)
        require(
            raft.committed >= view.committed,
            "a commit index went back",
            view.name,
            raft.committed,
            view.committed,
        )
        state = node.state
        if state.applied.index != view.applied:
            require(
                state.applied.index > view.applied,
                "applied entries were undone",
                view.name,
                state.applied,
                view.applied,
            )
            view.applied = state.applied.index
            if state.applied.index > self._newest:
                self._newest, self.disks_that_count = state.applied.index, dict(state.disks)
            known = self._chains.setdefault(state.applied.index, state.chain)
            require(known == state.chain, "states differ at one index", view.name, state.applied)

    def scan(self, view: View) -> None:
        log = view.node._log
        if log.last != view.scanned or log.term_at(view.scanned.index) != view.scanned.term:
            self._scan(view, log)

    def _scan(self, view: View, log: DurableLog) -> None:
        """Check log matching: an index and a term identify one entry, and all entries before it."""
        start = view.scanned.index + 1 if log.term_at(view.scanned.index) == view.scanned.term else 0
        start = max(start, log.base.index + 1)
        before = log.term_at(start - 1)
        for entry in log.entries(start):
            known = self.entries.setdefault(entry.place, (entry.content, before or 0))
            require(known == (entry.content, before), "logs differ at one place", view.name, entry.place)
            before = entry.term
            if members := decode_members(entry.content):
                if entry.place not in self._lists:
                    self._require_alone(view, log, entry.place)
                self._lists[entry.place] = members
        view.scanned = log.last

    # Members

    def voters(self, log: DurableLog) -> frozenset[str]:
        """Return the voters of the newest list in a log, or before the log's start."""
        if not self._lists:
            return self._first_voters
        for entry in reversed(log.entries(log.base.index + 1)):
            if members := decode_members(entry.content):
                return voters_of(members)
        before = [place for place in self._lists if place.index <= log.base.index and self._is_kept(place)]
        return voters_of(self._lists[max(before)]) if before else self._first_voters

    def _require_alone(self, view: View, log: DurableLog, place: LogIndex) -> None:
        """Check that the previous list and an entry of the leader's term are committed before a new list."""
        earlier = log.entries(log.base.index + 1, place.index)
        lists = [entry.place for entry in earlier if decode_members(entry.content)]
        is_alone = not lists or self._is_kept(lists[-1])
        require(is_alone, "two changes of the members in flight", view.name, place, lists)
        own = [entry.place for entry in earlier if entry.term == place.term]
        is_own = log.base.term == place.term or any(map(self._is_kept, own))
        require(is_own, "a list before an entry of its leader's term", view.name, place)

    def _require_newest(self, view: View) -> None:
        """Check that the list in force is the newest one in the log."""
        voters, wanted = view.node._raft.voter_disks.voters, view.voters()
        require(voters == wanted, "not the newest list is in force", view.name, voters, wanted)

    def _is_kept(self, place: LogIndex) -> bool:
        known = self.committed.get(place.index)
        return known is not None and known.place == place

    @property
    def has_list(self) -> bool:
        """Whether a change of the members was ever committed."""
        return self._had_list or bool(self.committed_lists())

    def committed_lists(self) -> list[Members]:
        return [members for place, members in self._lists.items() if self._is_kept(place)]

    def voters_in_play(self) -> Iterator[frozenset[str]]:
        """Yield the voters of the newest committed list, then of each later list that may be committed."""
        committed = max((place for place in self._lists if self._is_kept(place)), default=LogIndex(0, 0))
        yield voters_of(self._lists[committed]) if committed.index else self._first_voters
        for place, members in self._lists.items():
            if place.index > max(committed.index, self.commit_end):
                yield voters_of(members)

    # Elections

    def _on_elected(self, view: View) -> None:
        term, raft, log = view.node._raft.term, view.node._raft, view.node._log
        self.elections += 1
        other = self._leaders.setdefault(term, view.run)
        require(other == view.run, "two leaders in one term", view.name, term)
        voters = view.voters()
        disks = {name: raft._voter_disks.disk_of(name).disk for name in sorted(voters)}
        given = self.promises.votes
        votes = [name for name, disk in disks.items() if view.name in {name, given.get((disk, term))}]
        require(
            2 * len(votes) > len(voters),
            "elected without a majority",
            view.name,
            term,
            votes,
        )
        last = self.committed.get(self.commit_end)
        if last is not None and log.base.index < last.index:
            require(
                log.term_at(last.index) == last.term,
                *("a leader without a committed entry", view.name, term, last.place, log.last),
            )

    def _look_at_followers(self, view: View) -> None:
        """Check that a leader counts as replicated only what was acknowledged to it, in this term."""
        raft = view.node._raft
        for peer, claim in raft.peer_disks.claims.items():
            match = raft.leader_role.match_index(peer) or 0
            known = self.promises.acknowledged.get((claim.disk, raft.term), 0)
            require(
                match <= known, "an acknowledgement from nowhere", view.name, raft.term, peer, match, known
            )

    # Commits

    def on_committed(self, view: View) -> None:
        """Check a node's new commits against the one history, or extend that history by them."""
        raft, log = view.node._raft, view.node._log
        start, end = view.committed + 1, raft.committed
        view.committed = end
        if log.base.index >= start:
            known = self.committed.get(log.base.index)
            if known is not None:
                require(
                    known.term == log.base.term,
                    "a snapshot of another history",
                    view.name,
                    log.base,
                    known.place,
                )
            start = log.base.index + 1
        for entry in log.entries(start, end + 1):
            known = self.committed.setdefault(entry.index, entry)
            require(known == entry, "two committed entries at one index", view.name, entry.place, known.place)
        if end > self.commit_end:
            is_leader = (
                raft.role == "leader" or view.is_leader
            )  # It may step down in the round in which it commits.
            require(is_leader, "a follower commits first", view.name, end, self.commit_end)
            require(
                log.term_at(end) == raft.term, "an earlier term's entry committed", view.name, end, raft.term
            )
            self._require_majority(view, end)
            self.commit_end = end

    def _require_majority(self, view: View, index: int) -> None:
        """Check that a majority of the counted disks synced the entry, and acknowledged it to this leader."""
        raft, term = view.node._raft, view.node._log.term_at(index)
        holders = []
        voters = view.voters()
        for name in sorted(voters):
            counted = raft._voter_disks.disk_of(name)
            record = self.disks.get(counted.disk)
            if record is None or record.log is None or counted not in record.claims:
                continue
            log = record.log
            if name != view.name and self.promises.acknowledged.get((counted.disk, raft.term), 0) < index:
                continue
            if log.base.index >= index or (log.synced.index >= index and log.term_at(index) == term):
                holders.append(name)
        majority = 2 * len(holders) > len(voters)
        require(majority, "committed without a majority", view.name, index, term, holders)

    def on_entry(self, view: View, entry: RaftEntry) -> None:
        """Check that an entry is committed and synced before a node applies it."""
        if view.node._raft.committed > view.committed:
            self.on_committed(view)
        require(
            self.committed.get(entry.index) == entry, "applied what is not committed", view.name, entry.place
        )
        require(
            view.node._log.synced.index >= entry.index, "applied before it is synced", view.name, entry.place
        )

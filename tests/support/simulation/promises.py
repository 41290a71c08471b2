"""Checks of sent messages: votes, support and acknowledgements bind later runs and later leaders.

Invariant: a message leaves only after the sender has synced everything that the message says about it. One
disk has one vote in a term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sequencer.raft.model.messages import (
    NOWHERE,
    AppendEntriesReply,
    DiskClaim,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from sequencer.raft.node import RaftNode
from sequencer.raft.storage.log import DurableLog
from simulation.history import require


@dataclass(eq=False, slots=True)
class DiskRecord:
    """The observed state of a disk, over all runs on it."""

    member: str
    log: DurableLog | None = None
    """The log of the newest run that opened the disk."""
    claims: set[DiskClaim] = field(default_factory=set)
    term: int = 0
    """The current term at the last sync, ..."""
    vote: str | None = None
    """... the vote in that term, ..."""
    synced: LogIndex = NOWHERE
    """... and the end of the synced log."""

    def on_synced(self, log: DurableLog) -> None:
        self.term, self.vote, self.synced = log.term, log.voted_for, log.synced


@dataclass(eq=False, slots=True)
class View:
    """The progress of the checks on one run."""

    name: str
    run: int
    node: RaftNode
    record: DiskRecord
    voters: Callable[[], frozenset[str]]
    """The voters of the member list in force in the node's log."""
    scanned: LogIndex = NOWHERE
    committed: int = 0
    applied: int = -1
    term: int = 0
    is_leader: bool = False


class Promises:
    """All promises that left any node."""

    def __init__(self) -> None:
        self.votes: dict[tuple[bytes, int], str] = {}
        """The candidate that a disk voted for in a term."""
        self.acknowledged: dict[tuple[bytes, int], int] = {}
        """The last log index that a disk acknowledged as matching to the leader of a term."""
        self._supporters: dict[tuple[str, int], set[str]] = {}
        self._called: set[tuple[str, int]] = set()

    def on_flush(self, view: View, queued: list[tuple[str, Message]]) -> None:
        """Check messages that leave: their content is synced, and a disk votes once in a term."""
        log, name = view.node._log, view.name
        for peer, message in queued:
            match message:
                case TimeoutNow(term):
                    self._on_call(view, peer, term)
                case RequestVote(pre=False, called=called):
                    if called:
                        require((name, message.term) in self._called, "nobody called", name, message.term)
                    else:
                        self._require_support(view, message.term)
                    self._on_vote(view, message.term, name)
                case RequestVoteReply(granted=True, pre=True):
                    self._supporters.setdefault((peer, message.term), set()).add(name)
                case RequestVoteReply(granted=True, pre=False):
                    self._on_vote(view, message.term, peer)
                case AppendEntriesReply(matched=True):
                    # A later leader may have removed entries that were acknowledged to the earlier one.
                    is_synced = log.synced.index >= message.index or log.term > message.term
                    require(is_synced, "acknowledged before it was synced", name, message)
                    self._on_matched(message.claim, message.term, message.index)
                case InstallSnapshotReply(installed=True):
                    self._on_matched(message.claim, message.term, message.snapshot.index)
        record = view.record
        # A leader may send new entries before it has synced them itself, but not a new term.
        leads = view.node._raft.role == "leader" and record.term == log.term
        require(
            not log.is_dirty or leads,
            "something leaves before the sync",
            name,
            [type(message) for _, message in queued],
        )
        record.on_synced(log)

    def _on_matched(self, claim: DiskClaim, term: int, index: int) -> None:
        known = self.acknowledged.get((claim.disk, term), 0)
        self.acknowledged[claim.disk, term] = max(known, index)

    def _on_call(self, view: View, peer: str, term: int) -> None:
        """Require that the peer has the leader's whole log: the leader asks it to stand in the next term."""
        raft, last = view.node._raft, view.node._log.last.index
        require(raft.leads and raft.term == term, "a call of no leader", view.name, peer, term)
        known = self.acknowledged.get((raft.peer_disks.claims[peer].disk, term), 0)
        require(known >= last, "called before it has everything", view.name, peer, term, known, last)
        self._called.add((peer, term + 1))

    def _require_support(self, view: View, term: int) -> None:
        """Require that a majority supported this node in this term."""
        voters, supporters = view.voters(), self._supporters.get((view.name, term), set())
        majority = 2 * len((supporters | {view.name}) & voters) > len(voters)
        require(majority, "an election that nobody supports", view.name, term, supporters)

    def _on_vote(self, view: View, term: int, candidate: str) -> None:
        log = view.node._log
        known = self.votes.setdefault((view.node.claim.disk, term), candidate)
        require(known == candidate, "two votes in one term", view.name, term, known, candidate)
        require(
            log.term > term or (log.term == term and log.voted_for == candidate),
            *("a vote that is not in the log", view.name, term, candidate, log.term, log.voted_for),
        )

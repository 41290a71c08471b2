"""How a follower handles the messages of its leader. (Raft paper, sections 5.1, 5.3 and 7.)

Invariants:
- The commit index never passes the entries that were compared with the leader of the current term.
- Matching entries are never truncated. A committed entry is never truncated.
- Every acknowledged entry was compared with the leader's log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from msgspec import Struct

from rt.errors import Diverged
from sequencer.raft.core.divergence_guard import DivergenceGuard
from sequencer.raft.core.ports import Handlers, TermState
from sequencer.raft.core.pysyncobj_adapter import Journal, now
from sequencer.raft.core.voter_disks import LocalVoter
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import (
    NOWHERE,
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    RaftEntry,
)
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.log_entries import Entries

logger = logging.getLogger("sequencer.raft")


class FollowerState(TermState, Protocol):
    """The part of `core.SyncObj` that a follower needs."""

    def follow(self, peer: str) -> None:
        """Be a follower of `peer` in the current term, and restart the election timer."""

    def set_committed(self, index: int, *, leader_committed: int) -> None: ...


class FollowerRole:
    """This node's role while another node leads: it compares its log with the leader's and answers."""

    def __init__(
        self,
        raft: FollowerState,
        own: LocalVoter,
        log: DurableLog,
        journal: Journal,
        config: RaftConfig,
        on_install_snapshot: Callable[[str, InstallSnapshot], None],
    ) -> None:
        self._raft, self._own, self._log, self._journal = raft, own, log, journal
        self._install_snapshot, self._election_s_min = on_install_snapshot, config.election_ms_min / 1000
        self.divergence = DivergenceGuard(config.patience_s)
        self.handlers: Handlers = {AppendEntries: self.on_append, InstallSnapshot: self.on_install_snapshot}
        self._leader_committed = 0
        self.first_commit: int | None = None
        """Commit index in the first message of a leader in this run; None before it."""
        self.heard_leader_at = float("-inf")
        """When the leader was last heard; minus infinity once its connection has ended."""
        self.led_at = now()
        """When this node last heard a leader, ceased to lead, or started."""
        self.leader_gap_s = 0.0
        """The longest time between two messages of the current leader, in this term."""
        self._verified = NOWHERE
        """The term of the leader whose log was compared with this log, and the index up to which both logs
        agree.
        """
        self._verified_by = ""
        """The leader whose log was compared; this node itself while it leads."""

    @property
    def leader_committed(self) -> int:
        return max(self._raft.committed, self._leader_committed)

    @property
    def leaderless_s(self) -> float:
        return 0.0 if self._raft.leads else now() - self.led_at

    def hears_leader(self) -> bool:
        """Whether this node hears a leader or leads itself. Then it votes for no other member."""
        return self._raft.leads or now() - self.heard_leader_at < self._election_s_min

    def is_caught_up(self, applied: LogIndex) -> bool:
        """Whether all entries are applied that were committed before this run, and in earlier terms.

        A snapshot may be of the current term and still be older than entries that this node must obey.
        """
        raft, first = self._raft, self.first_commit
        is_current = raft.leads or (first is not None and applied.index >= first)
        return is_current and applied.term == raft.term

    def begin_term(self, verified: LogIndex, leader: str) -> None:
        """Record that `leader`, maybe this node, leads the term, and that this log agrees with the leader's
        log up to `verified`.
        """
        self._verified, self._verified_by = verified, leader

    def on_installed(self, place: LogIndex) -> None:
        """Record that the log was replaced up to `place`, or contains `place`."""
        self._verify(place.index, self._verified.term)

    def on_append(self, peer: str, message: AppendEntries) -> None:
        raft, claim = self._raft, self._own.claim
        term, committed = raft.term, raft.committed
        if message.term < term:  # Tells a deposed leader the new term.
            raft.send(peer, AppendEntriesReply(term, False, message.prev.index, committed, claim))
            return
        if not self.divergence.check(peer, message, self._own.state, now()):
            logger.error("diverged leader=%s applied=%d", peer, message.applied)
            return
        self._follow(peer, message.term)
        self._leader_committed = message.commit
        if self.first_commit is None:
            self.first_commit = message.commit
        verdict = compare(message, self._log, committed)
        if isinstance(verdict, AppendRejected):
            raft.send(peer, AppendEntriesReply(message.term, False, message.prev.index, verdict.hint, claim))
            return
        if verdict.cut is not None:
            if verdict.cut <= self._verified.index:
                where = f"term {message.term}, index {verdict.cut}"
                raise Diverged("a leader replaced its own entries", where=where, got=peer)
            self._journal.truncate(verdict.cut)
        for entry in verdict.new:
            self._journal.add(*entry)
        self._verify(verdict.matched, message.term)
        reached = max(committed, min(message.commit, self._verified.index))
        raft.set_committed(reached, leader_committed=message.commit)
        if message.wants_reply:
            reply = AppendEntriesReply(message.term, True, message.prev.index, verdict.matched, claim)
            raft.send(peer, reply)

    def on_install_snapshot(self, peer: str, chunk: InstallSnapshot) -> None:
        raft = self._raft
        if chunk.term < raft.term:
            return
        self._follow(peer, chunk.term)
        if chunk.snapshot.index <= raft.committed:
            reached, claim = chunk.offset + len(chunk.data), self._own.claim
            reply = InstallSnapshotReply(chunk.term, chunk.snapshot, reached, chunk.length, True, claim)
            raft.send(peer, reply)
        else:
            self._install_snapshot(peer, chunk)

    def _follow(self, peer: str, term: int) -> None:
        """Follow `peer`, which leads `term`. This term is not earlier than this node's term."""
        raft = self._raft
        if term > raft.term:
            raft.adopt_term(term)
        if self._verified.term == term and self._verified_by != peer:
            got = f"{self._verified_by}, {peer}"
            raise Diverged("two leaders in one term", where=f"term {term}", got=got)
        is_new = raft.leader != peer
        raft.follow(peer)
        heard_at = now()
        self.leader_gap_s = 0.0 if is_new else max(self.leader_gap_s, heard_at - self.led_at)
        self.heard_leader_at = self.led_at = heard_at
        if self._verified.term != term:
            self.begin_term(LogIndex(raft.committed, term), peer)

    def _verify(self, index: int, term: int) -> None:
        self._verified = LogIndex(max(self._verified.index, index), term)


class AppendRejected(Struct, frozen=True):
    """The log does not contain the entry before the message's entries. It may agree up to `hint`."""

    hint: int


class AppendMatched(Struct, frozen=True):
    """The log agrees up to `matched` after entries from `cut` on (if any) are replaced with `new`."""

    matched: int
    cut: int | None
    new: tuple[RaftEntry, ...]


Verdict: TypeAlias = AppendRejected | AppendMatched


def compare(message: AppendEntries, log: Entries, committed: int) -> Verdict:
    """Compare an AppendEntries of the current leader with the log. Pure.

    Raises `rt.Diverged` if a committed entry differs from the leader's.
    """
    prev = message.prev
    known = log.term_at(prev.index)
    if prev.index > committed:
        if known != prev.term:
            return AppendRejected(_hint(message, log, committed))
    else:
        _check_committed(prev, known)
    matched = max(prev.index + len(message.entries), committed)
    for at, entry in enumerate(message.entries):
        own = log.term_at(entry.index)
        if entry.index <= committed:
            _check_committed(entry.place, own)
        elif own != entry.term:
            return AppendMatched(matched, entry.index if own is not None else None, message.entries[at:])
    return AppendMatched(matched, None, ())


def _check_committed(place: LogIndex, known: int | None) -> None:
    """Check that a committed entry equals the leader's. `known` is None if the entry was compacted."""
    if known not in {None, place.term}:
        raise Diverged("a committed entry differs from the leader's", where=place, got=f"term {known}")


def _hint(message: AppendEntries, log: Entries, committed: int) -> int:
    """The index before the differing term, but not below the commit index, where all leaders agree."""
    index, last = message.prev.index, log.last.index
    if index > last:
        return max(last, committed)
    term = log.term_at(index)
    while index > committed and log.term_at(index) == term:
        index -= 1
    return index

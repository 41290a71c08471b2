"""Elections, as a node takes part in them: whom it asks, whom it gives its vote, when it has won.

For the loop's thread. `election` decides; here that becomes messages, and what PySyncObj is to do. The law:
what a vote binds is kept before the vote leaves, as all that is sent leaves behind the next sync.

Elections: when one may begin, who gets a vote, whose votes are counted.

Pure. The laws (rule 5 of docs/raft.md; Raft paper, sections 5.2 and 5.4.1; dissertation, sections
4.2.3 and 9.6): nobody is asked for a vote before a majority said that it would give one; who hears a leader
gives none; a vote counts once a voter; a candidate whose log lacks what the voter's has gets none. Whom the
leader itself calls to stand (`handover`) the first two do not hold back, the others do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from sequencer.raft.core.pysyncobj_adapter import TransportAdapter
from sequencer.raft.core.voter_disks import LocalVoter, VoterDisks
from sequencer.raft.model.messages import LogIndex, Message, RequestVote, RequestVoteReply, TimeoutNow
from sequencer.raft.storage.log import DurableLog

logger = logging.getLogger("sequencer.raft")


class Elector(Protocol):
    """The protocol around, `hardened.SyncObj`."""

    @property
    def term(self) -> int:
        """The present term."""

    @property
    def role(self) -> str:
        """leader, follower or candidate."""

    @property
    def leader(self) -> str | None:
        """Name of the leader of the present term, if this node has heard of it."""

    @property
    def voted_for(self) -> str | None:
        """Who got this node's vote in the present term."""

    def hears_leader(self) -> bool:
        """Whether there is a leader: nobody gets a vote against it."""

    def adopt_term(self, term: int) -> None:
        """A later term exists: whatever this node was in its own is over."""

    def give_vote(self, peer: str, term: int) -> None:
        """Keep that `peer` has the vote of `term`, and wait for it to win."""

    def stand_soon(self) -> None:
        """Have an election begin in the next round."""

    def count_votes(self, count: int) -> None:
        """So many have voted for this node in the present term, itself too."""

    def win(self) -> None:
        """Begin to lead."""

    def send(self, peer: str, message: Message) -> None:
        """Queue a message; it leaves behind the next sync."""


class Election:
    """This node's votes, and its own candidacy among `peers`."""

    def __init__(
        self,
        raft: Elector,
        own: LocalVoter,
        admissions: VoterDisks,
        log: DurableLog,
        outbox: TransportAdapter,
        peers: Collection[str],
    ) -> None:
        self._raft, self._own, self._admissions = raft, own, admissions
        self._log, self._outbox, self._peers = log, outbox, peers
        self.ballot = Ballot(1 + len(peers))
        self.is_called = False
        """The leader of this term called this node to stand, which it does in the next round."""

    def ask(self) -> None:
        """Ask everybody beforehand whether they would vote for this node."""
        self.ballot.ask()
        for peer in self._peers:
            request = RequestVote(self._raft.term + 1, self._log.last, self._own.claim, pre=True)
            self._raft.send(peer, request)

    def withdraw(self) -> None:
        """There is a later term: whatever was under way is over."""
        self.is_called = False
        self.ballot.withdraw()

    def on_request(self, peer: str, request: RequestVote) -> None:
        """A peer wants this node's vote, or would."""
        raft = self._raft
        if not self._admissions.may_get_vote(peer, request.claim):
            return
        if raft.hears_leader() and not request.called:
            if request.pre:
                self._answer(peer, request, granted=False)
            return
        if not request.pre and request.term > raft.term:
            raft.adopt_term(request.term)
        granted = self._admissions.counts_here() and grants(
            request,
            candidate=peer,
            term=raft.term,
            voted_for=raft.voted_for,
            last=self._log.last,
            is_follower=raft.role == "follower",
        )
        if granted and not request.pre:
            raft.give_vote(peer, request.term)
        self._answer(peer, request, granted=granted)

    def _answer(self, peer: str, request: RequestVote, *, granted: bool) -> None:
        term = request.term if granted else self._raft.term
        self._raft.send(peer, RequestVoteReply(term, granted, self._own.claim, request.pre))

    def on_reply(self, peer: str, reply: RequestVoteReply) -> None:
        """A peer gave its vote, would give it, or does not."""
        raft = self._raft
        if not reply.granted:
            if reply.term > raft.term:
                raft.adopt_term(reply.term)
        elif not self._admissions.counts(peer, reply.claim):
            pass
        elif reply.pre:
            if reply.term == raft.term + 1 and self.ballot.on_support(peer):
                raft.stand_soon()
        elif raft.role == "candidate" and reply.term == raft.term:
            is_elected = self.ballot.on_vote(peer)
            raft.count_votes(1 + len(self.ballot.voters))
            if is_elected:
                raft.win()

    def on_stand_now(self, peer: str, call: TimeoutNow) -> None:
        """In the next round an election begins, and with it a term in which this call means nothing more."""
        is_leaders = call.term == self._raft.term and self._raft.leader == peer
        if is_leaders and self._admissions.counts_here():
            logger.info("timeout_now_received leader=%s term=%d", peer, call.term)
            self.is_called, self._outbox.called_in = True, call.term + 1
            self.ballot.call()
            self._raft.stand_soon()


@dataclass(slots=True)
class Ballot:
    """This node's own candidacy."""

    members: int
    """Of the cluster, this one too."""
    voters: set[str] = field(default_factory=set)
    """Who voted for this node in the present term, itself left out."""
    supporters: set[str] | None = None
    """Who would vote for it in the next term; None: nobody was asked."""
    is_supported: bool = False
    """A majority would: an election may begin."""

    def ask(self) -> None:
        """Everybody is asked whether they would vote for this node."""
        self.supporters, self.is_supported = set(), False

    def stand(self) -> bool:
        """Whether the election that was supported may begin now: then votes are counted from none."""
        supported = self.is_supported or self.members == 1
        if supported:
            self.withdraw()
            self.voters = set()
        return supported

    def call(self) -> None:
        """The leader asks this node to stand: nobody else need be asked beforehand."""
        self.supporters, self.is_supported = None, True

    def withdraw(self) -> None:
        """There is a leader, or a later term: the support is worth nothing."""
        self.supporters, self.is_supported = None, False

    def on_support(self, voter: str) -> bool:
        """Whether this makes a majority that would vote for this node."""
        if self.supporters is None:
            return False
        self.supporters.add(voter)
        self.is_supported = self._is_majority(1 + len(self.supporters))
        return self.is_supported

    def on_vote(self, voter: str) -> bool:
        """Whether this makes a majority that voted for this node in the present term."""
        self.voters.add(voter)
        return self._is_majority(1 + len(self.voters))

    def _is_majority(self, count: int) -> bool:
        return 2 * count > self.members


def grants(
    request: RequestVote,
    *,
    candidate: str,
    term: int,
    voted_for: str | None,
    last: LogIndex,
    is_follower: bool,
) -> bool:
    """Whether a node in `term` with the log up to `last`, whose disk counts, gives the vote.

    A real request's term has been adopted before, if it is a later one; asked beforehand, nothing is bound.
    """
    is_complete = (request.last.term, request.last.index) >= (last.term, last.index)
    if request.pre:
        return is_complete and request.term > term
    return is_complete and request.term == term and voted_for in {None, candidate} and is_follower

"""Elections: when one may start, which candidate gets a vote, and which votes count.

For the loop's thread. Invariants (rule 5 of docs/raft.md; Raft paper, sections 5.2 and 5.4.1; dissertation,
sections 4.2.3 and 9.6):
- A node requests votes only after a majority has promised them (pre-vote).
- A node that hears a leader grants no vote. A node grants no vote to a candidate if entries of the node's own
  log are missing in the candidate's log.
- A voter counts once. Only the voters of the newest list in this node's log are asked, and count. If a node
  is no voter in this list, it does not become a candidate.
- A vote is durable before it is sent, like everything else. Exception: a member that the leader calls to take
  over needs no pre-vote, and gets votes of nodes that hear the leader (`leadership_transfer`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct, field

from sequencer.raft.core.ports import Handlers, TermState
from sequencer.raft.core.pysyncobj_adapter import TransportAdapter
from sequencer.raft.core.voter_disks import LocalVoter, VoterDisks
from sequencer.raft.model.messages import LogIndex, RequestVote, RequestVoteReply, TimeoutNow
from sequencer.raft.storage.log import DurableLog

logger = logging.getLogger("sequencer.raft")


class Elector(TermState, Protocol):
    """The part of `core.SyncObj` that an election needs."""

    @property
    def voted_for(self) -> str | None: ...

    def grant_vote(self, peer: str, term: int) -> None:
        """Record the vote for `peer` in `term`, and give it time to win."""

    def start_election_soon(self) -> None:
        """Start an election in the next round."""

    def win(self) -> None: ...


class Election:
    """This node's votes, and its own candidacy."""

    def __init__(
        self,
        raft: Elector,
        own: LocalVoter,
        voter_disks: VoterDisks,
        log: DurableLog,
        outbox: TransportAdapter,
        hears_leader: Callable[[], bool],
    ) -> None:
        self._raft, self._own, self._voter_disks = raft, own, voter_disks
        self._log, self._outbox = log, outbox
        self._hears_leader = hears_leader
        self.handlers: Handlers = {
            RequestVote: self.on_request,
            TimeoutNow: self.on_timeout_now,
            RequestVoteReply: self.on_reply,
        }
        self.ballot = Ballot(1)
        self.is_called = False
        """Whether the leader of this term called this node to take over. This node does so in the next
        round.
        """

    def start_pre_vote(self) -> None:
        self.ballot.start_pre_vote()
        for peer in sorted(self._voter_disks.other_voters):
            request = RequestVote(self._raft.term + 1, self._log.last, self._own.claim, pre=True)
            self._raft.send(peer, request)

    def withdraw(self) -> None:
        """Withdraw the candidacy, because a later term exists."""
        self.is_called = False
        self.ballot.withdraw()

    def on_request(self, peer: str, request: RequestVote) -> None:
        raft = self._raft
        if not self._voter_disks.may_get_vote(peer, request.claim):
            return
        if self._hears_leader() and not request.called:
            if request.pre:
                self._answer(peer, request, granted=False)
            return
        if not request.pre and request.term > raft.term:
            raft.adopt_term(request.term)
        granted = self._voter_disks.counts_here() and grants(
            request,
            candidate=peer,
            term=raft.term,
            voted_for=raft.voted_for,
            last=self._log.last,
            is_follower=raft.role == "follower",
        )
        if granted and not request.pre:
            raft.grant_vote(peer, request.term)
        self._answer(peer, request, granted=granted)

    def _answer(self, peer: str, request: RequestVote, *, granted: bool) -> None:
        term = request.term if granted else self._raft.term
        self._raft.send(peer, RequestVoteReply(term, granted, self._own.claim, request.pre))

    def on_reply(self, peer: str, reply: RequestVoteReply) -> None:
        raft = self._raft
        if not reply.granted:
            if reply.term > raft.term:
                raft.adopt_term(reply.term)
        elif not self.may_count(peer, reply):
            pass
        elif reply.pre:
            if reply.term == raft.term + 1 and self.ballot.on_support(peer):
                raft.start_election_soon()
        elif raft.role == "candidate" and reply.term == raft.term and self.ballot.on_vote(peer):
            raft.win()

    def may_count(self, peer: str, reply: RequestVoteReply) -> bool:
        disks = self._voter_disks
        return peer in disks.other_voters and disks.counts(peer, reply.claim)

    def on_timeout_now(self, peer: str, call: TimeoutNow) -> None:
        """Take over at the call of the leader. In the next round an election starts in a new term. There this
        call is no longer valid.
        """
        is_leaders = call.term == self._raft.term and self._raft.leader == peer
        if is_leaders and self._voter_disks.votes_here():
            logger.info("timeout_now_received leader=%s term=%d", peer, call.term)
            self.is_called, self._outbox.called_in = True, call.term + 1
            self.ballot.skip_pre_vote()
            self._raft.start_election_soon()


class Ballot(Struct):
    """This node's candidacy."""

    members: int
    """How many voters the cluster has."""
    voters: set[str] = field(default_factory=set)
    """Peers that voted for this node in the current term."""
    supporters: set[str] | None = None
    """Peers that would vote for it in the next term. None: no pre-vote is running."""
    is_supported: bool = False
    """Whether a majority would vote for it."""

    def start_pre_vote(self) -> None:
        self.supporters, self.is_supported = set(), False

    def start(self) -> bool:
        """Whether the election may start now. If so, the counted votes are reset."""
        supported = self.is_supported or self.members == 1
        if supported:
            self.withdraw()
            self.voters = set()
        return supported

    def skip_pre_vote(self) -> None:
        """Skip the pre-vote, because the leader called this node to take over."""
        self.supporters, self.is_supported = None, True

    def withdraw(self) -> None:
        """Withdraw the candidacy, because there is a leader or a later term."""
        self.supporters, self.is_supported = None, False

    def on_support(self, voter: str) -> bool:
        """Record a supporter. Returns whether a majority would now vote for this node."""
        if self.supporters is None:
            return False
        self.supporters.add(voter)
        self.is_supported = self._is_majority(1 + len(self.supporters))
        return self.is_supported

    def on_vote(self, voter: str) -> bool:
        """Record a vote. Returns whether a majority has now voted for this node in the current term."""
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
    """Whether a node in `term` with the log up to `last`, whose disk counts, grants the vote.

    If a real request has a later term, the node adopted that term before. A pre-vote is not binding.
    """
    is_complete = (request.last.term, request.last.index) >= (last.term, last.index)
    if request.pre:
        return is_complete and request.term > term
    return is_complete and request.term == term and voted_for in {None, candidate} and is_follower

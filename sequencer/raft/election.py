"""Elections: when one may begin, who gets a vote, whose votes are counted.

Pure. The laws (rule 5 of DESIGN.md, section 6.1; Raft paper, sections 5.2 and 5.4.1; dissertation, sections
4.2.3 and 9.6): nobody is asked for a vote before a majority said that it would give one; who hears a leader
gives none; a vote counts once a voter; a candidate whose log lacks what the voter's has gets none. Whom the
leader itself calls to stand (`handover`) the first two do not hold back, the others do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sequencer.raft.messages import Place, RequestVote


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
    request: RequestVote, *, candidate: str, term: int, voted_for: str | None, last: Place, is_follower: bool
) -> bool:
    """Whether a node in `term` with the log up to `last`, whose disk counts, gives the vote.

    A real request's term has been adopted before, if it is a later one; asked beforehand, nothing is bound.
    """
    is_complete = (request.last.term, request.last.index) >= (last.term, last.index)
    if request.pre:
        return is_complete and request.term > term
    return is_complete and request.term == term and voted_for in {None, candidate} and is_follower

"""Which disks count (rule 6 of DESIGN.md, section 6.1): a wiped disk does not vote.

A member's vote, acknowledgement or sign of life counts only from the disk that the newest join in our own
log admitted, and only once that disk says that it has applied that very join: a disk applies what is
committed, so its word proves the join committed even where that is not known yet. Whoever has applied a join
has every entry before it, and a majority without the joiner had to have the join for it to commit: so no
entry that the wiped disk acknowledged in its former life is missing on all of those who may elect a leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sequencer.raft.entries import Join, decode_join
from sequencer.raft.messages import NOWHERE, Claim, Entry, Place
from sequencer.raft.state import ClusterState

NO_DISK = Claim(b"")


class Member(Protocol):
    """This node, as far as disks go."""

    @property
    def state(self) -> ClusterState:
        """The replicated state as of the last entry applied."""

    @property
    def claim(self) -> Claim:
        """This disk, and where the join stands that it has applied."""


class Admissions:
    """The disks admitted by the applied state and by the joins in the log behind it."""

    def __init__(self, name: str, member: Member, entries: Iterable[Entry]) -> None:
        self._name, self._member = name, member
        self._joins: dict[int, tuple[Join, Place]] = {}
        for entry in entries:
            self.on_appended(entry)

    @property
    def own_claim(self) -> Claim:
        """What this node says of itself."""
        return self._member.claim

    def disk_of(self, member: str) -> Claim:
        """The disk that the newest join in this log admitted, committed or not."""
        state = self._member.state
        claim = state.disks.get(member, NO_DISK)
        if not self._joins:
            return claim
        for index, (join, place) in sorted(self._joins.items()):
            # As `ClusterState` will: a join of the disk that counts already changes nothing.
            if index > state.applied.index and join.name == member and join.disk != claim.disk != b"":
                claim = Claim(join.disk, place)
        return claim

    def counts(self, member: str, claim: Claim) -> bool:
        """Whether what that disk says counts for the member."""
        return claim.joined != NOWHERE and claim == self.disk_of(member)

    def counts_here(self) -> bool:
        """Whether this node's own disk does: else it may neither vote nor lead."""
        return self.counts(self._name, self._member.claim)

    def may_get_vote(self, member: str, claim: Claim) -> bool:
        """Whether to vote for a candidate on that disk: one that counts, or that a later join admitted."""
        known = self.disk_of(member)
        return claim == known or claim.joined.index > known.joined.index

    def on_appended(self, entry: Entry) -> None:
        """The log has a new last entry."""
        join = decode_join(entry.content)
        if join is not None:
            self._joins[entry.index] = (join, entry.place)

    def on_truncated(self, index: int) -> None:
        """The log's entries from `index` on are gone."""
        for known in [known for known in self._joins if known >= index]:
            del self._joins[known]

    def on_applied(self, index: int) -> None:
        """Joins up to `index` are in the state."""
        if self._joins:
            for known in [known for known in self._joins if known <= index]:
                del self._joins[known]

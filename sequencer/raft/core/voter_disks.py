"""The members, and which disks count: a wiped disk does not vote.

Invariants:
- The newest list of members in the log is in force from its append, committed or not. If it is truncated, the
  list before it is in force again. (Ongaro's dissertation, section 4.1.)
- A member's vote, acknowledgement or heartbeat counts only from the disk that the newest join in this node's
  log admitted, and only after that disk reports that it has applied this join.
- A removed member's disk is forgotten: after the member was added again, even the same disk must join again.

Why it is safe: a disk applies only committed entries, so its report proves that the join is committed. A disk
that has applied a join has every earlier entry. A majority without the joining disk must have stored the join
to commit it. So every entry that the wiped disk had acknowledged is still on some member of any majority that
can elect a leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from sequencer.raft.model.cluster_state import NO_DISK, ClusterState
from sequencer.raft.model.entry_codec import JoinEntry, decode_join, decode_members
from sequencer.raft.model.members import Members, RaftMember, voters_of
from sequencer.raft.model.messages import NOWHERE, DiskClaim, LogIndex, RaftEntry

NOT_A_MEMBER = DiskClaim(b"")


class LocalVoter(Protocol):
    """This node's disk and replicated state."""

    @property
    def state(self) -> ClusterState:
        """The replicated state as of the last entry applied."""

    @property
    def claim(self) -> DiskClaim:
        """This disk, and the log index of the join that it has applied."""


class VoterDisks:
    """The members and their disks, from the applied state and from later lists and joins in the log.

    `addresses`: the configured members. They are in force on a blank disk. Until there is a list, they also
    give the addresses. `on_members` is called after each append, truncation or restored snapshot that may
    change `members`.
    """

    def __init__(
        self, name: str, addresses: Mapping[str, str], member: LocalVoter, entries: Iterable[RaftEntry]
    ) -> None:
        self._name, self._addresses, self._member = name, addresses, member
        self._pending: dict[int, tuple[JoinEntry | Members, LogIndex]] = {}
        self.on_members: Callable[[], None] = lambda: None
        self.refresh()
        for entry in entries:
            self.on_appended(entry)

    def refresh(self) -> None:
        """Find the list in force."""
        state = self._member.state
        later = [
            (place.index, entry)
            for entry, place in self._pending.values()
            if place.index > state.applied.index and not isinstance(entry, JoinEntry)
        ]
        self.members_index, self.members = max(
            later, default=(state.members_index, self.applied_members), key=lambda item: item[0]
        )
        """The newest list, committed or not, and the Raft index of its entry: 0 before the first change."""
        self.voters = voters_of(self.members)
        self.other_voters = self.voters - {self._name}
        self.on_members()

    @property
    def applied_members(self) -> Members:
        """The committed list, as of the last entry applied."""
        state = self._member.state
        if state.members is not None:
            return state.members
        names = state.disks or self._addresses
        return {name: RaftMember(self._addresses.get(name, "")) for name in names}

    @property
    def has_list(self) -> bool:
        """Whether there ever was a change of the members."""
        return self.members_index > 0

    @property
    def is_change_pending(self) -> bool:
        """Whether the newest list is not applied yet."""
        return self.members_index > self._member.state.applied.index

    def votes_here(self) -> bool:
        """Whether this node may be a candidate: it is a voter, and its disk counts."""
        return self._name in self.voters and self.counts_here()

    @property
    def own_claim(self) -> DiskClaim:
        return self._member.claim

    def disk_of(self, member: str) -> DiskClaim:
        """The disk that the newest join in this log admitted, committed or not."""
        state = self._member.state
        claim = state.disks.get(member, NOT_A_MEMBER)
        if not self._pending:
            return claim
        for index, (entry, place) in sorted(self._pending.items()):
            if index <= state.applied.index:
                continue
            if not isinstance(entry, JoinEntry):
                if member not in entry:
                    claim = NOT_A_MEMBER
                elif claim == NOT_A_MEMBER:
                    claim = NO_DISK
            # Like `ClusterState`: a second join of the same disk changes nothing.
            elif entry.name == member and entry.disk != claim.disk != b"":
                claim = DiskClaim(entry.disk, place)
        return claim

    def counts(self, member: str, claim: DiskClaim) -> bool:
        return claim.joined != NOWHERE and claim == self.disk_of(member)

    def counts_here(self) -> bool:
        """Whether this node's own disk counts. If not, this node may neither vote nor lead.

        A learner's disk counts, too. A learner grants votes, because the candidate may have a newer list in
        which the learner is a voter. Only candidates that have such a list ask a learner.
        """
        return self.counts(self._name, self._member.claim)

    def may_get_vote(self, member: str, claim: DiskClaim) -> bool:
        """Whether to vote for a candidate on the claimed disk: this disk counts, or a later join admitted
        it.
        """
        known = self.disk_of(member)
        return claim == known or claim.joined.index > known.joined.index

    def on_appended(self, entry: RaftEntry) -> None:
        join = decode_join(entry.content)
        if join is not None:
            self._pending[entry.index] = (join, entry.place)
            return
        members = decode_members(entry.content)
        if members is not None:
            self._pending[entry.index] = (members, entry.place)
            self.refresh()

    def on_truncated(self, index: int) -> None:
        """The entries from `index` on were dropped."""
        dropped = [known for known in self._pending if known >= index]
        for known in dropped:
            del self._pending[known]
        if dropped:
            self.refresh()

    def on_applied(self, index: int) -> None:
        """The lists and joins up to `index` are in the state."""
        if self._pending:
            for known in [known for known in self._pending if known <= index]:
                del self._pending[known]


class PeerDisks:
    """The disks of the peers that were ever connected, as they claim them."""

    def __init__(self, voter_disks: VoterDisks) -> None:
        self._voter_disks = voter_disks
        self.claims: dict[str, DiskClaim] = {}
        self.connected: dict[str, None] = {}
        """Connected peers, of this cluster or blank."""
        self._untrusted: set[bytes] = set()
        """Disks that lost entries which they had acknowledged to this leader."""

    def is_counted(self, peer: str) -> bool | None:
        """Whether the peer's disk counts. None if the peer was never connected."""
        claim = self.claims.get(peer)
        return None if claim is None else self.counts(peer, claim)

    def is_counted_voter(self, peer: str) -> bool:
        return peer in self._voter_disks.voters and bool(self.is_counted(peer))

    def counts(self, peer: str, claim: DiskClaim) -> bool:
        return self._voter_disks.counts(peer, claim) and claim.disk not in self._untrusted

    def to_admit(self) -> list[JoinEntry]:
        """The joins that connected members need."""
        members = self._voter_disks.members
        return [
            JoinEntry(peer, self.claims[peer].disk)
            for peer in self.connected
            if peer in members and self.claims[peer].disk != self._voter_disks.disk_of(peer).disk
        ]

    def distrust(self, disk: bytes) -> None:
        self._untrusted.add(disk)

    def on_up(self, peer: str, claim: DiskClaim) -> bool:
        """Returns whether the peer has another disk than before."""
        is_replaced = self.claims.get(peer, claim).disk != claim.disk
        self.claims[peer] = claim
        self.connected[peer] = None
        return is_replaced

    def on_down(self, peer: str) -> None:
        self.connected.pop(peer, None)

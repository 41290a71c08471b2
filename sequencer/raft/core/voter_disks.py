"""Which disks count: a wiped disk does not vote.

Invariant: a member's vote, acknowledgement or heartbeat counts only from the disk that the newest join in
this node's log admitted, and only after that disk reports that it has applied this join.

Why it is safe: a disk applies only committed entries, so its report proves that the join is committed. A disk
that has applied a join has every earlier entry. A majority without the joining disk must have stored the join
to commit it. So every entry that the wiped disk had acknowledged is still on some member of any majority that
can elect a leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.entry_codec import JoinEntry, decode_join
from sequencer.raft.model.messages import NOWHERE, DiskClaim, LogIndex, RaftEntry

NO_DISK = DiskClaim(b"")


class LocalVoter(Protocol):
    """This node's disk and replicated state."""

    @property
    def state(self) -> ClusterState:
        """The replicated state as of the last entry applied."""

    @property
    def claim(self) -> DiskClaim:
        """This disk, and the log index of the join that it has applied."""


class VoterDisks:
    """The disks admitted by the applied state and by later joins in the log."""

    def __init__(self, name: str, member: LocalVoter, entries: Iterable[RaftEntry]) -> None:
        self._name, self._member = name, member
        self._joins: dict[int, tuple[JoinEntry, LogIndex]] = {}
        for entry in entries:
            self.on_appended(entry)

    @property
    def own_claim(self) -> DiskClaim:
        return self._member.claim

    def disk_of(self, member: str) -> DiskClaim:
        """The disk that the newest join in this log admitted, committed or not."""
        state = self._member.state
        claim = state.disks.get(member, NO_DISK)
        if not self._joins:
            return claim
        for index, (join, place) in sorted(self._joins.items()):
            # Like `ClusterState`: a second join of the same disk changes nothing.
            if index > state.applied.index and join.name == member and join.disk != claim.disk != b"":
                claim = DiskClaim(join.disk, place)
        return claim

    def counts(self, member: str, claim: DiskClaim) -> bool:
        return claim.joined != NOWHERE and claim == self.disk_of(member)

    def counts_here(self) -> bool:
        """Whether this node's own disk counts. If not, it may neither vote nor lead."""
        return self.counts(self._name, self._member.claim)

    def may_get_vote(self, member: str, claim: DiskClaim) -> bool:
        """Whether to vote for a candidate on that disk: it counts, or a later join admitted it."""
        known = self.disk_of(member)
        return claim == known or claim.joined.index > known.joined.index

    def on_appended(self, entry: RaftEntry) -> None:
        join = decode_join(entry.content)
        if join is not None:
            self._joins[entry.index] = (join, entry.place)

    def on_truncated(self, index: int) -> None:
        """The entries from `index` on were dropped."""
        for known in [known for known in self._joins if known >= index]:
            del self._joins[known]

    def on_applied(self, index: int) -> None:
        """The joins up to `index` are in the state."""
        if self._joins:
            for known in [known for known in self._joins if known <= index]:
                del self._joins[known]


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

    def counts(self, peer: str, claim: DiskClaim) -> bool:
        return self._voter_disks.counts(peer, claim) and claim.disk not in self._untrusted

    def to_admit(self) -> list[JoinEntry]:
        """The joins that connected peers need."""
        return [
            JoinEntry(peer, self.claims[peer].disk)
            for peer in self.connected
            if self.claims[peer].disk != self._voter_disks.disk_of(peer).disk
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

"""The connected members: their hellos, and which of their messages this node accepts.

For the loop's thread. Invariants:
- No message of another cluster or epoch reaches the protocol.
- A blank node belongs to no epoch, so it takes part in one at a time.
"""

from __future__ import annotations

import logging

from rt.cluster_epoch import is_later, is_rival, is_succeeded, name_of
from rt.errors import FormatError
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.model.entry_codec import Commands, ResetEntry, decode_content
from sequencer.raft.model.epochs import EpochLeft
from sequencer.raft.model.messages import NO_ID, AppendEntries, Forward, Hello, InstallSnapshot, Message
from sequencer.raft.storage.snapshots import SnapshotMeta

logger = logging.getLogger("sequencer.raft")


class Peers:
    """The other members. `hellos` and `connections` are read-only for others."""

    def __init__(self, own: LocalMembership, raft: SyncObj, epoch_left: EpochLeft) -> None:
        self._own, self._raft, self._epoch_left = own, raft, epoch_left
        self.hellos: dict[str, Hello] = {}
        self.connections: dict[str, int] = {}
        """How often each peer was connected."""
        self._followed: tuple[bytes, int] | None = None
        """While blank: the cluster and epoch of the leader that this node follows."""

    def on_up(self, peer: str, hello: Hello) -> None:
        self.hellos[peer] = hello
        self.connections[peer] = self.connections.get(peer, 0) + 1

    def on_down(self, peer: str) -> None:
        self.hellos.pop(peer, None)
        self._epoch_left.elsewhere.pop(peer, None)

    def is_of_this_epoch(self, hello: Hello) -> bool:
        """Whether the peer has this node's cluster and epoch. Blank nodes have the same cluster and epoch."""
        own = self._own.identity
        return hello.cluster == own.cluster and hello.epoch == own.epoch

    def may_talk_to(self, hello: Hello) -> bool:
        """Whether the protocol may talk to the peer: both nodes are in the same epoch, or one of them is
        blank.
        """
        return self.is_of_this_epoch(hello) or NO_ID in (hello.cluster, self._own.identity.cluster)

    def is_accepted(self, peer: str, hello: Hello) -> bool:
        """`may_talk_to` for a new connection. Records and logs a peer of another epoch or cluster."""
        own = self._own.identity
        if self.may_talk_to(hello):
            return True
        is_here = hello.cluster == own.cluster
        if is_here and (is_later(own.epoch, hello.epoch) or is_rival(own.epoch, hello.epoch)):
            self._epoch_left.elsewhere[peer] = hello.epoch
        is_grave = not is_here or is_rival(own.epoch, hello.epoch)
        logger.log(
            logging.ERROR if is_grave else logging.WARNING,
            "refused_peer peer=%s cluster=%s epoch=%s own_cluster=%s own_epoch=%s",
            *(peer, hello.cluster.hex(), name_of(hello.epoch), own.cluster.hex(), name_of(own.epoch)),
        )
        return False

    def is_followed(self, hello: Hello, message: Message) -> bool:
        """Whether a blank node accepts the message. It follows the leader of one epoch, as long as there is
        one.

        If it followed the leaders of two epochs, it would find two leaders in one term.
        """
        if not self._own.identity.is_blank or hello.cluster == NO_ID:
            return True
        theirs = (hello.cluster, hello.epoch)
        if theirs != self._followed and isinstance(message, AppendEntries | InstallSnapshot):
            is_led = self._raft.follower_role.leaderless_s <= self._epoch_left.patience_s
            if self._followed is None or not is_led:
                self._followed = theirs
                self._raft.clear_leader()
        return theirs == self._followed or not isinstance(message, AppendEntries | InstallSnapshot)

    def may_propose(self, peer: str, forward: Forward) -> bool:
        """Whether the peer may propose this: its own commands, in a format that every node can apply."""
        try:
            content = decode_content(forward.content)
        except FormatError as error:
            logger.error("commands_rejected peer=%s error=%r", peer, str(error))
            return False
        if isinstance(content, Commands):
            is_allowed = content.disk == self.hellos[peer].claim.disk and self._is_joined(peer)
        else:
            is_allowed = isinstance(content, ResetEntry) and content.epoch == self._own.identity.epoch
        if not is_allowed:
            logger.error("commands_rejected peer=%s error='not its own'", peer)
        return is_allowed

    def _is_joined(self, peer: str) -> bool:
        """Whether the peer's disk has applied its newest join.

        A member that was removed and added again may not know this yet. Its commands in flight may be applied
        already, but the cluster has forgotten this together with the disk. Before the first change of the
        members, the peer itself checks this.
        """
        return not self._raft.voter_disks.has_list or bool(self._raft.peer_disks.is_counted(peer))

    def may_fetch_state(self, hello: Hello, newest: SnapshotMeta | None, peer: str) -> bool:
        """Whether the peer (of an earlier epoch, or blank on a disk that counts) may fetch the state."""
        own = self._own.identity
        is_here = hello.cluster == own.cluster
        if is_here and is_succeeded(hello.epoch, own.epoch):
            return True
        is_new = hello.cluster == NO_ID or (is_here and is_later(hello.epoch, own.epoch))
        return is_new and self.is_counted_on(peer, hello, newest)

    def is_counted_on(self, peer: str, hello: Hello, newest: SnapshotMeta | None) -> bool:
        """Whether the newest snapshot admits that disk. If not, the leader sends a newer snapshot."""
        known = self._own.state.disks.get(peer)
        if newest is None or known is None or known.disk != hello.claim.disk:
            return False
        return newest.place.index >= known.joined.index

    def is_any_of_this_epoch(self) -> bool:
        return any(map(self.is_of_this_epoch, self.hellos.values()))

    def members(self) -> list[str]:
        """Connected peers that are not blank, sorted."""
        return sorted(peer for peer, hello in self.hellos.items() if hello.cluster != NO_ID)

    def new_disks(self) -> dict[str, bytes]:
        """The disks of connected members that were wiped and do not count yet.

        A disk whose join is committed is not included, even if it has not applied the join. Such a disk may
        have promised something in this epoch.
        """
        return {
            peer: hello.claim.disk
            for peer, hello in self.hellos.items()
            if hello.cluster == NO_ID or (self.is_of_this_epoch(hello) and not self._may_count(peer, hello))
        }

    def voters(self) -> list[str]:
        """Connected peers that can elect a leader of this epoch."""
        return [
            peer
            for peer, hello in self.hellos.items()
            if self.is_of_this_epoch(hello) and self._raft.peer_disks.is_counted(peer)
        ]

    def _may_count(self, peer: str, hello: Hello) -> bool:
        known = self._own.state.disks.get(peer)
        is_named = known is not None and known.disk == hello.claim.disk
        return is_named or bool(self._raft.peer_disks.is_counted(peer))

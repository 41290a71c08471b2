"""The members that are connected: how each introduced itself, and what this node has to do with it.

For the loop's thread. The laws: nothing of another cluster or epoch gets to the protocol; a blank node, which
is of none, takes part in one epoch at a time.
"""

from __future__ import annotations

import logging

from rt.cluster_epoch import is_later, is_rival, is_succeeded, name_of
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.model.epochs import EpochLeft
from sequencer.raft.model.messages import NO_ID, AppendEntries, Hello, InstallSnapshot, Message
from sequencer.raft.storage.snapshots import SnapshotMeta

logger = logging.getLogger("sequencer.raft")


class Peers:
    """The other members, as far as they are connected. Both tables are for reading."""

    def __init__(self, own: LocalMembership, raft: SyncObj, behind: EpochLeft) -> None:
        self._own, self._raft, self._behind = own, raft, behind
        self.hellos: dict[str, Hello] = {}
        self.connections: dict[str, int] = {}
        """The number of the connection with each, which changes with each break."""
        self._courted: tuple[bytes, int] | None = None
        """While blank: the cluster and the epoch whose leader this node follows."""

    def on_up(self, peer: str, hello: Hello) -> None:
        """A peer is connected, and says who it is."""
        self.hellos[peer] = hello
        self.connections[peer] = self.connections.get(peer, 0) + 1

    def on_down(self, peer: str) -> None:
        """Forget what it said."""
        self.hellos.pop(peer, None)
        self._behind.elsewhere.pop(peer, None)

    # Who is what

    def is_of_this_epoch(self, hello: Hello) -> bool:
        """Whether it is of this very cluster and epoch; blank ones are to blank ones."""
        own = self._own.identity
        return hello.cluster == own.cluster and hello.epoch == own.epoch

    def is_talked_to(self, hello: Hello) -> bool:
        """Whether the protocol talks to it: it is of this epoch, or one of the two is blank."""
        own = self._own.identity
        is_same = hello.cluster == own.cluster and hello.epoch == own.epoch
        return is_same or NO_ID in (hello.cluster, own.cluster)

    def is_accepted(self, peer: str, hello: Hello) -> bool:
        """The same of a peer that has just introduced itself; one that is elsewhere is noted and logged."""
        own = self._own.identity
        if self.is_talked_to(hello):
            return True
        is_here = hello.cluster == own.cluster
        if is_here and (is_later(own.epoch, hello.epoch) or is_rival(own.epoch, hello.epoch)):
            self._behind.elsewhere[peer] = hello.epoch
        is_grave = not is_here or is_rival(own.epoch, hello.epoch)
        logger.log(
            logging.ERROR if is_grave else logging.WARNING,
            "refused_peer peer=%s cluster=%s epoch=%s own_cluster=%s own_epoch=%s",
            *(peer, hello.cluster.hex(), name_of(hello.epoch), own.cluster.hex(), name_of(own.epoch)),
        )
        return False

    def is_heeded(self, hello: Hello, message: Message) -> bool:
        """Whether a blank node takes part in the epoch that this comes from: in one, as long as it is led.

        Of leaders of two epochs it would learn that there are two in one term.
        """
        if not self._own.identity.is_blank or hello.cluster == NO_ID:
            return True
        theirs = (hello.cluster, hello.epoch)
        if theirs != self._courted and isinstance(message, AppendEntries | InstallSnapshot):
            is_led = self._raft.leaderless_s <= self._behind.patience_s
            if self._courted is None or not is_led:
                self._courted = theirs
                self._raft.forget_leader()
        return theirs == self._courted or not isinstance(message, AppendEntries | InstallSnapshot)

    def may_take_state(self, hello: Hello, newest: SnapshotMeta | None, peer: str) -> bool:
        """Whether the peer, of an earlier epoch or blank on a disk that counts, may have the newest state."""
        own = self._own.identity
        is_here = hello.cluster == own.cluster
        if is_here and is_succeeded(hello.epoch, own.epoch):
            return True
        is_new = hello.cluster == NO_ID or (is_here and is_later(hello.epoch, own.epoch))
        return is_new and self.is_counted_on(peer, hello, newest)

    def is_counted_on(self, peer: str, hello: Hello, newest: SnapshotMeta | None) -> bool:
        """Whether the newest snapshot names that disk a member: else the leader sends a newer one."""
        known = self._own.state.disks.get(peer)
        if newest is None or known is None or known.disk != hello.claim.disk:
            return False
        return newest.place.index >= known.joined.index

    # All together

    def is_any_of_this_epoch(self) -> bool:
        """Whether anybody is."""
        return any(map(self.is_of_this_epoch, self.hellos.values()))

    def members(self) -> list[str]:
        """Those that are not blank, in the order of their names."""
        return sorted(peer for peer, hello in self.hellos.items() if hello.cluster != NO_ID)

    def new_disks(self) -> dict[str, bytes]:
        """The disks of connected members that were wiped, and do not count yet.

        One whose join is committed is none, whether or not it has said that it knows: it may have promised
        something in this epoch, and would not follow into another.
        """
        return {
            peer: hello.claim.disk
            for peer, hello in self.hellos.items()
            if hello.cluster == NO_ID or (self.is_of_this_epoch(hello) and not self._may_count(peer, hello))
        }

    def voters(self) -> list[str]:
        """Peers that are here, and that can elect a leader of this epoch."""
        return [
            peer
            for peer, hello in self.hellos.items()
            if self.is_of_this_epoch(hello) and self._raft.is_counted(peer)
        ]

    def _may_count(self, peer: str, hello: Hello) -> bool:
        known = self._own.state.disks.get(peer)
        is_named = known is not None and known.disk == hello.claim.disk
        return is_named or bool(self._raft.is_counted(peer))

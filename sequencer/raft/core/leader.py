"""How a leader serves its followers, and handles their answers. (Raft paper, section 5.3.)

Invariant: an acknowledgement counts only in the leader's term, and from a disk that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from sequencer.raft.core.leadership_transfer import LeadershipTransfer
from sequencer.raft.core.ports import Handlers, Network, NodeCallbacks, TermState
from sequencer.raft.core.pysyncobj_adapter import Journal
from sequencer.raft.core.replication import Replication
from sequencer.raft.core.voter_disks import LocalVoter, PeerDisks
from sequencer.raft.model.entry_codec import JoinEntry, encode_join
from sequencer.raft.model.messages import (
    AppendEntriesReply,
    DiskClaim,
    Forward,
    InstallSnapshotReply,
    TimeoutNow,
)
from sequencer.raft.storage.log import DurableLog

logger = logging.getLogger("sequencer.raft")


class LeaderState(TermState, Protocol):
    """The part of `core.SyncObj` that a leader needs."""

    def matched(self, peer: str) -> int:
        """The index up to which the peer's acknowledgements count for commits in this term."""

    def on_acknowledged(self, peer: str, index: int) -> None:
        """Record that a disk that counts answered, and that its synced log agrees up to `index`."""

    def forget_acknowledged(self, peer: str) -> None: ...

    def submit(self, content: bytes) -> None: ...


class LeaderRole:
    """This node's role while it leads: it replicates its log, and may transfer its leadership."""

    def __init__(
        self,
        raft: LeaderState,
        own: LocalVoter,
        peers: PeerDisks,
        log: DurableLog,
        journal: Journal,
        network: Network,
        host: NodeCallbacks,
    ) -> None:
        self._raft, self._own, self._peers = raft, own, peers
        self._log, self._journal = log, journal
        self._replication = Replication(log, network, host.open_snapshot)
        self._may_forward = host.on_forward
        self.handlers: Handlers = {
            AppendEntriesReply: self.on_append_reply,
            InstallSnapshotReply: self.on_install_snapshot_reply,
            Forward: self.on_forward,
        }
        self._pumped = (0, 0)
        """The log's end and the commit index that were last sent."""
        self._lacking: set[str] = set()
        """Peers that answered, so more may be sent to them."""
        self._transfer: LeadershipTransfer | None = None

    # Replication

    def begin_term(self, peers: Iterable[str]) -> None:
        self._transfer = None
        for peer in peers:
            self._replication.start(peer, matched=0)

    def send_heartbeats(self) -> None:
        self._pump(self._peers.connected, is_heartbeat=True)
        self._lacking.clear()

    def replicate(self) -> None:
        """Queue new entries and the new commit index, and what the peers that answered still need."""
        reached = (self._log.last.index, self._raft.committed)
        if reached != self._pumped:
            self._pumped = reached
            self._pump(self._peers.connected, is_heartbeat=False)
        elif self._lacking:
            lacking = [peer for peer in self._peers.connected if peer in self._lacking]
            self._pump(lacking, is_heartbeat=False)
        self._lacking.clear()

    def on_up(self, peer: str, claim: DiskClaim) -> None:
        """Handle a new connection of a peer, also while this node does not lead."""
        if self._peers.on_up(peer, claim):
            self._raft.forget_acknowledged(peer)  # The peer's previous disk acknowledged these entries.
        self._replication.start(peer, matched=self._raft.matched(peer))
        if self._raft.leads:
            self._pump([peer], is_heartbeat=True)

    def on_down(self, peer: str) -> None:
        self._peers.on_down(peer)
        self._replication.stop_sending(peer)

    def stop_sending(self) -> None:
        self._replication.stop_sending()

    def match_index(self, peer: str) -> int | None:
        """The index up to which a peer's log agrees; None unless this node leads."""
        return self._replication.match_index(peer) if self._raft.leads else None

    def keep_from(self) -> int | None:
        """The first index that a connected follower will need; None if there is no such index, or this node
        does not lead.
        """
        return self._replication.keep_from(self._peers.connected) if self._raft.leads else None

    def admit(self, join: JoinEntry) -> None:
        """Append a join at once: a delayed one could replace a disk that joined later."""
        assert self._raft.leads
        self._journal.add(encode_join(join), self._log.last.index + 1, self._raft.term)

    def on_append_reply(self, peer: str, reply: AppendEntriesReply) -> None:
        if not self._is_answer(reply.term):
            return
        if self._replication.has_lost(peer, reply):
            self._distrust(peer, reply.claim)
        self._on_acknowledged(peer, reply.claim, self._replication.on_append_reply(peer, reply))

    def on_install_snapshot_reply(self, peer: str, reply: InstallSnapshotReply) -> None:
        if self._is_answer(reply.term):
            self._on_acknowledged(peer, reply.claim, self._replication.on_install_snapshot_reply(peer, reply))

    def on_forward(self, peer: str, message: Forward) -> None:
        if self._raft.leads and self._may_forward(peer, message):
            self._raft.submit(message.content)

    def _pump(self, peers: Iterable[str], *, is_heartbeat: bool) -> None:
        raft, state = self._raft, self._own.state
        self._replication.pump(peers, raft.term, raft.committed, state, is_heartbeat=is_heartbeat)

    def _is_answer(self, term: int) -> bool:
        """Whether a reply answers this leader in this term. A later term deposes it."""
        raft = self._raft
        if term > raft.term:
            raft.adopt_term(term)
        return raft.leads and term == raft.term

    def _on_acknowledged(self, peer: str, claim: DiskClaim, matched: int) -> None:
        """Record that the peer's log agrees up to `matched`. This counts for commits if the peer's disk
        counts.
        """
        if self._peers.counts(peer, claim):
            self._raft.on_acknowledged(peer, matched)
        self._lacking.add(peer)

    def _distrust(self, peer: str, claim: DiskClaim) -> None:
        """Distrust a disk that was restored from a copy, or did not store the entries that it synced."""
        logger.error(
            "disk_lost_entries peer=%s disk=%s: empty the directory of that node, so that it rejoins",
            *(peer, claim.disk.hex()),
        )
        self._peers.distrust(claim.disk)
        self._raft.forget_acknowledged(peer)
        self._replication.start(peer, matched=0)

    # Leadership transfer

    def transfer_leadership(self, until: float) -> None:
        """Let the most up-to-date member lead; keep leading if none does by `until`.

        Until then nothing is appended. Forwarded and submitted commands wait.
        """
        assert self._raft.leads
        self._transfer = LeadershipTransfer(until)

    @property
    def is_transferring(self) -> bool:
        return self._transfer is not None

    @property
    def transfer_due(self) -> float:
        return float("inf") if self._transfer is None else self._transfer.until

    def on_deposed(self) -> None:
        self._transfer = None

    def continue_transfer(self) -> None:
        raft, transfer = self._raft, self._transfer
        assert transfer is not None
        if raft.round_began >= transfer.until:
            logger.warning("leadership_transfer_failed term=%d successor=%s", raft.term, transfer.successor)
            self._transfer = None
            return
        peers = self._peers
        matched = {peer: raft.matched(peer) for peer in peers.connected if peers.is_counted_voter(peer)}
        successor = transfer.choose(matched, self._log.last.index)
        if successor is not None:
            logger.info("leadership_transfer_started term=%d successor=%s", raft.term, successor)
            raft.send(successor, TimeoutNow(raft.term))

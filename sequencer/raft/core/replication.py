"""Replication to the followers, within their windows. (Raft paper, sections 5.3 and 7.)

Invariants:
- The bytes in flight to a follower are bounded.
- Snapshot bytes are sent again only if the follower reports that they are missing, never because it is slow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sequencer.raft.core.ports import Network
from sequencer.raft.core.progress import FollowerProgress, Mode
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.messages import (
    CHUNK_BYTES_MAX,
    AppendEntries,
    AppendEntriesReply,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    RaftEntry,
)
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReader

WINDOW_BYTES: Final = 8 << 20
"""Limit for the snapshot bytes that are sent and not yet acknowledged."""
APPEND_BYTES: Final = 256 * 1024
"""Bytes of entries in one message: small enough that a follower handles one while the next arrives."""

logger = logging.getLogger("sequencer.raft")


class Replication:
    """The followers of this node while it leads. Messages are queued until the next sync."""

    def __init__(
        self, log: DurableLog, network: Network, open_snapshot: Callable[[], SnapshotReader]
    ) -> None:
        self._log, self._network, self._open_snapshot = log, network, open_snapshot
        self._progress: dict[str, FollowerProgress] = {}
        self._senders: dict[str, SnapshotSender] = {}
        self._latest: AppendEntries | None = None

    def start(self, peer: str, *, matched: int) -> None:
        """Start to find the index up to which a peer's log agrees. Called when the peer connected, or when
        this node became leader.

        `matched`: the index that the peer acknowledged in this term. It is probed first.
        """
        self._drop_sender(peer)
        self._progress[peer] = FollowerProgress((matched or self._log.last.index) + 1, matched)

    def match_index(self, peer: str) -> int | None:
        """Index up to which a peer's log agrees. None if the peer was never connected."""
        progress = self._progress.get(peer)
        return progress.match if progress is not None else None

    def pump(
        self, peers: Iterable[str], term: int, committed: int, state: ClusterState, *, is_heartbeat: bool
    ) -> None:
        """Send connected peers the entries that they need, or otherwise the new commit index."""
        for peer in peers:
            self._pump(peer, term, committed, state, is_heartbeat=is_heartbeat)
        self._latest = None

    def keep_from(self, peers: Iterable[str]) -> int | None:
        """The lowest index that a peer will need after everything that is in flight. None if no peer needs an
        entry.
        """
        progress = (self._progress[peer] for peer in peers)
        return min((one.next for one in progress if one.mode is not Mode.PROBE), default=None)

    def has_lost(self, peer: str, reply: AppendEntriesReply) -> bool:
        """Whether the reply proves that the peer's disk lost entries that it acknowledged in this term."""
        return not reply.matched and self._progress[peer].has_lost(reply.prev)

    def on_append_reply(self, peer: str, reply: AppendEntriesReply) -> int:
        """Return the index up to which the peer's synced log agrees."""
        progress = self._progress[peer]
        if reply.matched:
            progress.on_matched(min(reply.index, self._log.last.index))
            if progress.mode is not Mode.SNAPSHOT:
                self._drop_sender(peer)
        else:
            progress.on_refused(reply.prev, reply.index)
        return progress.match

    def on_install_snapshot_reply(self, peer: str, reply: InstallSnapshotReply) -> int:
        """Return the index up to which the peer's synced log agrees."""
        progress, sender = self._progress[peer], self._senders.get(peer)
        if sender is not None and progress.snapshot == reply.snapshot:
            sender.on_reply(reply)
            if reply.installed:
                self._drop_sender(peer)
                progress.on_matched(reply.snapshot.index)
        return progress.match

    def stop_sending(self, peer: str | None = None) -> None:
        """Close the snapshot in flight to a peer, or to all."""
        for name in list(self._senders) if peer is None else [peer]:
            self._drop_sender(name)

    def _pump(self, peer: str, term: int, committed: int, state: ClusterState, *, is_heartbeat: bool) -> None:
        progress, log = self._progress[peer], self._log
        if progress.mode is not Mode.SNAPSHOT and progress.next <= log.base.index:
            self._start_snapshot(peer, progress)
        if progress.mode is Mode.SNAPSHOT:
            self._pump_snapshot(peer, term, is_heartbeat=is_heartbeat)
        has_sent = False
        while progress.next <= log.last.index and not progress.is_full:
            entries = tuple(log.entries(progress.next, bytes_max=APPEND_BYTES))
            self._send(peer, progress, term, committed, state, entries)
            progress.on_sent(entries[-1].index, sum(len(entry.content) for entry in entries))
            has_sent = True
        is_behind = progress.mode is Mode.REPLICATE and progress.commit_sent < committed
        if not has_sent and (is_heartbeat or is_behind):
            self._send(peer, progress, term, committed, state, (), wants_reply=is_heartbeat)

    def _send(
        self,
        peer: str,
        progress: FollowerProgress,
        term: int,
        committed: int,
        state: ClusterState,
        entries: tuple[RaftEntry, ...],
        *,
        wants_reply: bool = True,
    ) -> None:
        following = progress.next - 1
        prev = progress.snapshot or LogIndex(following, self._log.term_at(following) or 0)
        applied = state.applied.index
        message = AppendEntries(term, prev, committed, applied, state.chain, entries, wants_reply)
        if message == self._latest:
            message = self._latest  # Several peers get the same object: the network encodes it once.
        self._latest = message
        self._network.send(peer, message)
        progress.commit_sent = committed

    def _start_snapshot(self, peer: str, progress: FollowerProgress) -> None:
        self._drop_sender(peer)
        sender = self._senders[peer] = SnapshotSender(self._open_snapshot())
        meta = sender.meta
        progress.on_snapshot(meta.place)
        logger.info("snapshot_send_started peer=%s index=%d bytes=%d", peer, meta.place.index, meta.length)

    def _pump_snapshot(self, peer: str, term: int, *, is_heartbeat: bool) -> None:
        sender = self._senders[peer]
        for chunk in sender.chunks(term):
            self._network.send(peer, chunk)
        if is_heartbeat:
            for question in sender.on_heartbeat(term):
                self._network.send(peer, question)

    def _drop_sender(self, peer: str) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.close()


class SnapshotSender:
    """One snapshot on its way to one follower, on one connection."""

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self._sent = 0
        self._acknowledged = 0
        self._at_last_heartbeat = -1

    @property
    def meta(self) -> SnapshotMeta:
        return self._reader.meta

    def chunks(self, term: int) -> Iterator[InstallSnapshot]:
        while self._sent < min(self.meta.length, self._acknowledged + WINDOW_BYTES):
            chunk = self._chunk(term, self._reader.read_at(self._sent, CHUNK_BYTES_MAX))
            self._sent += len(chunk.data)
            yield chunk

    def on_heartbeat(self, term: int) -> Iterator[InstallSnapshot]:
        """If nothing was acknowledged since the last heartbeat, ask how much has arrived."""
        if self._acknowledged == self._at_last_heartbeat:
            yield self._chunk(term, b"")
        self._at_last_heartbeat = self._acknowledged

    def on_reply(self, reply: InstallSnapshotReply) -> None:
        """The follower has all bytes below `reply.offset`. The offset decreases if the follower's
        installation failed.
        """
        offset = min(reply.offset, self.meta.length)
        is_missing = reply.reached == self._sent and offset < self._sent
        self._sent = offset if is_missing else max(self._sent, offset)
        self._acknowledged = offset

    def close(self) -> None:
        self._reader.close()

    def _chunk(self, term: int, data: bytes) -> InstallSnapshot:
        meta = self.meta
        return InstallSnapshot(term, meta.place, meta.length, meta.digest, self._sent, data)

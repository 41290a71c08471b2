"""Transfer of a state between two peers that do not lead: the state of a later epoch, or the first state of a
blank disk.

For the loop's thread. Nodes of different epochs exchange no other messages. Invariants:
- A node keeps its own state until the other one is completely durable. It accepts only a state of its cluster
  and its members.
- A transfer continues with the same peer and the same snapshot as long as bytes arrive. Otherwise a transfer
  that takes longer than the time between two snapshots would never end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from rt.cluster_epoch import name_of
from rt.errors import Closed, ClusterMismatch, DiskFull, FormatError, UnknownVersion
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.messages import CHUNK_BYTES_MAX, FetchState, FetchStateChunk, Hello, Message
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReader, SnapshotReceiver, SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker

ASK_AGAIN_S: Final = 1.0
"""A missing chunk is requested again after this time. If no chunk ever arrived, it is requested from another
peer.
"""
PATIENCE_S: Final = 5.0
"""A started transfer waits this long for its peer, which may reconnect."""
IDLE_S: Final = 30.0
"""A snapshot that its peer has not read for this long is closed, so that its space is freed."""

logger = logging.getLogger("sequencer.raft")


class StateFetcher:
    """Fetches a state chunk by chunk.

    `decode` reads and checks it on the worker's thread. It may raise `rt.FormatError` and
    `rt.ClusterMismatch`. `done` is called in the loop when the state is durable as the newest snapshot.
    """

    def __init__(
        self,
        snapshots: SnapshotStore,
        worker: BackgroundWorker,
        send: Callable[[str, Message], object],
        decode: Callable[[SnapshotMeta, bytes], tuple[ClusterState, bytes]],
        done: Callable[[ClusterState, bytes], None],
    ) -> None:
        self._snapshots, self._worker, self._send = snapshots, worker, send
        self._decode, self._done = decode, done
        self._asked = ""
        self._ask_again_at = float("-inf")
        self._patient_until = float("-inf")
        self.incoming: SnapshotReceiver | None = None
        """The transfer in progress, once a chunk has arrived."""
        self.is_installing = False
        """All chunks are received, and the state is being made durable."""

    def ask(self, peers: Sequence[str], now: float) -> None:
        """Request the next chunk from one of these peers, unless an answer is still expected."""
        if self.is_installing or now < self._ask_again_at:
            return
        if self.incoming is None or now >= self._patient_until:
            peer = _behind(self._asked, peers)
            if peer != self._asked:
                self.give_up()
                logger.info("state_requested peer=%s", peer)
            self._asked = peer
        self._ask_again_at = now + ASK_AGAIN_S
        incoming = self.incoming
        asks = FetchState() if incoming is None else FetchState(incoming.meta.digest, incoming.received)
        self._send(self._asked, asks)

    def give_up(self) -> None:
        """Drop the transfer, unless the state is being made durable."""
        if not self.is_installing:
            incoming, self.incoming, self._asked = self.incoming, None, ""
            self._ask_again_at = float("-inf")
            if incoming is not None:
                incoming.abandon()

    def on_state_chunk(self, peer: str, hello: Hello, chunk: FetchStateChunk, now: float) -> None:
        if peer != self._asked or self.is_installing:
            return
        meta = SnapshotMeta(hello.cluster, hello.epoch, chunk.snapshot, chunk.length, chunk.digest)
        try:
            incoming, is_new = self._write(meta, chunk)
        except (FormatError, DiskFull, Closed) as error:
            self._on_failed(error)
            return
        if incoming.received == meta.length:
            self._install(meta)
        elif is_new:  # If the chunk brought nothing new, `ask` requests it later.
            self._patient_until = now + PATIENCE_S
            self._ask_again_at = now + ASK_AGAIN_S
            self._send(peer, FetchState(meta.digest, incoming.received))

    def _write(self, meta: SnapshotMeta, chunk: FetchStateChunk) -> tuple[SnapshotReceiver, bool]:
        if self.incoming is None or self.incoming.meta != meta:
            newest = self._snapshots.newest
            if newest is not None and meta.place.index <= newest.place.index:
                raise FormatError(
                    "a state of a later epoch does not come after this node's state",
                    got=meta.place,
                    expected=f"after {newest.place}",
                )
            self.incoming = self._snapshots.receive(meta)
        before = self.incoming.received
        return self.incoming, self.incoming.write(chunk.offset, chunk.data) > before

    def _install(self, meta: SnapshotMeta) -> None:
        incoming = self.incoming
        assert incoming is not None
        self.is_installing = True
        self._worker.run(
            lambda: incoming.finish(partial(self._decode, meta)),
            lambda found: self._on_installed(*found),
            self._on_failed,
        )

    def _on_installed(self, state: ClusterState, machine_bytes: bytes) -> None:
        self.incoming, self.is_installing, self._asked = None, False, ""
        logger.info("state_fetched epoch=%s index=%d", name_of(state.epoch), state.applied.index)
        self._done(state, machine_bytes)

    def _on_failed(self, error: BaseException) -> None:
        """The state is requested again later. A disk failure ends the node, and so does a state of a newer
        rt.
        """
        self.is_installing = False
        incoming, self.incoming = self.incoming, None
        is_handled = isinstance(error, FormatError | ClusterMismatch | DiskFull | Closed)
        if isinstance(error, UnknownVersion) or not is_handled:
            raise error
        logger.error("peer_fetch_failed peer=%s error=%r", self._asked, str(error))
        if incoming is not None:
            incoming.abandon()


def _behind(asked: str, peers: Sequence[str]) -> str:
    """The peer after `asked`; the first peer if `asked` is not among them."""
    return peers[(peers.index(asked) + 1) % len(peers)] if asked in peers else peers[0]


class StateServer:
    """The snapshots that peers are fetching, at most one for each peer."""

    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots
        self._readers: dict[str, tuple[SnapshotReader, float]] = {}
        """Each reader, and when its peer last asked."""

    def chunk_for(self, peer: str, asks: FetchState, now: float) -> FetchStateChunk | None:
        """The answer, or None if nothing is left after the offset. A snapshot must exist."""
        reader = self._reader_for(peer, asks)
        meta = reader.meta
        offset = asks.offset if asks.digest == meta.digest else 0
        data = reader.read_at(offset, CHUNK_BYTES_MAX) if offset <= meta.length else b""
        if len(data) < meta.length:
            # Kept also after the last chunk, because that chunk may be lost.
            self._readers[peer] = reader, now
        else:
            self._close(peer, reader)
        return FetchStateChunk(meta.place, meta.length, meta.digest, offset, data) if data else None

    def release_idle(self, now: float) -> None:
        for peer, (reader, asked) in list(self._readers.items()):
            if now - asked >= IDLE_S:
                self._close(peer, reader)

    def close(self) -> None:
        for peer, (reader, _) in list(self._readers.items()):
            self._close(peer, reader)

    def _reader_for(self, peer: str, asks: FetchState) -> SnapshotReader:
        known = self._readers.get(peer)
        if known is not None:
            if known[0].meta.digest == asks.digest:
                return known[0]
            self._close(peer, known[0])
        return self._snapshots.open_newest()

    def _close(self, peer: str, reader: SnapshotReader) -> None:
        self._readers.pop(peer, None)
        reader.close()

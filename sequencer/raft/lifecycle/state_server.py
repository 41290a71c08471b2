"""Giving this node's state to peers that ask for it, piece by piece.

For the loop's thread. The law: a peer that has begun to take a snapshot gets the rest of that very one, even
if there is a newer one by then: else what takes longer than from one snapshot to the next would never end.
"""

from __future__ import annotations

from typing import Final

from sequencer.raft.model.messages import CHUNK_BYTES_MAX, FetchState, FetchStateChunk
from sequencer.raft.storage.snapshots import SnapshotReader, SnapshotStore

IDLE_S: Final = 30.0
"""A snapshot of which a peer wants nothing for so long is let go of: it takes space on the disk."""


class StateServer:
    """What peers are in the middle of taking: one snapshot each at most."""

    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots
        self._readers: dict[str, tuple[SnapshotReader, float]] = {}
        """And when the peer asked last."""

    def piece_for(self, peer: str, asks: FetchState, now: float) -> FetchStateChunk | None:
        """What to answer; None if there is nothing behind the offset. There must be a snapshot."""
        reader = self._reader_for(peer, asks)
        meta = reader.meta
        offset = asks.offset if asks.digest == meta.digest else 0
        data = reader.read_at(offset, CHUNK_BYTES_MAX) if offset <= meta.length else b""
        if len(data) < meta.length:
            self._readers[peer] = reader, now  # Also behind the last piece, which may be lost on the way.
        else:
            self._close(peer, reader)
        return FetchStateChunk(meta.place, meta.length, meta.digest, offset, data) if data else None

    def forget_idle(self, now: float) -> None:
        """Let go of what nobody takes any more."""
        for peer, (reader, asked) in list(self._readers.items()):
            if now - asked >= IDLE_S:
                self._close(peer, reader)

    def close(self) -> None:
        """Let go of all."""
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

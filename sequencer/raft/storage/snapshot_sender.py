"""Sending a snapshot to a follower whose log ends before ours begins. (Raft paper, section 7.)

Law: a bounded number of bytes is under way, and nothing is sent twice because it is slow: only what the
follower, asked behind all that was sent, says that it does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sequencer.raft.model.messages import CHUNK_BYTES_MAX, InstallSnapshot, InstallSnapshotReply
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReader

WINDOW_BYTES: Final = 8 << 20
"""Sent and not yet acknowledged."""


class SnapshotSender:
    """One snapshot on its way to one follower, on one connection."""

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self._sent = 0
        self._acknowledged = 0
        self._at_last_heartbeat = -1

    @property
    def meta(self) -> SnapshotMeta:
        """What is being sent."""
        return self._reader.meta

    def chunks(self, term: int) -> Iterator[InstallSnapshot]:
        """What may be sent now."""
        while self._sent < min(self.meta.length, self._acknowledged + WINDOW_BYTES):
            chunk = self._chunk(term, self._reader.read_at(self._sent, CHUNK_BYTES_MAX))
            self._sent += len(chunk.data)
            yield chunk

    def on_heartbeat(self, term: int) -> Iterator[InstallSnapshot]:
        """Nothing was acknowledged for a whole heartbeat: ask how far the follower got."""
        if self._acknowledged == self._at_last_heartbeat:
            yield self._chunk(term, b"")
        self._at_last_heartbeat = self._acknowledged

    def on_reply(self, reply: InstallSnapshotReply) -> None:
        """The follower has all bytes below `reply.offset`; less than before if its installation failed."""
        offset = min(reply.offset, self.meta.length)
        is_missing = reply.reached == self._sent and offset < self._sent
        self._sent = offset if is_missing else max(self._sent, offset)
        self._acknowledged = offset

    def close(self) -> None:
        """Give the file back."""
        self._reader.close()

    def _chunk(self, term: int, data: bytes) -> InstallSnapshot:
        meta = self.meta
        return InstallSnapshot(term, meta.place, meta.length, meta.digest, self._sent, data)

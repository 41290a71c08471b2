"""What several senders of one session directory read, read and verified once.

Law: it is a cache. What it no longer has is read again; what it has was verified by whoever put it there. It
keeps what a stream is behind another one, and no more than `bytes_max` of it.
Streams that are at the same place stay together: a sender's reads end at the same places wherever it began
(`replicator.send.segment_reader`), and none sees more of a segment than the first that looked in this round,
else each would read a little more than the one before.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from replicator.protocol.codec import encode_push_request
from replicator.protocol.messages import Chunk, LogOffset
from rt.log.disk import File
from rt.log.format.segment import SegmentId

SHARED_BYTES_MAX: Final = 8 * 2**20
"""The newest reads that are kept: some chunks more than streams of one speed lie apart."""


class CachedRead(NamedTuple):
    """Whole, verified batches from a place on, and the number that follows them."""

    data: memoryview
    number_end: int


class ReadCache:
    """For the senders of one incarnation of a session directory, in one thread."""

    def __init__(self, *, bytes_max: int = SHARED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._reads: dict[LogOffset, CachedRead] = {}
        self._encoded: dict[tuple[LogOffset, int], bytes] = {}
        self._encoded_bytes = 0
        self._sizes: dict[SegmentId, int] = {}

    def look(self) -> None:
        """A round begins: see what there is now."""
        self._sizes.clear()

    def size(self, segment: SegmentId, file: File) -> int:
        """How much of a segment there was when somebody first looked in this round."""
        known = self._sizes.get(segment)
        if known is None:
            known = self._sizes[segment] = file.size()
        return known

    def get(self, place: LogOffset) -> CachedRead | None:
        """What was read from `place` on."""
        return self._reads.get(place)

    def put(self, place: LogOffset, read: CachedRead) -> None:
        """Remember a read; the oldest go."""
        if place in self._reads:
            return
        self._reads[place] = read
        self._bytes += len(read.data)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._reads.pop(next(iter(self._reads))).data)

    def forget(self, before: LogOffset) -> None:
        """No stream is behind `before` any more."""
        for place in [place for place in self._reads if place < before]:
            self._bytes -= len(self._reads.pop(place).data)
        for key in [key for key in self._encoded if key[0] < before]:
            self._encoded_bytes -= len(self._encoded.pop(key))

    def encoded(self, chunk: Chunk) -> bytes:
        """The chunk as a push request."""
        key = chunk.place, len(chunk.data)
        found = self._encoded.get(key)
        if found is None:
            found = self._encoded[key] = encode_push_request(chunk)
            self._encoded_bytes += len(found)
            while self._encoded_bytes > self._bytes_max:
                self._encoded_bytes -= len(self._encoded.pop(next(iter(self._encoded))))
        return found

"""Reads that several senders of one session directory share, so that bytes are read and verified once.

Invariants:
- A read that was dropped is repeated. A read in the cache was verified by the sender that put it there.
- The cache holds the reads that the slowest stream still needs, `bytes_max` at most.

Streams at the same offset stay together. Reads end at the same offsets wherever a sender started
(`replicator.send.segment_reader`), and no stream of a round sees more of a segment than the first stream of
the round did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from replicator.protocol.codec import encode_push_request
from replicator.protocol.messages import Chunk, LogOffset
from rt.log.disk import File
from rt.log.format.segment import SegmentId

SHARED_BYTES_MAX: Final = 8 * 2**20
"""The newest reads are kept. Their size is some chunks more than the distance between streams of the same
speed.
"""


class CachedRead(NamedTuple):
    """Whole, verified batches, and the number that follows them."""

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
        self._table_head: tuple[bytes | None] | None = None  # None: not read in this round.

    def start_round(self) -> None:
        """Forget the sizes of segments and the table, so that what is new is seen."""
        self._sizes.clear()
        self._table_head = None

    def table_head(self, read: Callable[[], bytes | None], *, is_fresh: bool) -> bytes | None:
        """The first bytes of the table, as last read in this round. They are read now if `is_fresh`."""
        if self._table_head is None or is_fresh:
            self._table_head = (read(),)
        return self._table_head[0]

    def size(self, segment: SegmentId, file: File) -> int:
        """The size of a segment at the first call in this round."""
        known = self._sizes.get(segment)
        if known is None:
            known = self._sizes[segment] = file.size()
        return known

    def get(self, start: LogOffset) -> CachedRead | None:
        return self._reads.get(start)

    def put(self, start: LogOffset, read: CachedRead) -> None:
        if start in self._reads:
            return
        self._reads[start] = read
        self._bytes += len(read.data)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._reads.pop(next(iter(self._reads))).data)

    def prune_before(self, offset: LogOffset) -> None:
        """Drop reads before `offset`: no stream needs them."""
        for start in [start for start in self._reads if start < offset]:
            self._bytes -= len(self._reads.pop(start).data)
        for key in [key for key in self._encoded if key[0] < offset]:
            self._encoded_bytes -= len(self._encoded.pop(key))

    def encoded(self, chunk: Chunk) -> bytes:
        key = chunk.start, len(chunk.data)
        found = self._encoded.get(key)
        if found is None:
            found = self._encoded[key] = encode_push_request(chunk)
            self._encoded_bytes += len(found)
            while self._encoded_bytes > self._bytes_max:
                self._encoded_bytes -= len(self._encoded.pop(next(iter(self._encoded))))
        return found

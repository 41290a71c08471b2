"""Verified batches with their offsets in a buffer and in their log, before they are decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from rt.log.format.batch import HEADER, HEADERS_FLAG, BatchHeader
from rt.log.format.constants import Int64s

_GROUP_BATCH_BYTES_MAX = 64 * 1024
"""Larger batches get views of their own. Smaller ones are decoded together, because decoding one alone would
cost more than its bytes.
"""
_GROUP_BYTES_MAX = 16 * 2**20
"""Limit of the decompressed size of small batches that are decoded together."""


class PlacedBatch(NamedTuple):
    """A batch with valid header and checksums, and its offsets in a buffer and in its log.

    `start` is a multiple of 8: frame sizes are multiples of 8, and buffers start with a frame.
    `first_position` is the position that the batch's message 0 has, or would have if it was not skipped. The
    first `skip` messages are not part of the log (dedup).
    """

    start: int
    header: BatchHeader
    first_position: int
    skip: int
    session_id: int
    run: int
    """The run of the source segment."""
    offset: int


class PlacedRun(NamedTuple):
    """Many small batches of one block, verified, uncompressed. Arrays have one entry per batch, as in
    `PlacedBatch`.
    """

    starts: Int64s
    counts: Int64s
    first_positions: Int64s
    skips: Int64s
    session_id: int
    run: int
    log_offset: int
    """Offset in the log minus offset in the buffer."""
    end: int

    def between(self, start: int, end: int) -> PlacedRun | None:
        """The batches with messages from position `start` to `end` (exclusive); None if there are none."""
        keep = (self.first_positions < end) & (self.first_positions + self.counts > start)
        if keep.all():
            return self
        if not keep.any():
            return None
        arrays = (self.starts[keep], self.counts[keep], self.first_positions[keep], self.skips[keep])
        return PlacedRun(*arrays, *self[4:])

    def placed(self, data: memoryview) -> list[PlacedBatch]:
        rows = zip(self.starts.tolist(), self.first_positions.tolist(), self.skips.tolist(), strict=True)
        return [
            PlacedBatch(
                start,
                BatchHeader(*HEADER.unpack_from(data, start)),
                first,
                skip,
                self.session_id,
                self.run,
                start + self.log_offset,
            )
            for start, first, skip in rows
        ]


class TimeRange(Struct):
    """The lowest and highest timestamp of messages, ns; both 0 while there are none."""

    low_ns: int = 0
    high_ns: int = 0
    is_empty: bool = True

    def widen(self, low_ns: int, high_ns: int) -> None:
        self.low_ns = low_ns if self.is_empty else min(self.low_ns, low_ns)
        self.high_ns = high_ns if self.is_empty else max(self.high_ns, high_ns)
        self.is_empty = False

    def join(self, other: TimeRange) -> None:
        if not other.is_empty:
            self.widen(other.low_ns, other.high_ns)


def groups(batches: Sequence[PlacedBatch]) -> Iterator[Sequence[PlacedBatch]]:
    """Split batches into groups to decode together, in order: small ones up to a limit.

    A large batch, or a batch with headers, is a group of its own.
    """
    first, size = 0, 0
    for index, batch in enumerate(batches):
        plain = batch.header.columns_bytes + batch.header.values_bytes
        is_alone = plain > _GROUP_BATCH_BYTES_MAX or batch.header.flags & HEADERS_FLAG
        if index > first and (is_alone or size + plain > _GROUP_BYTES_MAX):
            yield batches[first:index]
            first, size = index, 0
        size += plain
        if is_alone:
            yield batches[first : index + 1]
            first, size = index + 1, 0
    if first < len(batches):
        yield batches[first:]

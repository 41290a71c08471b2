"""Scan one segment from its start for recovery: where its frames stop verifying, and what it holds.

Only complete frames count; an incomplete block counts as nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rt.log.disk import Disk, storage_errors
from rt.log.format.block import BlockKind
from rt.log.format.index import INDEX_STRIDE_BYTES, EntryKind, IndexEntry
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader
from rt.log.scan.directory import scans
from rt.log.scan.placed_batches import PlacedBatch
from rt.log.scan.scanner import PlacedBlock, Scanner, ScanResult


@dataclass(slots=True)
class RecoveryScan:
    """What a segment holds from its start to where its frames stop verifying.

    The timestamps are 0 if there is no message. `index` is the index of the segment.
    """

    header: SegmentHeader
    size_bytes: int
    end_offset: int
    end: int
    timestamp_low_ns: int = 0
    timestamp_high_ns: int = 0
    problem: str | None = None
    has_messages: bool = False
    index: list[IndexEntry] = field(default_factory=list)
    _open: list[PlacedBatch] = field(default_factory=list)
    """The batches of a block that is not complete yet."""
    _index_next: int = SEGMENT_HEADER_BYTES

    def account(self, scan: ScanResult, scanner: Scanner) -> None:
        """Count what `scan`, the scanner's last one, found."""
        batches = [*self._open, *scan.batches]
        self._open = [batch for batch in batches if batch.offset >= scanner.boundary]
        for found in _in_order(scan.blocks, batches[: len(batches) - len(self._open)]):
            if isinstance(found, PlacedBlock):
                self._record_block(found)
            else:
                self._record_batch(found)
        self.end_offset = scanner.boundary
        self.end = scanner.next
        self.problem = scan.problem or ("cut short" if scan.needed else None)

    def _record_block(self, block: PlacedBlock) -> None:
        first = block.header.first_position
        if block.header.kind == BlockKind.DECLARATION:
            self.index.append(IndexEntry(first, block.offset, self.timestamp_high_ns, EntryKind.DECLARATION))
        else:
            self._record_frame(first, block.offset)

    def _record_batch(self, batch: PlacedBatch) -> None:
        header = batch.header
        if self.header.kind is LogKind.SESSION:
            self._record_frame(header.first, batch.offset)
        low_ns, high_ns = header.timestamp_low_ns, header.timestamp_high_ns
        self.timestamp_low_ns = min(self.timestamp_low_ns, low_ns) if self.has_messages else low_ns
        self.timestamp_high_ns = max(self.timestamp_high_ns, high_ns) if self.has_messages else high_ns
        self.has_messages = True

    def _record_frame(self, first: int, offset: int) -> None:
        if offset >= self._index_next:
            self.index.append(IndexEntry(first, offset, self.timestamp_high_ns))
            self._index_next = offset + INDEX_STRIDE_BYTES


def _in_order(blocks: list[PlacedBlock], batches: list[PlacedBatch]) -> Iterator[PlacedBlock | PlacedBatch]:
    waiting = deque(blocks)
    for batch in batches:
        while waiting and waiting[0].offset < batch.offset:
            yield waiting.popleft()
        yield batch
    yield from waiting


def walk_segment(disk: Disk, path: str, scanner: Scanner, header: SegmentHeader) -> RecoveryScan:
    """Verify all bytes of a segment with `scanner`, which is at its start, in bounded memory.

    Afterwards the scanner is where the frames stop verifying.
    """
    file_path = os.path.join(path, header.id.file_name)
    with storage_errors(file_path, "reading a segment"), contextlib.closing(disk.open(file_path)) as file:
        walk = RecoveryScan(header, file.size(), SEGMENT_HEADER_BYTES, header.first)
        for scan in scans(file.pread, scanner):
            walk.account(scan, scanner)
        walk.size_bytes = max(file.size(), walk.end_offset)
    walk.index = [entry for entry in walk.index if entry.offset < walk.end_offset]
    return walk

"""Scan one segment from its start for recovery: find its contents, and the point where its frames stop
verifying.

Only complete frames count; an incomplete block is ignored.
"""

from __future__ import annotations

import contextlib
import os

from msgspec import Struct, field

from rt.log.disk import Disk, storage_errors
from rt.log.format.block import BlockKind
from rt.log.format.index import INDEX_STRIDE_BYTES, EntryKind, IndexEntry
from rt.log.format.running_checksum import ChecksummedBoundary
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader
from rt.log.scan.directory import scans
from rt.log.scan.placed_batches import PlacedBatch, TimeRange
from rt.log.scan.scanner import PlacedBlock, Scanner, ScanResult, in_order


class RecoveryScan(Struct):
    """The contents of a segment from its start to the point where its frames stop verifying, and the index of
    these contents.

    `scanner` has stopped at that point. `marks` are all marks that it returned.
    """

    header: SegmentHeader
    scanner: Scanner
    size_bytes: int
    end_offset: int
    end: int
    times: TimeRange = field(default_factory=TimeRange)
    problem: str | None = None
    index: list[IndexEntry] = field(default_factory=list)
    marks: list[ChecksummedBoundary] = field(default_factory=list)
    _open: TimeRange = field(default_factory=TimeRange)
    """The time range of the batches of a block that is not complete yet."""
    _index_next: int = SEGMENT_HEADER_BYTES

    def account(self, scan: ScanResult) -> None:
        """Add the results of `scan`, the scanner's latest scan."""
        scanner = self.scanner
        self.marks += scan.marks
        for found in in_order(scan.blocks, scan.batches):
            if isinstance(found, PlacedBlock):
                self._close_block()
                self._record_block(found)
            else:
                self._record_batch(found)
        if scanner.boundary == scanner.offset:
            self._close_block()
        self.end_offset = scanner.boundary
        self.end = scanner.next
        self.problem = scan.problem or ("cut short" if scan.needed else None)

    def _close_block(self) -> None:
        self.times.join(self._open)
        self._open = TimeRange()

    def _record_block(self, block: PlacedBlock) -> None:
        first = block.header.first_position
        if block.header.kind == BlockKind.DECLARATION:
            self.index.append(IndexEntry(first, block.offset, self.times.high_ns, EntryKind.DECLARATION))
        else:
            self._record_frame(first, block.offset)

    def _record_batch(self, batch: PlacedBatch) -> None:
        header, times = batch.header, self._open
        if self.header.kind is LogKind.SESSION:
            self._record_frame(header.first, batch.offset)
            times = self.times
        times.widen(header.timestamp_low_ns, header.timestamp_high_ns)

    def _record_frame(self, first: int, offset: int) -> None:
        if offset >= self._index_next:
            self.index.append(IndexEntry(first, offset, self.times.high_ns))
            self._index_next = offset + INDEX_STRIDE_BYTES


def walk_segment(disk: Disk, path: str, scanner: Scanner, header: SegmentHeader) -> RecoveryScan:
    """Verify all bytes of a segment in bounded memory. `scanner` is at the start of the segment."""
    file_path = os.path.join(path, header.id.file_name)
    with storage_errors(file_path, "reading a segment"), contextlib.closing(disk.open(file_path)) as file:
        walk = RecoveryScan(header, scanner, file.size(), SEGMENT_HEADER_BYTES, header.first)
        for scan in scans(file.pread, scanner):
            walk.account(scan)
        walk.size_bytes = max(file.size(), walk.end_offset)
    walk.index = [entry for entry in walk.index if entry.offset < walk.end_offset]
    return walk

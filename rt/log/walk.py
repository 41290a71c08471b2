"""Walking one segment from its start, as recovery does: where its frames stop verifying, and what it holds.

Law: what counts lies in whole frames; of a block that is cut short nothing does.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rt.log.block import BlockKind
from rt.log.columns import Placed
from rt.log.directory import scans
from rt.log.disk import Disk, storage_errors
from rt.log.frames import PlacedBlock, Scan, Scanner
from rt.log.index import INDEX_STRIDE_BYTES, EntryKind, IndexEntry
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind, SegmentHeader


@dataclass(slots=True)
class Walk:
    """What a segment holds from its start to where its frames stop verifying.

    The timestamps are 0 where there is no message. `index` is what an index of the segment would say.
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
    _open: list[Placed] = field(default_factory=list)
    """The batches of the block that is not whole yet."""
    _index_next: int = SEGMENT_HEADER_BYTES

    def account(self, scan: Scan, scanner: Scanner) -> None:
        """Count what `scan`, the scanner's last one, has found."""
        batches = [*self._open, *scan.batches]
        self._open = [batch for batch in batches if batch.offset >= scanner.boundary]
        for found in _in_order(scan.blocks, batches[: len(batches) - len(self._open)]):
            if isinstance(found, PlacedBlock):
                self._note_block(found)
            else:
                self._note_batch(found)
        self.end_offset = scanner.boundary
        self.end = scanner.next
        self.problem = scan.problem or ("cut short" if scan.needed else None)

    def _note_block(self, block: PlacedBlock) -> None:
        first = block.header.first_position
        if block.header.kind == BlockKind.DECLARATION:
            self.index.append(IndexEntry(first, block.offset, self.timestamp_high_ns, EntryKind.DECLARATION))
        else:
            self._note_frame(first, block.offset)

    def _note_batch(self, batch: Placed) -> None:
        header = batch.header
        if self.header.kind is Kind.SESSION:
            self._note_frame(header.first, batch.offset)
        low_ns, high_ns = header.timestamp_low_ns, header.timestamp_high_ns
        self.timestamp_low_ns = min(self.timestamp_low_ns, low_ns) if self.has_messages else low_ns
        self.timestamp_high_ns = max(self.timestamp_high_ns, high_ns) if self.has_messages else high_ns
        self.has_messages = True

    def _note_frame(self, first: int, offset: int) -> None:
        if offset >= self._index_next:
            self.index.append(IndexEntry(first, offset, self.timestamp_high_ns))
            self._index_next = offset + INDEX_STRIDE_BYTES


def _in_order(blocks: list[PlacedBlock], batches: list[Placed]) -> Iterator[PlacedBlock | Placed]:
    waiting = deque(blocks)
    for batch in batches:
        while waiting and waiting[0].offset < batch.offset:
            yield waiting.popleft()
        yield batch
    yield from waiting


def walk_segment(disk: Disk, path: str, scanner: Scanner, header: SegmentHeader) -> Walk:
    """Verify a segment with `scanner`, which stands at its start, every byte of it, in bounded memory.

    Afterwards the scanner stands where the frames stop verifying.
    """
    file_path = os.path.join(path, header.id.file_name)
    with storage_errors(file_path, "reading a segment"):
        file = disk.open(file_path)
        try:
            walk = Walk(header, file.size(), SEGMENT_HEADER_BYTES, header.first)
            for scan in scans(file.pread, scanner):
                walk.account(scan, scanner)
            walk.size_bytes = max(file.size(), walk.end_offset)
        finally:
            file.close()
    walk.index = [entry for entry in walk.index if entry.offset < walk.end_offset]
    return walk

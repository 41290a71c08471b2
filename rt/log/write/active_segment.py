"""The segment that a log writer appends to: its file, its end, its growing index, its durable end."""

from __future__ import annotations

import contextlib
import os
from typing import Final

from msgspec import Struct, field

from rt.log.disk import Disk, File
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.durable_end import DURABLE_FILE, RECORD_BYTES, DurableEnd, encode_durable_end, record_place
from rt.log.format.index import (
    ENTRY_BYTES,
    INDEX_STRIDE_BYTES,
    EntryKind,
    IndexEntry,
    encode_entry,
    index_file_name,
)
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentId
from rt.log.format.segment_table import SealedSegment
from rt.log.scan.placed_batches import TimeRange
from rt.log.scan.recovery_scan import RecoveryScan
from rt.log.whole_files import write_whole

UNCACHE_STEP_BYTES: Final = 2**22
"""Bytes to drop at a time. With a smaller step, the additional calls would cost more than the freed memory is
worth.
"""


class ActiveSegment(Struct):
    """The segment that grows. `size_bytes` and `end` are those after the last complete append."""

    header: SegmentHeader
    file: File
    size_bytes: int
    end: int
    times: TimeRange = field(default_factory=TimeRange)
    index: File | None = None
    index_bytes: int = 0
    index_next: int = SEGMENT_HEADER_BYTES
    cached_from: int = 0
    """Everything before this offset was dropped from the page cache."""

    def sealed(self, now_ns: int) -> SealedSegment:
        """Its entry in the segments table."""
        return sealed_entry(self.header, self.end, self.size_bytes, self.times, now_ns)

    def add_to_index(self, disk: Disk, path: str, written: int, *, is_declaration: bool) -> None:
        """Add an index entry for this append of `written` bytes, if the last entry is far enough away.

        Call it before the append is counted. A failure only makes later reads slower.
        """
        kind = EntryKind.DECLARATION if is_declaration else EntryKind.FRAME
        if not is_declaration:
            if self.size_bytes < self.index_next:
                return
            self.index_next = self.size_bytes + max(INDEX_STRIDE_BYTES, written)
        is_written = self._write_entry(
            disk, path, IndexEntry(self.end, self.size_bytes, self.times.high_ns, kind)
        )
        if is_declaration and not is_written:
            self.index_next = NUMBER_MAX  # A scanner that starts after it would miss the declaration.

    def _write_entry(self, disk: Disk, path: str, *entries: IndexEntry) -> bool:
        """Write entries to the index. Returns whether they were written."""
        with contextlib.suppress(OSError):
            if self.index is None:
                self.index = disk.create(os.path.join(path, index_file_name(self.header.id)))
            data = b"".join(encode_entry(entry, self.header.seed) for entry in entries)
            self.index.pwritev([data], self.index_bytes)
            self.index_bytes += ENTRY_BYTES * len(entries)
            return True
        return False

    def uncacheable_bytes(self, before: int) -> int:
        """How many bytes `uncache(before)` drops."""
        return max(0, before // UNCACHE_STEP_BYTES * UNCACHE_STEP_BYTES - self.cached_from)

    def uncache(self, before: int) -> None:
        """Drop the bytes before offset `before` from the page cache: they are not expected to be read."""
        if size := self.uncacheable_bytes(before):
            # Start one step before the new bytes: the kernel keeps pages that share a large folio with later
            # bytes.
            start = max(0, self.cached_from - UNCACHE_STEP_BYTES)
            self.file.uncache(start, self.cached_from + size - start)
            self.cached_from += size

    def release(self) -> None:
        self.file.close()
        if self.index:
            self.index.close()


def resume_segment(disk: Disk, path: str, walk: RecoveryScan, end: int) -> ActiveSegment:
    """Continue in the segment that recovery scanned, cut and synced; `end` is the log end after it.

    Rebuilds the segment's index from the scan: the index was never synced, so a crash may have left holes.
    """
    file = disk.open(os.path.join(path, walk.header.id.file_name), write=True)
    active = ActiveSegment(walk.header, file, walk.end_offset, end, walk.times)
    with contextlib.suppress(OSError):
        disk.remove(os.path.join(path, index_file_name(walk.header.id)))
    if walk.index:
        active._write_entry(disk, path, *walk.index)
    frames = [entry.offset for entry in walk.index if entry.kind is EntryKind.FRAME]
    active.index_next = frames[-1] + INDEX_STRIDE_BYTES if frames else SEGMENT_HEADER_BYTES
    return active


def sealed_entry(
    header: SegmentHeader, end: int, size_bytes: int, times: TimeRange, now_ns: int
) -> SealedSegment:
    times_ns = header.created_ns, times.low_ns, times.high_ns, now_ns
    return SealedSegment(header.id, header.first, end, size_bytes, *times_ns, header.run_id)


class DurableFile:
    """The file that holds the durable end of the segment. It is created if it is missing."""

    def __init__(self, disk: Disk, path: str, sequence: int) -> None:
        """`sequence` is the sequence number of the newest record."""
        file_path = os.path.join(path, DURABLE_FILE)
        if disk.size(file_path) != 2 * RECORD_BYTES:
            write_whole(disk, file_path, bytes(2 * RECORD_BYTES))
        self._file = disk.open(file_path, write=True)
        self._sequence = sequence

    def record(self, segment: SegmentId, offset: int, end: int, origin: bytes) -> None:
        """Record the durable end. It is a lower bound: if the write fails, the older one stays valid."""
        sequence = self._sequence + 1
        record = DurableEnd(sequence, segment, offset, end, origin)
        with contextlib.suppress(OSError):
            self._file.pwritev([encode_durable_end(record)], record_place(sequence))
            self._sequence = sequence

    def close(self) -> None:
        self._file.close()

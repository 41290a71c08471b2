"""Which segments of a log directory can be read, and where in them a position is.

The table and the index are only hints: a position is found when the frames there verify.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from dataclasses import dataclass

from rt.errors import Corrupt
from rt.log.disk import Disk, File
from rt.log.format.block import (
    BLOCK_HEADER_BYTES,
    DECLARATION_BYTES_MAX,
    Declaration,
    decode_block_header,
    decode_declaration,
)
from rt.log.format.checksum import batch_seed
from rt.log.format.index import EntryKind, IndexEntry
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId
from rt.log.format.segment_table import SealedSegment, SegmentTable, TrimReason
from rt.log.scan.directory import list_segments, read_header, read_index, read_table, scans
from rt.log.scan.scanner import MergedScanner, Scanner, SessionScanner, scanner_for


@dataclass(frozen=True, slots=True)
class ReadableSegment:
    """A segment with its bytes. `end` is None while it may grow."""

    id: SegmentId
    first: int
    end: int | None
    header: SegmentHeader | None = None


@dataclass(frozen=True, slots=True)
class SegmentCatalog:
    """The segments of a directory at one moment, in log order, and the table they came from."""

    kept: tuple[ReadableSegment, ...]
    table: SegmentTable | None

    @property
    def start(self) -> int:
        """The first position that is not trimmed, or the next one if no bytes are left."""
        return self.kept[0].first if self.kept else self.known_end

    @property
    def known_end(self) -> int:
        """One past the last sealed message."""
        return self.table.segments[-1].end if self.table and self.table.segments else 0

    def find(self, position: int, *, monotone: bool = True) -> ReadableSegment | None:
        """The segment that holds `position`, or the first after it; None if there is none.

        In a dedup session positions may go back where the publisher restarted (`monotone=False`): then the
        first segment that holds it.
        """
        if monotone:
            at = bisect_right(self.kept, position, key=lambda segment: segment.first) - 1
        else:
            at = next(
                (at for at, kept in enumerate(self.kept) if kept.end is None or kept.end > position), -1
            )
        for kept in self.kept[max(at, 0) :]:
            if kept.end is None or kept.end > position:
                return kept
        return self.kept[-1] if self.kept else None

    def after(self, segment: SegmentId) -> ReadableSegment | None:
        """The next segment with its bytes."""
        return next((kept for kept in self.kept if kept.id > segment), None)

    def sealed_end(self, segment: SegmentId) -> int:
        """The end of a sealed segment from the table; 0 if unknown."""
        sealed = self.table.segments if self.table else ()
        return next((known.end for known in reversed(sealed) if known.id == segment), 0)

    def run_before(self, segment: SegmentId) -> int | None:
        """The run of the previous segment, if the table has it."""
        earlier = [
            known.id.run for known in (self.table.segments if self.table else ()) if known.id < segment
        ]
        return earlier[-1] if earlier else None

    def trim_reason(self, position: int) -> TrimReason:
        """Why `position` was trimmed, if the table remembers it."""
        trimmed = [segment for segment in self.trimmed() if segment.first <= position]
        return trimmed[-1].reason if trimmed else TrimReason.LOST

    def trimmed(self) -> list[SealedSegment]:
        """Segments in the table whose bytes are trimmed."""
        return [segment for segment in self.table.segments if segment.is_trimmed] if self.table else []


def read_catalog(disk: Disk, path: str) -> SegmentCatalog:
    """Read the directory. Segments that the table does not list are taken from their headers."""
    try:
        table = read_table(disk, path)
    except Corrupt:
        table = None
    # List after reading the table: then a segment that is not in the table is newer than it.
    on_disk = list_segments(disk, path)
    sealed = table.segments if table else ()
    last = sealed[-1].id if sealed else SegmentId(-1, -1)
    kept = [
        ReadableSegment(segment.id, segment.first, segment.end)
        for segment in sealed
        if not segment.is_trimmed
    ]
    for segment in on_disk:
        # An older one was dropped from the table, and will be removed.
        if segment > last and (header := read_header(disk, path, segment)) is not None:
            kept.append(ReadableSegment(segment, header.first, None, header))
    return SegmentCatalog(tuple(sorted(kept, key=_by_id)), table)


def _by_id(kept: ReadableSegment) -> SegmentId:
    return kept.id


def scanner_at(disk: Disk, path: str, header: SegmentHeader, file: File, position: int) -> Scanner:
    """A scanner that starts at or before the frame that holds `position`, found with one index entry."""
    entries = read_index(disk, path, header)
    hops = [entry for entry in entries if entry.kind is EntryKind.FRAME and entry.first <= position]
    if not hops:
        return scanner_for(header)
    return _hop(header, file, hops[-1], entries) or scanner_for(header)


def _hop(header: SegmentHeader, file: File, hop: IndexEntry, entries: list[IndexEntry]) -> Scanner | None:
    """A scanner at `hop`; None if that frame does not verify, which means that the index is wrong."""
    sessions: dict[int, Declaration] = {}
    for entry in entries:
        if entry.kind is EntryKind.DECLARATION and entry.offset < hop.offset:
            try:
                seed = batch_seed(header.seed, entry.offset)
                block = decode_block_header(file.pread(BLOCK_HEADER_BYTES, entry.offset), 0, seed)
                content = file.pread(
                    min(block.length_bytes, DECLARATION_BYTES_MAX), entry.offset + BLOCK_HEADER_BYTES
                )
                sessions[block.session_id] = decode_declaration(block, content)
            except (ValueError, struct.error):
                return None

    def make() -> Scanner:
        if header.kind is LogKind.SESSION:
            return SessionScanner(header, offset=hop.offset, first=hop.first)
        return MergedScanner(header, offset=hop.offset, first=hop.first, sessions=sessions)

    return make() if next(scans(file.pread, make(), values=False)).batches else None


def segment_path(path: str, segment: SegmentId) -> str:
    return os.path.join(path, segment.file_name)

"""Which segments a log directory has to read, and where in them a position lies.

Law: the table and the index only say where to look. A position is found when the frames there verify.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from dataclasses import dataclass

from rt.errors import Damaged
from rt.log.block import (
    BLOCK_HEADER_BYTES,
    DECLARATION_BYTES_MAX,
    Declaration,
    decode_block_header,
    decode_declaration,
)
from rt.log.checksum import batch_seed
from rt.log.directory import list_segments, read_header, read_index, read_table, scans
from rt.log.disk import Disk, File
from rt.log.frames import MergedScanner, Scanner, SessionScanner, scanner_for
from rt.log.index import EntryKind, IndexEntry
from rt.log.segment import Kind, SegmentHeader, SegmentId
from rt.log.table import SealedSegment, Table, TrimReason


@dataclass(frozen=True, slots=True)
class Kept:
    """A segment whose bytes are there. `end` is None while it may grow."""

    id: SegmentId
    first: int
    end: int | None
    header: SegmentHeader | None = None


@dataclass(frozen=True, slots=True)
class Catalog:
    """The segments of a directory at one moment, in log order, and the table they came from."""

    kept: tuple[Kept, ...]
    table: Table | None

    @property
    def start(self) -> int:
        """The first position that is not trimmed, or where the next message goes if nothing is kept."""
        return self.kept[0].first if self.kept else self.known_end

    @property
    def known_end(self) -> int:
        """One past the last sealed message."""
        return self.table.segments[-1].end if self.table and self.table.segments else 0

    def find(self, position: int, *, monotone: bool = True) -> Kept | None:
        """The segment that holds `position`, or the first behind it; None if nothing is kept there.

        In a dedup session positions may go back where the publisher restarted (`monotone=False`): then the
        first that holds it.
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

    def after(self, segment: SegmentId) -> Kept | None:
        """The next segment whose bytes are there."""
        return next((kept for kept in self.kept if kept.id > segment), None)

    def sealed_end(self, segment: SegmentId) -> int:
        """Where a sealed segment ends, as the table says; 0 if it does not."""
        sealed = self.table.segments if self.table else ()
        return next((known.end for known in reversed(sealed) if known.id == segment), 0)

    def x_before(self, segment: SegmentId) -> int | None:
        """X of the segment before, as far as the table remembers."""
        earlier = [known.id.x for known in (self.table.segments if self.table else ()) if known.id < segment]
        return earlier[-1] if earlier else None

    def trim_reason(self, position: int) -> TrimReason:
        """Why `position` is gone, as far as the table remembers."""
        trimmed = [segment for segment in self.trimmed() if segment.first <= position]
        return trimmed[-1].reason if trimmed else TrimReason.LOST

    def trimmed(self) -> list[SealedSegment]:
        """The segments that are remembered, but whose bytes are gone."""
        return [segment for segment in self.table.segments if segment.is_trimmed] if self.table else []


def read_catalog(disk: Disk, path: str) -> Catalog:
    """Look at the directory. Segments that the table does not list are taken from their headers."""
    try:
        table = read_table(disk, path)
    except Damaged:
        table = None
    # Listed after the table was read: a segment that is not in the table is newer than it.
    on_disk = list_segments(disk, path)
    sealed = table.segments if table else ()
    last = sealed[-1].id if sealed else SegmentId(-1, -1)
    kept = [Kept(segment.id, segment.first, segment.end) for segment in sealed if not segment.is_trimmed]
    for segment in on_disk:
        # One older than the last listed one was forgotten, and is about to be removed.
        if segment > last and (header := read_header(disk, path, segment)) is not None:
            kept.append(Kept(segment, header.first, None, header))
    return Catalog(tuple(sorted(kept, key=_by_id)), table)


def _by_id(kept: Kept) -> SegmentId:
    return kept.id


def scanner_at(disk: Disk, path: str, header: SegmentHeader, file: File, position: int) -> Scanner:
    """A scanner of the segment that starts at or before the frame which holds `position`, one hop away."""
    entries = read_index(disk, path, header)
    hops = [entry for entry in entries if entry.kind is EntryKind.FRAME and entry.first <= position]
    if not hops:
        return scanner_for(header)
    return _hop(header, file, hops[-1], entries) or scanner_for(header)


def _hop(header: SegmentHeader, file: File, hop: IndexEntry, entries: list[IndexEntry]) -> Scanner | None:
    """A scanner at `hop`; None if what stands there does not verify, and the index is wrong."""
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
        if header.kind is Kind.SESSION:
            return SessionScanner(header, offset=hop.offset, first=hop.first)
        return MergedScanner(header, offset=hop.offset, first=hop.first, sessions=sessions)

    return make() if next(scans(file.pread, make())).batches else None


def segment_path(path: str, segment: SegmentId) -> str:
    """The file of a segment."""
    return os.path.join(path, segment.file_name)

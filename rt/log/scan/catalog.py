"""The readable segments of a log directory, and the search for a position in them.

The table and the index are only hints: a position is found when the frames there verify.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from rt.cluster_epoch import forced_number, generation_of_number
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
from rt.log.format.segment_table import SealedSegment, TrimReason
from rt.log.scan.directory import list_segments, read_header, read_index, read_table, scans
from rt.log.scan.scanner import MergedScanner, Scanner, SessionScanner, scanner_for


class ReadableSegment(Struct, frozen=True):
    """A segment whose bytes are kept. `end` is None while it may grow."""

    id: SegmentId
    first: int
    end: int | None
    header: SegmentHeader | None = None


class ForcedReset(NamedTuple):
    """A forced reset, and the first known segment after it.

    The log was replaced from a position in `start` to `end` on. The position may be unknown, because earlier
    segments after the reset were trimmed and forgotten, or because a copy starts after them.
    """

    segment: SegmentId
    start: int
    end: int


class SegmentCatalog(Struct, frozen=True):
    """The segments of a directory at one moment, in log order. `listed` are those of its table."""

    kept: tuple[ReadableSegment, ...]
    listed: tuple[SealedSegment, ...]

    @property
    def start(self) -> int:
        """The first position that is not trimmed, or the next one if no bytes are left."""
        return self.kept[0].first if self.kept else self.known_end

    @property
    def known_end(self) -> int:
        """One past the last sealed message."""
        return self.listed[-1].end if self.listed else 0

    @property
    def _known(self) -> tuple[SealedSegment | ReadableSegment, ...]:
        return (*self.listed, *self.kept)

    def find(self, position: int, *, monotone: bool = True) -> ReadableSegment | None:
        """The segment that holds `position`, or the first after it; None if there is none.

        In a dedup session positions may go back where the publisher restarted (`monotone=False`). Then it is
        the first segment that holds `position`.
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
        return next((kept for kept in self.kept if kept.id > segment), None)

    def sealed_end(self, segment: SegmentId) -> int:
        """The end of a sealed segment from the table; 0 if unknown."""
        return next((known.end for known in reversed(self.listed) if known.id == segment), 0)

    def forced_after(self, epoch: int) -> ForcedReset | None:
        """The first forced reset after the epoch with this number; None if no segment shows one."""
        generation, earlier_end = generation_of_number(epoch), 0
        for segment in sorted(self._known, key=attrgetter("id")):
            if generation_of_number(segment.id.run) > generation:
                is_first = segment.id == SegmentId(forced_number(epoch), 0)
                start = segment.first if is_first else earlier_end
                return ForcedReset(segment.id, start, segment.first)
            earlier_end = segment.end or earlier_end
        return None

    def run_at(self, position: int) -> int:
        """The run of the newest segment that does not start after `position`; 0 if there is none."""
        return max((known.id.run for known in self._known if known.first <= position), default=0)

    def run_before(self, segment: SegmentId) -> int | None:
        """The run of the previous segment, if the table has it."""
        return next((known.id.run for known in reversed(self.listed) if known.id < segment), None)

    def trim_reason(self, position: int) -> TrimReason:
        """Why `position` was trimmed, if the table remembers it."""
        trimmed = [segment for segment in self.trimmed() if segment.first <= position]
        return trimmed[-1].reason if trimmed else TrimReason.LOST

    def trimmed(self) -> list[SealedSegment]:
        return [segment for segment in self.listed if segment.is_trimmed]


def read_catalog(disk: Disk, path: str) -> SegmentCatalog:
    """Read the directory. Segments that the table does not list are taken from their headers."""
    try:
        table = read_table(disk, path)
    except Corrupt:
        table = None
    # List the directory after reading the table. So a segment that is not in the table is newer than the
    # table.
    on_disk = list_segments(disk, path)
    sealed = table.segments if table else ()
    last = sealed[-1].id if sealed else SegmentId(-1, -1)
    kept = [
        ReadableSegment(segment.id, segment.first, segment.end)
        for segment in sealed
        if not segment.is_trimmed
    ]
    for segment in on_disk:
        # An older segment that is not listed was dropped from the table, and will be removed.
        if segment > last and (header := read_header(disk, path, segment)) is not None:
            kept.append(ReadableSegment(segment, header.first, None, header))
    return SegmentCatalog(tuple(sorted(kept, key=attrgetter("id"))), sealed)


def scanner_at(disk: Disk, path: str, header: SegmentHeader, file: File, position: int) -> Scanner:
    """A scanner that starts at or before the frame that holds `position`, found with one index entry."""
    return _scanner_from(header, file, read_index(disk, path, header), lambda entry: entry.first <= position)


def scanner_before(disk: Disk, path: str, header: SegmentHeader, file: File, offset: int) -> Scanner:
    """A scanner that starts at or before the frame at `offset`, found with one index entry."""
    return _scanner_from(header, file, read_index(disk, path, header), lambda entry: entry.offset <= offset)


def _scanner_from(
    header: SegmentHeader, file: File, entries: list[IndexEntry], is_before: Callable[[IndexEntry], bool]
) -> Scanner:
    hops = [entry for entry in entries if entry.kind is EntryKind.FRAME and is_before(entry)]
    return (_hop(header, file, hops[-1], entries) if hops else None) or scanner_for(header)


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

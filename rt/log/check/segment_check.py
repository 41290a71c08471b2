"""Scan one segment with all checks: frames, checksums, contents, sources, index.

A scan only goes forward, over bytes that verify, and keeps one read of the file in memory. The caller decides
what its end means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy

import numpy as np
from msgspec import Struct, field

from rt.log.disk import File
from rt.log.format.block import BlockHeader, BlockKind, Declaration
from rt.log.format.index import EntryKind, IndexEntry
from rt.log.format.segment import LogKind, SegmentHeader
from rt.log.scan.batch_decoder import UndecodableBatch, decode_each
from rt.log.scan.directory import READ_BYTES, scans
from rt.log.scan.lineage import SourceLineage
from rt.log.scan.placed_batches import PlacedBatch, TimeRange, groups
from rt.log.scan.scanner import MergedScanner, PlacedBlock, Scanner, ScanResult, SessionScanner, in_order

Report = Callable[[int, str], None]
"""Called with the offset of a verified frame with wrong contents, and the problem."""


class BatchTotals(Struct):
    message_count: int = 0
    batch_count: int = 0
    times: TimeRange = field(default_factory=TimeRange)

    def add(self, batches: Sequence[PlacedBatch]) -> None:
        if batches:
            headers = [batch.header for batch in batches]
            self.batch_count += len(headers)
            self.message_count += sum(batch.header.message_count - batch.skip for batch in batches)
            lows = (header.timestamp_low_ns for header in headers)
            self.times.widen(min(lows), max(header.timestamp_high_ns for header in headers))

    def join(self, other: BatchTotals) -> None:
        self.message_count += other.message_count
        self.batch_count += other.batch_count
        self.times.join(other.times)


class SegmentCheck:
    """One pass over one segment.

    `index` has the entries of its index by their offset in the file. `totals` counts complete frames only:
    nothing in an incomplete block is counted.
    """

    def __init__(
        self,
        file: File,
        header: SegmentHeader,
        *,
        name: str,
        sources: SourceLineage,
        index: Mapping[int, IndexEntry],
        report_damage: Report,
        report_undecodable: Report,
    ) -> None:
        """`report_damage` receives damage, `report_undecodable` batches that no reader can decode."""
        is_session = header.kind is LogKind.SESSION
        # The merged chain at the segment's start is unknown here; any value allows verifying blocks.
        self.scanner: Scanner = SessionScanner(header) if is_session else MergedScanner(header, chain=0)
        self.totals = BatchTotals()
        self._open = BatchTotals()
        self._boundary = self.scanner.boundary
        self._file = file
        self._report_damage, self._report_undecodable = report_damage, report_undecodable
        self._names = {0: name}  # Batches of a session segment have the session id 0.
        self._index = {entry.offset: (place, entry) for place, entry in index.items()}
        self._sources = sources if header.kind is LogKind.MERGED else None
        self._data = b""

    def walk(self, until: int) -> Iterator[ScanResult]:
        """Continue to `until`, or to the end of the frames; the last scan says why it stopped."""
        for scan in scans(self._pread, self.scanner):
            self._check(scan)
            yield scan
            if self.scanner.boundary >= until:
                return

    def can_go_on(self, scan: ScanResult) -> bool:
        """Whether the bytes that stopped the scan verify now, because they were being written."""
        data = self._file.pread(max(READ_BYTES, scan.needed), self.scanner.offset)
        return copy(self.scanner).scan(memoryview(data)).consumed > 0

    def unmatched_entries(self) -> list[int]:
        """The offsets of index entries that point to no frame, as far as scanned."""
        passed = self.scanner.boundary
        return [place for place, entry in self._index.values() if entry.offset < passed]

    def _pread(self, size: int, offset: int) -> bytes:
        # The batches that a scan finds are in the bytes of the last read.
        self._data = self._file.pread(size, offset)
        return self._data

    def _check(self, scan: ScanResult) -> None:
        if isinstance(self.scanner, MergedScanner):
            self._names = {number: found.session for number, found in self.scanner.sessions.items()}
        buffer = np.frombuffer(self._data, np.uint8)
        whole = [batch._replace(skip=0) if batch.skip else batch for batch in scan.batches]
        for group in groups(whole):
            for found in decode_each(buffer, group, self._names):
                if isinstance(found, UndecodableBatch):
                    self._report_undecodable(found.offset, found.reason)
        if isinstance(self.scanner, MergedScanner):
            self._follow_blocks(scan, self.scanner.sessions)
        else:
            self._match_batches(scan)
        self._count(scan)

    def _count(self, scan: ScanResult) -> None:
        """Count complete frames; batches of an open block wait until it is complete."""
        boundary = self.scanner.boundary
        if boundary > self._boundary:
            self.totals.join(self._open)
            self._open = BatchTotals()
            self._boundary = boundary
        self.totals.add([batch for batch in scan.batches if batch.offset < boundary])
        self._open.add([batch for batch in scan.batches if batch.offset >= boundary])

    # Index and sources

    def _match_batches(self, scan: ScanResult) -> None:
        if self._index:
            for batch in scan.batches:
                self._match_entry(batch.offset, batch.header.first, EntryKind.FRAME)

    def _match_entry(self, offset: int, first: int, kind: EntryKind) -> None:
        _, entry = self._index.get(offset, (0, None))
        if entry is not None and entry.first == first and entry.kind in {kind, EntryKind.FRAME}:
            del self._index[offset]

    def _follow_blocks(self, scan: ScanResult, sessions: Mapping[int, Declaration]) -> None:
        for found in in_order(scan.blocks, scan.batches):
            if isinstance(found, PlacedBlock):
                self._enter(*found, sessions)
            elif self._sources is not None and (problem := self._sources.batch(found.header)):
                self._report_damage(found.offset, problem)

    def _enter(self, at: int, block: BlockHeader, sessions: Mapping[int, Declaration]) -> None:
        if block.kind == BlockKind.DECLARATION:
            self._match_entry(at, block.first_position, EntryKind.DECLARATION)
            problem = self._sources and self._sources.declare(block.session_id, sessions[block.session_id])
        else:
            self._match_entry(at, block.first_position, EntryKind.FRAME)
            problem = self._sources and self._sources.enter(block)
        if problem:
            self._report_damage(at, problem)

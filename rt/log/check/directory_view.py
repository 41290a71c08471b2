"""One reading of a log directory that others may be writing: its durable end, its files, its table.

They are read in this order. So the files named by the durable end exist when the directory is listed, and
every listed segment except the newest is in the table. A later reading overrides this one (`current_status`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from rt.errors import FormatError, RtError
from rt.log.check.report import Problem, Severity
from rt.log.disk import Disk
from rt.log.format.durable_end import DURABLE_FILE, RECORD_BYTES, DurableEnd, newest_durable_end
from rt.log.format.index import ENTRY_BYTES, IndexEntry, decode_entries, index_file_name
from rt.log.format.segment import SegmentHeader, SegmentId
from rt.log.format.segment_table import TABLE_FILE, LogIdentity, SealedSegment, SegmentTable
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import (
    durable_offset,
    identity_from,
    list_segments,
    read_durable_end,
    read_file,
    read_header,
    read_table,
)

Progress = Callable[[int, int], None]
"""Called with the bytes verified so far, and their total."""

_INDEX_BYTES_MAX = 16 * 2**20
"""Limit of an index: 500,000 entries. A full segment has about a thousand."""
_TRIES = 3
"""Number of attempts to read a small record: a read during a write may fail."""


def text_of(error: RtError) -> str:
    """The text of an error without its location, because a problem has its own."""
    if error.got is None and error.expected is None:
        return error.what
    return f"{error.what}: got {error.got}, expected {error.expected}"


class DirectoryView:
    """`problems` are those of files that belong to no single segment."""

    def __init__(self, path: str, disk: Disk, on_progress: Progress | None = None) -> None:
        self.path = path
        self.disk = disk
        self.problems: list[Problem] = []
        self.durable = self._read_durable()
        self.on_disk = list_segments(disk, path)
        self._newest = self.on_disk[-1] if self.on_disk else None
        self.table = self._read_table()
        self.listed = {sealed.id: sealed for sealed in self.table.segments} if self.table else {}
        self.identity = self.table.identity if self.table else self._identity_of_segments()
        self._on_progress = on_progress
        self._done_bytes = 0
        self._total_bytes = sum(disk.size(segment_path(path, segment)) or 0 for segment in self.on_disk)

    @property
    def segments(self) -> list[SegmentId]:
        """Every segment that has a file or is in the table, oldest first."""
        return sorted({*self.on_disk, *self.listed})

    def is_newest(self, segment: SegmentId) -> bool:
        """Whether it is the segment that may grow."""
        return segment == self._newest and segment not in self.listed

    def report(self, severity: Severity, what: str, file_name: str, offset: int) -> None:
        self.problems.append(Problem(severity, what, os.path.join(self.path, file_name), offset))

    def advance(self, size: int) -> None:
        self._done_bytes += size
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, max(self._total_bytes, self._done_bytes))

    def current_status(self, segment: SegmentId) -> tuple[SealedSegment | None, bool]:
        """The current table entry of a segment, and whether its bytes are trimmed on purpose."""
        try:
            table = read_table(self.disk, self.path)
        except FormatError:
            table = None
        if table is None:
            return None, segment != self._newest and self.disk.size(segment_path(self.path, segment)) == 0
        entry = table.find(segment)
        if entry is not None:
            return entry, entry.is_trimmed
        return None, bool(table.segments) and segment < table.segments[0].id

    def read_index(self, header: SegmentHeader) -> tuple[dict[int, IndexEntry], list[int]]:
        """The entries of a segment's index by their offset in the file, and the offsets of the bad ones."""
        entries: dict[int, IndexEntry] = {}
        bad: list[int] = []
        path = os.path.join(self.path, index_file_name(header.id))
        for _ in range(_TRIES):
            data = read_file(self.disk, path, _INDEX_BYTES_MAX) or b""
            starts = range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES)
            read = {at: next(decode_entries(data[at : at + ENTRY_BYTES], header.seed), None) for at in starts}
            entries = {at: entry for at, entry in read.items() if entry is not None}
            bad = [at for at, entry in read.items() if entry is None]
            if not bad:
                break
        return entries, bad

    def _read_table(self) -> SegmentTable | None:
        try:
            table = read_table(self.disk, self.path)
        except FormatError as error:
            self.report(Severity.DAMAGE, text_of(error), TABLE_FILE, 0)
            return None
        if table is None:
            self.report(Severity.DAMAGE, "the segments table is missing", TABLE_FILE, 0)
        return table

    def _identity_of_segments(self) -> LogIdentity | None:
        for segment in self.on_disk:
            with contextlib.suppress(FormatError, OSError):
                header = read_header(self.disk, self.path, segment)
                if header is not None:
                    return identity_from(header, self.path)
        return None

    def _read_durable(self) -> DurableEnd | None:
        """The durable end. A record that stays bad is reported; one that was never written is all zeros."""
        bad: list[int] = []
        for _ in range(_TRIES):
            data = read_file(self.disk, os.path.join(self.path, DURABLE_FILE), 2 * RECORD_BYTES)
            if data is None:
                what = "missing: a torn tail cannot be distinguished from damage"
                self.report(Severity.NOTE, what, DURABLE_FILE, 0)
                return None
            records = [(start, data[start : start + RECORD_BYTES]) for start in (0, RECORD_BYTES)]
            bad = [start for start, record in records if any(record) and newest_durable_end(record) is None]
            if not bad:
                break
        for start in bad:
            self.report(Severity.NOTE, "a record of the durable end fails its checksum", DURABLE_FILE, start)
        return read_durable_end(self.disk, self.path)

    def check_durable(self) -> None:
        """Report a missing segment that was synced."""
        durable = self.durable
        if durable is None:
            return
        if self.identity is not None and durable.origin != self.identity.origin:
            self.report(Severity.NOTE, "the durable end belongs to another log", DURABLE_FILE, 0)
        elif not self.segments or durable.id > self.segments[-1]:
            what = f"missing, though {durable.offset} bytes of it were synced"
            self.report(Severity.DAMAGE, what, durable.id.file_name, 0)

    def synced_end(self, segment: SegmentId) -> int:
        """The bytes of the segment that are now known to be synced."""
        identity = self.identity
        return 0 if identity is None else durable_offset(self.disk, self.path, segment, identity.origin)

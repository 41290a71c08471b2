"""The sealed segments of a log directory: their table and their trims.

Invariants:
- The table records a trim durably before any byte is deleted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from rt.errors import DiskFull
from rt.log.disk import Disk
from rt.log.format.index import index_file_name
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TABLE_FILE, SealedSegment, SegmentTable, TrimReason, encode_table
from rt.log.whole_files import remove_last_first, write_whole
from rt.log.write.failure_latch import FailureLatch


class SealedSegments:
    """The segments in `table`, the table that the directory `path` has after recovery."""

    def __init__(self, disk: Disk, path: str, table: SegmentTable, latch: FailureLatch) -> None:
        self.table = table
        self._disk, self._path, self._latch = disk, path, latch
        self._to_empty: list[SegmentId] = []
        """Trimmed in the table, files not yet emptied."""
        self._to_remove: list[SegmentId] = []
        """Dropped from the table, files not yet removed."""

    @property
    def pending_trims(self) -> Sequence[SegmentId]:
        """Segments that are trimmed in the table, and whose files are still there: `trim` removes them."""
        return [*self._to_remove, *self._to_empty]

    def add(self, segment: SealedSegment) -> None:
        """List the newest segment. Durable on return."""
        self._write(self.table.with_sealed(segment))

    def add_whole(self, segments: Sequence[SealedSegment]) -> None:
        """List segments whose files were just written; if that fails, remove the files. Raises `OSError`."""
        table = replace(self.table, segments=(*self.table.segments, *segments))
        try:
            write_whole(self._disk, os.path.join(self._path, TABLE_FILE), encode_table(table))
        except OSError as error:
            # Files without an entry in the table must not stay, because segments that are added later would
            # be listed after them.
            files = [os.path.join(self._path, segment.id.file_name) for segment in segments]
            remove_last_first(self._disk, files, error)
            raise
        self.table = table

    def trim(self, reasons: Mapping[SegmentId, tuple[TrimReason, int]]) -> Sequence[SealedSegment]:
        """Trim these segments, each with its reason and time (ns); returns those that were trimmed now."""
        trimmed = [
            segment for segment in self.table.segments if segment.id in reasons and not segment.is_trimmed
        ]
        if trimmed:
            table, forgotten = SegmentTable(
                self.table.identity,
                tuple(
                    segment
                    if segment.is_trimmed or segment.id not in reasons
                    else segment.trimmed(*reasons[segment.id])
                    for segment in self.table.segments
                ),
            ).forgotten()
            try:
                self._write(table)
            except DiskFull:
                self._make_room(trimmed)
                self._write(table)
            self._to_empty += [segment.id for segment in trimmed]
            self._to_remove += forgotten
        if self._to_empty or self._to_remove:
            with self._latch.guarded("", "trimming segments"):
                empty_segments(self._disk, self._path, self._to_empty)
                remove_segments(self._disk, self._path, self._to_remove)
            self._to_empty, self._to_remove = [], []
        return trimmed

    def _make_room(self, trimmed: Sequence[SealedSegment]) -> None:
        """Remove the indexes of trimmed segments first, because on a full disk even the table may not fit.

        The indexes would be removed with the segments anyway. A reader of such a segment reads it from its
        start instead.
        """
        with self._latch.guarded("", "making room for the segments table"):
            names = set(self._disk.list_directory(self._path))
            for name in {index_file_name(segment.id) for segment in trimmed} & names:
                self._disk.remove(os.path.join(self._path, name))

    def _write(self, table: SegmentTable) -> None:
        with self._latch.guarded(TABLE_FILE, "writing the segments table"):
            write_whole(self._disk, os.path.join(self._path, TABLE_FILE), encode_table(table))
            self.table = table


def empty_segments(disk: Disk, path: str, segments: Sequence[SegmentId]) -> None:
    """Cut the existing files of trimmed segments to size 0 and remove their indexes."""
    names = set(disk.list_directory(path))
    for segment in segments:
        if segment.file_name in names and disk.size(os.path.join(path, segment.file_name)):
            with contextlib.closing(disk.open(os.path.join(path, segment.file_name), write=True)) as file:
                file.truncate(0)
        if index_file_name(segment) in names:
            disk.remove(os.path.join(path, index_file_name(segment)))


def remove_segments(disk: Disk, path: str, segments: Sequence[SegmentId]) -> None:
    """Remove the existing files of segments that the table has dropped."""
    names = set(disk.list_directory(path))
    for segment in segments:
        for name in (segment.file_name, index_file_name(segment)):
            if name in names:
                disk.remove(os.path.join(path, name))

"""A log directory as its sender sees it: which segments exist, are sealed, are trimmed.

Invariants:
- The table is read again only if its first bytes, which hold its checksum, have changed.
- Answers after a `poll` come from the state that this poll read.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from operator import attrgetter

from replicator.protocol.messages import LogTrimmed
from replicator.send.read_cache import ReadCache
from rt.errors import Corrupt
from rt.log.disk import Disk
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TABLE_FILE, LogIdentity, SealedSegment, SegmentTable
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_header, read_identity, read_table

logger = logging.getLogger("replicator")

_TABLE_HEAD_BYTES = 64


class SourceView:
    """The segments of one directory. `rt.LogNotFound` if there is no log; `OSError` as the disk raises it."""

    def __init__(self, disk: Disk, path: str, cache: ReadCache | None = None) -> None:
        self.path = path
        self._disk = disk
        self._cache = cache
        self.identity: LogIdentity = read_identity(disk, path)
        self.table: SegmentTable | None = None
        self._head: bytes | None = b""

    def poll(self, *, is_fresh: bool = False) -> bool:
        """Whether the table has changed since the last poll. Call it once before anything else.

        With a cache, views of one round see the table that the first one saw, except if `is_fresh`.
        """
        cache = self._cache
        head = self._read_head() if cache is None else cache.table_head(self._read_head, is_fresh=is_fresh)
        if head == self._head:
            return False
        self._head = head
        try:
            self.table = read_table(self._disk, self.path)
        except Corrupt as error:
            # The writer rebuilds it when it opens the directory. Until then no segment counts as sealed.
            logger.warning("segment_table_corrupt path=%s reason=%s", self.path, error)
            self.table = None
        return True

    def sealed(self, segment: SegmentId) -> SealedSegment | None:
        """The table's entry of a segment; None if it is not listed."""
        return self.table.find(segment) if self.table else None

    def is_trimmed(self, segment: SegmentId) -> bool:
        """Whether a segment was trimmed, or trimmed so long ago that the table does not list it."""
        entry = self.sealed(segment)
        if entry is not None:
            return entry.is_trimmed
        return self.table is not None and bool(self.table.segments) and segment < self.table.segments[0].id

    def at_or_after(self, segment: SegmentId) -> SegmentId | None:
        """The first segment from `segment` on that has bytes."""
        entries = self.table.segments if self.table else ()
        for entry in entries[bisect_left(entries, segment, key=attrgetter("id")) :]:
            if not entry.is_trimmed:
                return entry.id
        # A segment that is only in the directory is newer than all segments of the table.
        last = entries[-1].id if entries else SegmentId(-1, -1)
        for found in list_segments(self._disk, self.path):
            if found >= segment and found > last and self._disk.size(segment_path(self.path, found)):
                return found
        return None

    def trimmed(self) -> LogTrimmed | None:
        """What was trimmed of a merged log; None if nothing was."""
        entries = self.table.segments if self.table else ()
        count = bisect_left(entries, True, key=lambda entry: not entry.is_trimmed)
        kept = self.at_or_after(SegmentId(0, 0))
        if not count:
            return None
        if kept is None:
            run, roll = entries[-1].id
            return LogTrimmed(SegmentId(run, roll + 1), entries[-1].end, entries[-1].reason)
        if count < len(entries):
            log_start = entries[count].first
        else:
            header = read_header(self._disk, self.path, kept)
            if header is None:
                return None  # It was trimmed just now: the next poll shows it.
            log_start = header.first
        return LogTrimmed(kept, log_start, entries[count - 1].reason)

    def _read_head(self) -> bytes | None:
        try:
            file = self._disk.open(os.path.join(self.path, TABLE_FILE))
        except FileNotFoundError:
            self._disk.list_directory(self.path)  # Raises if the directory itself was deleted.
            return None
        try:
            return file.pread(_TABLE_HEAD_BYTES, 0)
        finally:
            file.close()

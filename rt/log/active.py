"""The segment that a log writer appends to: its file, how far it goes, its index as it grows."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Final

from rt.log.disk import Disk, File
from rt.log.index import ENTRY_BYTES, INDEX_STRIDE_BYTES, EntryKind, IndexEntry, encode_entry, index_file_name
from rt.log.segment import SEGMENT_HEADER_BYTES, SegmentHeader
from rt.log.walk import Walk

UNCACHE_STEP_BYTES: Final = 2**22
"""So much at a time: less costs more calls than it frees memory."""


@dataclass(slots=True)
class ActiveSegment:
    """The segment that grows. `size_bytes` and `end` are behind the last whole append."""

    header: SegmentHeader
    file: File
    size_bytes: int
    end: int
    timestamp_low_ns: int = 0
    timestamp_high_ns: int = 0
    has_messages: bool = False
    index: File | None = None
    index_bytes: int = 0
    index_next: int = SEGMENT_HEADER_BYTES
    cached_from: int = 0
    """Everything before it was given up from the page cache."""

    def see(self, low_ns: int, high_ns: int) -> None:
        """Widen the segment's time range by that of an append."""
        self.timestamp_low_ns = min(self.timestamp_low_ns, low_ns) if self.has_messages else low_ns
        self.timestamp_high_ns = max(self.timestamp_high_ns, high_ns) if self.has_messages else high_ns
        self.has_messages = True

    def add_to_index(self, disk: Disk, path: str, written: int, *, is_declaration: bool) -> None:
        """Note where this append of `written` bytes starts, if the last note is far behind.

        Called before the append is counted. Failing costs readers time only.
        """
        kind = EntryKind.DECLARATION if is_declaration else EntryKind.FRAME
        if not is_declaration:
            if self.size_bytes < self.index_next:
                return
            self.index_next = self.size_bytes + max(INDEX_STRIDE_BYTES, written)
        self._write_entry(disk, path, IndexEntry(self.end, self.size_bytes, self.timestamp_high_ns, kind))

    def _write_entry(self, disk: Disk, path: str, *entries: IndexEntry) -> None:
        with contextlib.suppress(OSError):
            if self.index is None:
                self.index = disk.create(os.path.join(path, index_file_name(self.header.id)))
            data = b"".join(encode_entry(entry, self.header.seed) for entry in entries)
            self.index.pwritev([data], self.index_bytes)
            self.index_bytes += ENTRY_BYTES * len(entries)

    def uncached_with(self, before: int) -> int:
        """How many bytes `uncache(before)` gives up."""
        return before // UNCACHE_STEP_BYTES * UNCACHE_STEP_BYTES - self.cached_from

    def uncache(self, before: int) -> None:
        """Nobody is expected to read what is before the offset `before`: keep no memory for it."""
        if (size := self.uncached_with(before)) > 0:
            # A step more than is new: the kernel keeps what it holds together with bytes that are wanted.
            start = max(0, self.cached_from - UNCACHE_STEP_BYTES)
            self.file.uncache(start, self.cached_from + size - start)
            self.cached_from += size

    def release(self) -> None:
        """Close the files."""
        self.file.close()
        if self.index:
            self.index.close()


def resume_segment(disk: Disk, path: str, walk: Walk, end: int) -> ActiveSegment:
    """Go on in the segment that recovery walked, cut and synced; `end` is the log's end behind it.

    Its index is made anew from the walk: it was never synced, so a crash may have left holes in it.
    """
    file = disk.open(os.path.join(path, walk.header.id.file_name), write=True)
    active = ActiveSegment(
        walk.header,
        file,
        walk.end_offset,
        end,
        walk.timestamp_low_ns,
        walk.timestamp_high_ns,
        walk.has_messages,
    )
    with contextlib.suppress(OSError):
        disk.remove(os.path.join(path, index_file_name(walk.header.id)))
    if walk.index:
        active._write_entry(disk, path, *walk.index)
    frames = [entry.offset for entry in walk.index if entry.kind is EntryKind.FRAME]
    active.index_next = frames[-1] + INDEX_STRIDE_BYTES if frames else SEGMENT_HEADER_BYTES
    return active

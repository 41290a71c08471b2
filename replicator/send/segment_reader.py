"""Reads one segment to send it: whole, verified frames (batches or blocks), in chunks.

Invariants:
- A session's batches are verified whole. In the blocks of a merged log, everything but the values is
  verified; the receiver verifies the values.
- Bytes that are not whole, or do not verify, may be half written: `read_chunks` then returns nothing and
  `problem` says why.
- Senders of one session share a `ReadCache`: its reads end at the last batch before a multiple of
  `_GRID_BYTES`, so that senders with different starts soon read the same pieces.
- A reader without a cache keeps no bytes of an incomplete frame: it reads them again when it returns them. So
  it holds one or two chunks, even if messages are large.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from copy import copy
from typing import Final, NamedTuple

from replicator.protocol.last_block import walk_to
from replicator.protocol.messages import CHUNK_BYTES_MAX, Chunk, LogOffset
from replicator.send.read_cache import CachedRead, ReadCache
from rt.errors import Corrupt, Diverged
from rt.log.disk import Disk, File
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentId, decode_segment_header
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import scanner_before, segment_path
from rt.log.scan.directory import read_frames, scans
from rt.log.scan.scanner import Scanner, SessionScanner, scanner_for

RESTORE_HINT: Final = "Restore or refetch the file; `rt log verify` lists all damage."
_GRID_BYTES: Final = CHUNK_BYTES_MAX // 2
_LARGE_FRAME_LOCK: Final = threading.Lock()
"""Held while a frame of several chunks is in memory, to verify it. So the process holds one at a time."""


class _Piece(NamedTuple):
    """Verified bytes of the file that were not returned yet. If `data` is None, they are read again."""

    offset: int
    size: int
    data: memoryview | None


class SegmentReader:
    """Made by `open`."""

    def __init__(
        self, path: str, file: File, header: SegmentHeader, scanner: Scanner, cache: ReadCache | None
    ) -> None:
        self.path = path
        self.header = header
        self.chunk_bytes = CHUNK_BYTES_MAX  # The largest size of a chunk, and about the size of one read.
        self.problem: str | None = None
        """Why the last `read_chunks` stopped before the end of the file; None if it did not."""
        self._file = file
        self._scanner = scanner
        self._cache = cache if isinstance(scanner, SessionScanner) else None
        self._pieces: deque[_Piece] = deque()
        self._offset = scanner.offset

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: str,
        segment: SegmentId,
        identity: LogIdentity,
        *,
        offset: int = 0,
        cache: ReadCache | None = None,
    ) -> SegmentReader | None:
        """Open `segment` of the directory `path` at `offset`; None while it is shorter than that.

        `cache` is used for sessions only. `rt.Diverged` if no frame ends at `offset`, `rt.Corrupt` if the
        bytes before it do not verify, `FileNotFoundError` if the segment was trimmed.
        """
        file_path = segment_path(path, segment)
        file = disk.open(file_path)
        try:
            head = file.pread(SEGMENT_HEADER_BYTES, 0)
            if not head:
                raise FileNotFoundError(2, "the segment was trimmed", file_path)
            header = decode_segment_header(head, path=file_path)
            if (header.id, header.kind, header.origin) != (segment, identity.kind, identity.origin):
                raise Corrupt("segment of another log", path=file_path, offset=0, got=header.origin.hex())
            if file.size() < offset:
                file.close()
                return None
            scanner = scanner_for(header) if offset <= SEGMENT_HEADER_BYTES else None
            if scanner is None:
                scanner = _scanner_at_offset(disk, path, header, file, offset)
            reader = cls(file_path, file, header, scanner, cache)
            if offset == 0:
                reader._offset = 0
                reader._pieces.append(_Piece(0, len(head), memoryview(head)))
            elif offset < SEGMENT_HEADER_BYTES:
                raise _no_boundary(file_path, offset)
        except BaseException:
            file.close()
            raise
        return reader

    @property
    def next_offset(self) -> LogOffset:
        return LogOffset(*self.header.id, self._offset)

    @property
    def is_deleted(self) -> bool:
        return self._file.size() == 0 or not self._file.is_linked()

    def is_near_end(self, bytes_max: int, read_bytes: int) -> bool:
        """Whether at most `bytes_max` are left of the file, and the next `read_bytes` are in memory."""
        left = self._file.size() - self._offset
        return left <= bytes_max and self._file.is_cached(self._offset, min(left, read_bytes))

    @property
    def is_inside_frame(self) -> bool:
        """Whether the last chunk ended inside a frame: the next ones complete it."""
        return bool(self._pieces) and self._offset == self._pieces[0].offset

    def read_chunks(self, bytes_max: int, *, is_fresh: bool = False) -> list[Chunk]:
        """The next chunks, at most a chunk more than `bytes_max`. Empty if nothing more verifies now.

        All senders of a round see the size that the first sender saw. With `is_fresh`, bytes that were
        written since then are read too.
        """
        chunks: list[Chunk] = []
        taken = 0
        while taken < bytes_max:
            chunk = self._next_chunk()
            if chunk is not None:
                chunks.append(chunk)
                taken += len(chunk.data)
            elif not self._read_piece(is_fresh=is_fresh):
                break
        return chunks

    def check_next(self) -> None:
        """Verify the next frame with its values, which `read_chunks` does not verify in a merged log.

        `rt.Corrupt` if it does not verify. Call it only if the frame is known to be synced.
        """
        scanner = copy(self._scanner)
        start = scanner.boundary
        for scan in scans(self._file.pread, scanner, read_bytes=CHUNK_BYTES_MAX):
            if scan.problem is not None:
                raise Corrupt(scan.problem, path=self.path, offset=start, hint=RESTORE_HINT)
            if scanner.boundary > start:
                return

    def close(self) -> None:
        self._file.close()

    def _next_chunk(self) -> Chunk | None:
        if not self._pieces:
            return None
        offset, left, data = self._pieces[0]
        size = min(left, self._scanner.boundary - offset, self.chunk_bytes)
        if size <= 0:
            return None
        returned = memoryview(self._file.pread(size, offset)) if data is None else data[:size]
        if len(returned) < size:
            return None  # It was trimmed.
        if size == left:
            self._pieces.popleft()
        else:
            self._pieces[0] = _Piece(offset + size, left - size, None if data is None else data[size:])
        self._offset = offset + size
        return Chunk(LogOffset(*self.header.id, offset), returned)

    def _read_piece(self, *, is_fresh: bool) -> bool:
        """Read and verify the next piece. False if there is none."""
        scanner, start = self._scanner, self._scanner.offset
        cache = self._cache
        if cache is not None and isinstance(scanner, SessionScanner):
            known = cache.get(LogOffset(*self.header.id, start))
            if known is not None:
                scanner.offset, scanner.next = start + len(known.data), known.number_end
                self._pieces.append(_Piece(start, len(known.data), known.data))
                return True
        piece = self._read_verified(start, is_fresh=is_fresh)
        if piece is None:
            return False
        if cache is None and (self._scanner.boundary < start + piece.size or len(self._pieces)):
            piece = piece._replace(data=None)  # Part of a frame of several pieces.
        self._pieces.append(piece)
        if cache is not None and piece.data is not None:
            cache.put(LogOffset(*self.header.id, start), CachedRead(piece.data, self._scanner.next))
        return True

    def _read_verified(self, start: int, *, is_fresh: bool) -> _Piece | None:
        cache, is_session = self._cache, isinstance(self._scanner, SessionScanner)
        end = self._file.size() if cache is None or is_fresh else cache.size(self.header.id, self._file)
        # A read of a merged log continues to the end of the last block. With this further batch it is still
        # one chunk.
        size = min(end - start, self.chunk_bytes if is_session else self.chunk_bytes * 3 // 4)
        if cache is not None:
            size = min(end - start, (start + CHUNK_BYTES_MAX) // _GRID_BYTES * _GRID_BYTES - start)
        self.problem = None
        if size <= 0:
            return None
        is_large = False
        with ExitStack() as held:

            def pread(size: int, offset: int) -> bytes:
                nonlocal is_large
                if cache is None and size > max(self.chunk_bytes, CHUNK_BYTES_MAX) and not is_large:
                    held.enter_context(_LARGE_FRAME_LOCK)
                    is_large = True
                return self._file.pread(size, offset)

            try:
                data, scan = read_frames(
                    pread, self._scanner, size, values=is_session, reaches=lambda offset: offset <= end
                )
            except Corrupt as error:  # A known bad range: what was read before it is good.
                self.problem = error.what
                return None
            if scan.consumed:
                is_kept = not is_large and scan.consumed <= len(data)
                return _Piece(start, scan.consumed, memoryview(data)[: scan.consumed] if is_kept else None)
            del data  # Before the lock is released.
        self.problem = scan.problem or "cut short"
        return None


def _scanner_at_offset(disk: Disk, path: str, header: SegmentHeader, file: File, offset: int) -> Scanner:
    """A scanner at `offset` that has verified all from the last index entry before it."""
    scanner = scanner_before(disk, path, header, file, offset)
    if (problem := walk_to(file, scanner, offset)) is not None:
        raise Corrupt(problem, path=segment_path(path, header.id), offset=scanner.boundary, hint=RESTORE_HINT)
    if scanner.offset != offset or scanner.boundary != offset:
        raise _no_boundary(segment_path(path, header.id), offset)
    return scanner


def _no_boundary(path: str, offset: int) -> Diverged:
    return Diverged(
        "no batch or block of this log ends where the receiver's copy ends",
        where=path,
        got=offset,
        hint="The copies are of different logs: `rt log compare` shows where they differ.",
    )

"""Reading one segment to be sent: whole, verified batches or blocks, in chunks.

Laws. Of a session only batches that verify are handed out, of a merged log only whole blocks whose columns
verify (the receiver looks at the values). What is not whole yet is waited for, and what is bad may be half
written: `take` gives nothing then and `problem` says why. Shared reads end at the last frame before a
multiple of `GRID_BYTES`, so that senders which began at different places soon read the same pieces.
A reader that shares nothing keeps no bytes of a block that is not whole yet: it reads them again when they
are handed out. So it holds a chunk or two, however large blocks and messages are.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from copy import copy
from typing import Final, NamedTuple

from replicator.protocol.messages import CHUNK_BYTES_MAX, Chunk, LogOffset
from replicator.send.read_cache import CachedRead, ReadCache
from rt.errors import Corrupt, Diverged
from rt.log.disk import Disk, File
from rt.log.format.index import EntryKind
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentId, decode_segment_header
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import scanner_at, segment_path
from rt.log.scan.directory import READ_BYTES, read_index
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult, SessionScanner, scanner_for

GRID_BYTES: Final = CHUNK_BYTES_MAX // 2


_LARGE: Final = threading.Lock()
"""Held while a frame of several chunks is verified, where it is not kept: one at a time is in memory."""


class _Piece(NamedTuple):
    """Verified bytes of the file that were not handed out yet; without `data` they are to be read again."""

    offset: int
    size: int
    data: memoryview | None


class SegmentReader:
    """An open segment. Make it with `open`; `place` is where the next chunk begins."""

    def __init__(
        self, path: str, file: File, header: SegmentHeader, scanner: Scanner, shared: ReadCache | None
    ) -> None:
        self.path = path
        self.header = header
        self.chunk_bytes = CHUNK_BYTES_MAX
        """How large chunks may be, and about how much is read at once."""
        self.problem: str | None = None
        """Why the last `take` stopped before the end of the file; None if it did not."""
        self._file = file
        self._scanner = scanner
        self._shared = shared if isinstance(scanner, SessionScanner) else None
        self._held: deque[_Piece] = deque()
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
        shared: ReadCache | None = None,
    ) -> SegmentReader | None:
        """Open `segment` of the directory `path` at `offset`; None while it does not reach that far.

        `rt.Diverged` if no batch or block ends at `offset`, `rt.Corrupt` if what is before it is bad,
        `FileNotFoundError` if the segment is gone or empty.
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
            reader = cls(file_path, file, header, scanner, shared)
            if offset == 0:
                reader._offset = 0
                reader._held.append(_Piece(0, len(head), memoryview(head)))
            elif offset < SEGMENT_HEADER_BYTES:
                raise _no_boundary(file_path, offset)
        except BaseException:
            file.close()
            raise
        return reader

    @property
    def place(self) -> LogOffset:
        """Behind all that was handed out."""
        return LogOffset(*self.header.id, self._offset)

    @property
    def is_gone(self) -> bool:
        """Whether the file was trimmed or removed."""
        return self._file.size() == 0 or not self._file.is_linked()

    @property
    def is_inside_frame(self) -> bool:
        """Whether what was handed out last is part of verified bytes that are not handed out whole."""
        return bool(self._held) and self._offset == self._held[0].offset

    def take(self, bytes_max: int, *, is_fresh: bool = False) -> list[Chunk]:
        """What comes next, until it is `bytes_max` or a little more; nothing if nothing more is good now.

        `is_fresh`: also what came since this round of shared reads began.
        """
        chunks: list[Chunk] = []
        taken = 0
        while taken < bytes_max:
            chunk = self._release()
            if chunk is not None:
                chunks.append(chunk)
                taken += len(chunk.data)
            elif not self._read(is_fresh=is_fresh):
                break
        return chunks

    def check_next(self) -> None:
        """Verify the next frame with its values, which a merged log's sender does not look at otherwise.

        `rt.Corrupt` if it does not verify: call it only where the frame is known to be synced.
        """
        scanner, size = copy(self._scanner), CHUNK_BYTES_MAX
        start = scanner.boundary
        while scanner.boundary == start:
            data = self._file.pread(size, scanner.offset)
            scan = scanner.scan(memoryview(data))
            if scan.problem is not None:
                raise Corrupt(scan.problem, path=self.path, offset=start, hint=_RESTORE)
            if scan.consumed:
                size = CHUNK_BYTES_MAX
            elif size < scan.needed and len(data) == size:
                size = scan.needed
            else:
                return

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _release(self) -> Chunk | None:
        """The first piece, or what of it may be handed out."""
        if not self._held:
            return None
        offset, held, data = self._held[0]
        size = min(held, self._scanner.boundary - offset, self.chunk_bytes)
        if size <= 0:
            return None
        handed = memoryview(self._file.pread(size, offset)) if data is None else data[:size]
        if len(handed) < size:
            return None  # It was trimmed.
        if size == held:
            self._held.popleft()
        else:
            self._held[0] = _Piece(offset + size, held - size, None if data is None else data[size:])
        self._offset = offset + size
        return Chunk(LogOffset(*self.header.id, offset), handed)

    def _read(self, *, is_fresh: bool) -> bool:
        """Read and verify on; whether there was something."""
        scanner, start = self._scanner, self._scanner.offset
        shared = self._shared
        if shared is not None and isinstance(scanner, SessionScanner):
            known = shared.get(LogOffset(*self.header.id, start))
            if known is not None:
                scanner.offset, scanner.next = start + len(known.data), known.number_end
                self._held.append(_Piece(start, len(known.data), known.data))
                return True
        piece = self._read_verified(start, is_fresh=is_fresh)
        if piece is None:
            return False
        if self._shared is None and (self._scanner.boundary < start + piece.size or len(self._held)):
            piece = piece._replace(data=None)
        self._held.append(piece)
        if shared is not None and piece.data is not None:
            shared.put(LogOffset(*self.header.id, start), CachedRead(piece.data, self._scanner.next))
        return True

    def _read_verified(self, start: int, *, is_fresh: bool) -> _Piece | None:
        shared = None if is_fresh else self._shared
        left = (self._file.size() if shared is None else shared.size(self.header.id, self._file)) - start
        size = min(left, self.chunk_bytes)
        if self._shared is not None:
            size = min(left, (start + CHUNK_BYTES_MAX) // GRID_BYTES * GRID_BYTES - start)
        self.problem = None
        while size > 0:
            is_large = self._shared is None and size > CHUNK_BYTES_MAX
            with _LARGE if is_large else nullcontext():
                try:
                    data = memoryview(self._file.pread(size, start))
                except Corrupt as error:  # It is known to be: what was read before is good.
                    self.problem = error.what
                    break
                scan = self._scan(data, left)
                if scan.consumed:
                    is_kept = not is_large and scan.consumed <= len(data)
                    return _Piece(start, scan.consumed, data[: scan.consumed] if is_kept else None)
                is_short = len(data) < size
                del data
            if scan.problem is None and size < scan.needed <= left and not is_short:
                size = scan.needed
                continue
            self.problem = scan.problem or "cut short"
            break
        return None

    def _scan(self, data: memoryview, left: int) -> ScanResult:
        """Verify what `data` holds. Of a merged log values are passed, if they are in the `left` bytes."""
        scanner = self._scanner
        if not isinstance(scanner, MergedScanner):
            return scanner.scan(data)
        end = scanner.offset + left
        return scanner.scan_columns(data, lambda offset: offset <= end)


def _scanner_at_offset(disk: Disk, path: str, header: SegmentHeader, file: File, offset: int) -> Scanner:
    """A scanner of the segment at `offset`, found from the last hop before it."""
    frames = [
        entry
        for entry in read_index(disk, path, header)
        if entry.kind is EntryKind.FRAME and entry.offset <= offset
    ]
    scanner = scanner_at(disk, path, header, file, frames[-1].first) if frames else scanner_for(header)
    if scanner.offset > offset:
        scanner = scanner_for(header)
    size = READ_BYTES
    while scanner.offset < offset:
        data = memoryview(file.pread(min(size, offset - scanner.offset), scanner.offset))
        if isinstance(scanner, MergedScanner):
            scan = scanner.scan_columns(data, lambda end: end <= offset)
        else:
            scan = scanner.scan(data, values=False)
        if scan.problem is not None:
            raise Corrupt(
                scan.problem, path=segment_path(path, header.id), offset=scanner.boundary, hint=_RESTORE
            )
        if not scan.consumed:
            if not size < scan.needed <= offset - scanner.offset:
                break
            size = scan.needed
        else:
            size = READ_BYTES
    if scanner.offset != offset or scanner.boundary != offset:
        raise _no_boundary(segment_path(path, header.id), offset)
    return scanner


_RESTORE = "Restore or refetch the file; `rt log verify` lists all damage."


def _no_boundary(path: str, offset: int) -> Diverged:
    return Diverged(
        "the receiver's copy ends where no batch or block ends here",
        where=path,
        got=offset,
        hint="The copies are not of one log: `rt log compare` shows where they part.",
    )

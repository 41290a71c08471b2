"""Reading the messages of a merged log between two positions, once, as one of many who share a log out.

Laws. Every position between the two is handed out once, in order, verified; or an event names it; or an error
says why not. Whoever asks has seen the end: what is not there is trimmed, damaged, or not visible yet:
a shared file system may be slow to show what another host sees, which is waited for. What nobody wants is
passed over without being read. Files are read with pread, never mapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from rt.errors import Damaged, NotALog
from rt.events import BadMessage, SkipForward
from rt.log.batch import BATCH_HEADER_BYTES
from rt.log.catalog import Catalog, Kept, read_catalog, scanner_at, segment_path
from rt.log.columns import MessageBatch, Placed
from rt.log.directory import is_log_directory, read_header, read_identity, scans
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.frames import MergedScanner, Scan, Scanner
from rt.log.interest import EVERYTHING, Interest
from rt.log.layout import padded
from rt.log.range_decoding import decode_range
from rt.log.segment import Kind
from rt.log.selective import SelectiveScanner

WAIT_SECONDS: Final = 10.0
"""How long to wait for what is known to be there: longer than file systems cache sizes and names."""
_LOOK_SECONDS: Final = 0.05
_READ_BYTES: Final = 2**20
"""Read at once where all is wanted: what stays in a core's cache until it was verified and taken."""
_PEEK_BYTES: Final = 16 * 1024
"""Read where most of what follows is passed over: headers and columns of a batch of usual size."""

_RESTORE = "Restore or refetch the file; `rt log verify` lists all damage."

LossHandler = Callable[[SkipForward | BadMessage], None]


class RangeReader:
    """The messages of the merged (or filtered) log at `path` from `start` up to, not including, `end`.

    `on_loss` is told of positions that cannot be had, before what follows them is handed out; it may raise.
    For one thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        start: int,
        end: int,
        *,
        interest: Interest = EVERYTHING,
        on_loss: LossHandler,
        wait_seconds: float = WAIT_SECONDS,
        disk: Disk = REAL,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.position = start
        """The next one to be handed out."""
        self._end = end
        self._interest = interest
        self._on_loss = on_loss
        self._wait_seconds = wait_seconds
        self._disk = disk
        self.read_bytes = 0
        """How many bytes were read of segments."""
        if not is_log_directory(disk, self.path):
            raise NotALog("no log directory", where=self.path, hint="Name a directory with log.X.Y files.")
        with storage_errors(self.path, "opening a log"):
            self.identity = read_identity(disk, self.path)
        if self.identity.kind is Kind.SESSION:
            raise NotALog("the log of one session, not a merged one", where=self.path)

    def batches(self) -> Iterator[MessageBatch]:
        """Messages in columns, as many at a time as are read together."""
        deadline: float | None = None
        after: Kept | None = None
        while self.position < self._end and not self._interest.is_nothing:
            before = self.position
            with storage_errors(self.path, "reading a log"):
                entered = self._enter(after)
            if entered is not None:
                kept, file, scanner = entered
                try:
                    yield from self._segment_batches(kept, file, scanner)
                    with storage_errors(self.path, "reading a log"):
                        is_whole = self._is_whole(kept, file, scanner)
                finally:
                    file.close()
                after = kept if is_whole else None
                if is_whole or self.position > before:
                    deadline = None
                    continue
            deadline = deadline or time.monotonic() + self._wait_seconds
            self._wait(deadline)

    # From segment to segment

    def _enter(self, after: Kept | None) -> tuple[Kept, File, MergedScanner] | None:
        """Open the segment that holds the position, tell of what is missing before it; None: not there yet.

        `after` is the segment that was read to its end.
        """
        catalog = read_catalog(self._disk, self.path)
        kept = catalog.find(self.position) if after is None else catalog.after(after.id)
        if kept is None:
            self._skip_to(catalog, catalog.known_end)
            return None
        if after is None and kept.end is not None and kept.end <= self.position:
            return None  # The one that follows is not to be seen yet.
        if after is not None and self.identity.kind is Kind.FILTERED:
            # What was filtered out behind the last block is not missing, up to the end that was sealed.
            self.position = max(self.position, catalog.sealed_end(after.id))
        self._skip_to(catalog, kept.first)
        if self.position >= self._end:
            return None
        path = segment_path(self.path, kept.id)
        try:
            header = kept.header or read_header(self._disk, self.path, kept.id)
            file = self._disk.open(path)
        except FileNotFoundError:
            return None
        if header is None:
            file.close()
            return None
        if (header.kind, header.origin) != (self.identity.kind, self.identity.origin):
            file.close()
            raise Damaged("segment of another log", path=path, offset=0, got=header.origin.hex())
        try:
            scanner = scanner_at(self._disk, self.path, header, file, self.position)
        except BaseException:
            file.close()
            raise
        assert isinstance(scanner, MergedScanner)
        return kept, file, SelectiveScanner(scanner, self._interest, self.position, self._end)

    def _skip_to(self, catalog: Catalog, first: int) -> None:
        if first > self.position:
            resumed = min(first, self._end)
            lost = SkipForward(self.position, resumed, catalog.trim_reason(self.position).name.lower())
            self.position = resumed
            self._on_loss(lost)

    def _is_whole(self, kept: Kept, file: File, scanner: MergedScanner) -> bool:
        """Whether the segment was read to an end that is its own, and the next one follows."""
        if self.position >= self._end:
            return True
        catalog = read_catalog(self._disk, self.path)
        if file.size() == 0 or not file.is_linked() or kept.id in {one.id for one in catalog.trimmed()}:
            return False  # Trimmed under us: where the position is now, the catalog says.
        later = catalog.after(kept.id)
        return later is not None and scanner.boundary == file.size()

    def _wait(self, deadline: float) -> None:
        """Wait a little for what must be there; in the end raise what the log looks like now."""
        if time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            return
        with storage_errors(self.path, "reading a log"):
            catalog = read_catalog(self._disk, self.path)
            kept = catalog.find(self.position)
            file = None if kept is None else self._disk.open(segment_path(self.path, kept.id))
        if kept is None or file is None:
            self._lose("lost")
            return
        try:
            header = kept.header or read_header(self._disk, self.path, kept.id)
            if header is None:
                self._lose(catalog.trim_reason(self.position).name.lower())
                return
            scanner = scanner_at(self._disk, self.path, header, file, self.position)
            problem = _problem(file, scanner)
        finally:
            file.close()
        if problem is None and catalog.after(kept.id) is None:
            self._lose("lost")
            return
        raise Damaged(
            problem or "the segment ends before its last message",
            path=segment_path(self.path, kept.id),
            offset=scanner.boundary,
            hint=_RESTORE,
        )

    def _lose(self, reason: str) -> None:
        """The log ends before the end that somebody saw."""
        lost = SkipForward(self.position, self._end, reason)
        self.position = self._end
        self._on_loss(lost)

    # In a segment

    def _segment_batches(self, kept: Kept, file: File, scanner: MergedScanner) -> Iterator[MessageBatch]:
        size = _READ_BYTES if self._interest == EVERYTHING else _PEEK_BYTES
        while self.position < self._end:
            start = scanner.offset
            with storage_errors(self.path, "reading a segment"):
                data = file.pread(size, start)
            self.read_bytes += len(data)
            scan = scanner.scan(memoryview(data))
            if not scan.consumed:
                if scan.problem is None and scan.needed > size and len(data) == size:
                    size = scan.needed
                    continue
                return
            if scanner.offset > start + len(data) and scanner.offset > file.size():
                return  # What was passed over is not there.
            yield from self._decoded(kept, data, scan, scanner)
            self.position = max(self.position, min(scanner.reached, self._end))
            size = _next_size(size, start + len(data), scan, scanner)

    def _decoded(self, kept: Kept, data: bytes, scan: Scan, scanner: MergedScanner) -> Iterator[MessageBatch]:
        names = {session_id: found.session for session_id, found in scanner.sessions.items()}
        for batch in decode_range(
            memoryview(data), scan.items, names, self._interest, self.position, self._end
        ):
            if isinstance(batch, MessageBatch):
                yield batch
            else:
                path = segment_path(self.path, kept.id)
                self._on_loss(BadMessage(batch.start, batch.end, path, batch.offset, batch.reason))


def _next_size(size: int, read_end: int, scan: Scan, scanner: MergedScanner) -> int:
    """How much to read next: little where the last read was left early, much where it was used up."""
    if scanner.offset <= read_end + _PEEK_BYTES:
        return min(_READ_BYTES, 2 * size)
    last = scan.items[-1] if scan.items else None
    if not isinstance(last, Placed):
        return _PEEK_BYTES
    return max(_PEEK_BYTES, 2 * (BATCH_HEADER_BYTES + padded(last.header.columns_stored)))


def _problem(file: File, scanner: Scanner) -> str | None:
    """What stops a walk from where `scanner` stands; None if it gets to the end of the file."""
    for scan in scans(file.pread, scanner):
        if scan.problem is not None:
            return scan.problem
    return "the segment ends inside a batch" if scanner.boundary < file.size() else None

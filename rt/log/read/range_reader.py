"""Read the messages of a merged log between two positions, once, as one of many readers that share a log.

Invariants:
- Every position of the range is returned once, in order and verified, or it is named by an event or error.
- A batch that cannot be decoded is reported at its position and affects no other message.

The caller has seen the log end, so missing positions are trimmed, corrupt, or not visible yet: a shared file
system may show writes of another host late, and the reader waits for them. Messages that are not needed are
skipped. Files are read with pread, never mapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from rt.errors import Corrupt, LogNotFound
from rt.events import BadMessage, SkipForward
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.batch import BATCH_HEADER_BYTES, BadBatch
from rt.log.format.constants import padded
from rt.log.format.segment import LogKind
from rt.log.read.open_segment import open_visible, restore_hint
from rt.log.read.projection import EVERYTHING, ProjectingScanner, Projection
from rt.log.scan.batch_decoder import UndecodableBatch, decode_each, decode_runs
from rt.log.scan.batch_group import Bytes
from rt.log.scan.catalog import ReadableSegment, SegmentCatalog, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import check_log_directory, read_frames, read_header, read_identity, scans
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.placed_batches import PlacedBatch, PlacedRun, groups
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult

WAIT_SECONDS: Final = 10.0
"""How long to wait for data that must exist. Longer than file systems cache sizes and names."""
_LOOK_SECONDS: Final = 0.05
_READ_BYTES: Final = 2**20
"""Bytes per read if all is needed: they stay in a core's cache until they are decoded."""
_PEEK_BYTES: Final = 16 * 1024
"""Bytes per read if most is skipped: headers and columns of a batch of usual size."""

LossHandler = Callable[[SkipForward | BadMessage], None]


class RangeReader:
    """The messages of the merged (or filtered) log at `path` from `start` to `end` (exclusive).

    `on_loss` is called for positions that are not available, before later messages. It may raise. For one
    thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        start: int,
        end: int,
        *,
        interest: Projection = EVERYTHING,
        on_loss: LossHandler,
        wait_seconds: float = WAIT_SECONDS,
        disk: Disk = REAL,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.position = start
        """The position of the next message."""
        self._end = end
        self._interest = interest
        self._on_loss = on_loss
        self._wait_seconds = wait_seconds
        self._disk = disk
        self.read_bytes = 0
        """How many bytes of segments were read."""
        check_log_directory(disk, self.path)
        with storage_errors(self.path, "opening a log"):
            self.identity = read_identity(disk, self.path)
        if self.identity.kind is LogKind.SESSION:
            raise LogNotFound("expected a merged log, got the log of one session", where=self.path)

    def batches(self) -> Generator[MessageBatch]:
        """Messages in columns, as many at a time as are read together."""
        deadline: float | None = None
        after: ReadableSegment | None = None
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

    # Between segments

    def _enter(self, after: ReadableSegment | None) -> tuple[ReadableSegment, File, MergedScanner] | None:
        """Open the segment that holds the position, and report gaps before it; None if not visible yet.

        `after` is the segment that was read to its end.
        """
        catalog = read_catalog(self._disk, self.path)
        kept = catalog.find(self.position) if after is None else catalog.after(after.id)
        if kept is None:
            self._skip_to(catalog, catalog.known_end)
            return None
        if after is None and kept.end is not None and kept.end <= self.position:
            return None  # The next segment is not visible yet.
        if after is not None and self.identity.kind is LogKind.FILTERED:
            # The sender's filter left out the positions after the last block, up to the sealed end.
            self.position = max(self.position, catalog.sealed_end(after.id))
        self._skip_to(catalog, kept.first)
        if self.position >= self._end:
            return None
        opened = open_visible(self._disk, self.path, self.identity, kept, self.position)
        if opened is None:
            return None
        assert isinstance(opened.scanner, MergedScanner)
        scanner = ProjectingScanner(opened.scanner, self._interest, self.position, self._end)
        return kept, opened.file, scanner

    def _skip_to(self, catalog: SegmentCatalog, first: int) -> None:
        if first > self.position:
            resumed = min(first, self._end)
            lost = SkipForward(self.position, resumed, catalog.trim_reason(self.position).name.lower())
            self.position = resumed
            self._on_loss(lost)

    def _is_whole(self, kept: ReadableSegment, file: File, scanner: MergedScanner) -> bool:
        """Whether the segment was read to its real end, and the next one follows."""
        if self.position >= self._end:
            return True
        catalog = read_catalog(self._disk, self.path)
        if file.size() == 0 or not file.is_linked() or kept.id in {one.id for one in catalog.trimmed()}:
            return False  # Trimmed meanwhile: the catalog says where to continue.
        later = catalog.after(kept.id)
        return later is not None and scanner.boundary == file.size()

    def _wait(self, deadline: float) -> None:
        """Wait a little for data that must exist. At the deadline, raise the log's current problem."""
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
        raise Corrupt(
            problem or "the segment ends before its last message",
            path=segment_path(self.path, kept.id),
            offset=scanner.boundary,
            hint=restore_hint(self.identity.kind),
        )

    def _lose(self, reason: str) -> None:
        """Report that the log ends before the end that the caller has seen."""
        lost = SkipForward(self.position, self._end, reason)
        self.position = self._end
        self._on_loss(lost)

    # Within a segment

    def _segment_batches(
        self, kept: ReadableSegment, file: File, scanner: MergedScanner
    ) -> Iterator[MessageBatch]:
        def pread(size: int, offset: int) -> bytes:
            with storage_errors(self.path, "reading a segment"):
                data = file.pread(size, offset)
            self.read_bytes += len(data)
            return data

        size = _READ_BYTES if self._interest == EVERYTHING else _PEEK_BYTES
        while self.position < self._end:
            start = scanner.offset
            data, scan = read_frames(pread, scanner, size, reaches=_grows)
            if not scan.consumed:
                return
            if scanner.offset > start + len(data) and scanner.offset > file.size():
                return  # The file ends inside the skipped bytes.
            yield from self._decoded(kept, data, scan, scanner)
            self.position = max(self.position, min(scanner.reached, self._end))
            size = _next_size(max(size, len(data)), start + len(data), scan, scanner)

    def _decoded(
        self, kept: ReadableSegment, data: bytes, scan: ScanResult, scanner: MergedScanner
    ) -> Iterator[MessageBatch]:
        names = {session_id: found.session for session_id, found in scanner.sessions.items()}
        for batch in decode_range(
            memoryview(data), scan.items, names, self._interest, self.position, self._end
        ):
            if isinstance(batch, MessageBatch):
                yield batch
            else:
                path = segment_path(self.path, kept.id)
                self._on_loss(BadMessage(batch.start, batch.end, path, batch.offset, batch.reason))


def _grows(_: int) -> bool:
    """Return True: a read always grows for a larger frame, without a check of the file's size."""
    return True


def _next_size(size: int, read_end: int, scan: ScanResult, scanner: MergedScanner) -> int:
    """Bytes of the next read: few if the last read was left early, many if it was used completely."""
    if scanner.offset <= read_end + _PEEK_BYTES:
        return min(_READ_BYTES, 2 * size)
    last = scan.items[-1] if scan.items else None
    if not isinstance(last, PlacedBatch):
        return _PEEK_BYTES
    return max(_PEEK_BYTES, 2 * (BATCH_HEADER_BYTES + padded(last.header.columns_stored)))


def _problem(file: File, scanner: Scanner) -> str | None:
    """The problem that stops a scan from `scanner` on; None if the scan reaches the end of the file."""
    for scan in scans(file.pread, scanner):
        if scan.problem is not None:
            return scan.problem
    return "the segment ends inside a batch" if scanner.boundary < file.size() else None


def decode_range(
    data: memoryview,
    items: Sequence[PlacedBatch | PlacedRun],
    names: dict[int, str],
    interest: Projection,
    start: int,
    end: int,
) -> Iterator[MessageBatch | UndecodableBatch]:
    """The messages of `items`, which are in `data`, from position `start` to `end` (exclusive).

    `names` are the sessions by id. Sessions and timestamps are filtered by whole batches, before this call;
    topics are filtered here, by message.
    """
    for each in _decoded(np.frombuffer(data, np.uint8), items, names, interest.values, start, end):
        if isinstance(each, UndecodableBatch):
            yield each._replace(start=max(each.start, start), end=min(each.end, end))
        elif (part := _part(each, interest, start, end)) is not None:
            yield part


def _decoded(
    buffer: Bytes,
    items: Sequence[PlacedBatch | PlacedRun],
    names: dict[int, str],
    values: bool,
    start: int,
    end: int,
) -> Iterator[MessageBatch | UndecodableBatch]:
    for kind, same in groupby(items, type):
        batches: list[Any] = list(same)
        if kind is PlacedRun:
            runs = [part for run in batches if (part := run.between(start, end)) is not None]
            try:
                batch = decode_runs(buffer, runs, names, values=values) if runs else None
            except BadBatch:
                batches = [placed for run in runs for placed in run.placed(buffer.data)]
            else:
                if batch is not None:
                    yield batch
                continue
        needed = [
            placed
            for placed in batches
            if placed.first_position < end and placed.first_position + placed.header.message_count > start
        ]
        for group in groups(needed):
            yield from decode_each(buffer, group, names, values=values)


def _part(batch: MessageBatch, interest: Projection, start: int, end: int) -> MessageBatch | None:
    if batch.positions[0] < start or batch.end > end:
        batch = batch.slice(*np.searchsorted(batch.positions, [start, end]).tolist())
    if not len(batch):
        return None
    return batch if interest.topics is None else batch.with_topics(interest.topics)

"""Follows a log directory and returns the items that a receiver is missing, in log order.

Invariants:
- Items continue the earlier ones without gap or repeat, whatever the writer does: rolls, trims, crashes,
  restarts.
- The sender waits for bytes that do not verify yet. `rt.Corrupt` is raised if bytes that were known to be
  good no longer verify.
- A run is announced before its first bytes, and a segment is sealed after its last bytes.
- In a merged log a trim is announced before the first item that follows it.

No network, no threads, no clock: an event loop asks for `items` when the directory changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    WHOLE_RUNS_MAX,
    Chunk,
    Item,
    LogOffset,
    LogTrimmed,
    Run,
    SegmentSealed,
)
from replicator.send.read_cache import ReadCache
from replicator.send.segment_reader import RESTORE_HINT, SegmentReader
from replicator.send.source_view import SourceView
from rt.errors import Corrupt, Diverged, RtError
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, SealedSegment, TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import durable_offset

ITEMS_MAX: Final = 4 * WHOLE_RUNS_MAX
"""About the largest number of items that one call returns: it must not block an event loop for long."""


class Sender:
    """The items of the log in `path` from `start` on; None: from the oldest segment that is kept.

    `start` is where the receiver's whole batches or blocks end. If the log has not grown to `start` yet,
    nothing is returned. If `start` was trimmed, the oldest bytes that are kept come next, and the receiver
    decides about them. `rt.Diverged` if `start` is inside a batch or block. Senders of one session directory
    may share their reads. For one thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        start: LogOffset | None,
        *,
        disk: Disk = REAL,
        shared: ReadCache | None = None,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._disk = disk
        self._shared = shared
        self._reader: SegmentReader | None = None
        self._resume_at = start or LogOffset(0, 0, 0)
        """If there is no reader: where the next one starts, unless it starts in a later segment."""
        self._sealed: SegmentSealed | None = None  # The seal that was returned last.
        self._chunk_bytes = CHUNK_BYTES_MAX
        self._run_number: int | None = None
        self._trimmed: LogTrimmed | None = None
        with storage_errors(self.path, "opening a log to send it"):
            self._view = SourceView(disk, self.path, shared)

    @property
    def identity(self) -> LogIdentity:
        return self._view.identity

    @property
    def next_offset(self) -> LogOffset:
        """Where the next chunk begins, unless its segment ends there."""
        return self._reader.next_offset if self._reader else self._resume_at

    def is_recent(self, bytes_max: int, read_bytes: int) -> bool:
        """Whether the next bytes to send are among the last `bytes_max` bytes of the segment that is being
        written, and the next `read_bytes` are in memory.
        """
        reader = self._reader
        if reader is None or self._view.sealed(reader.header.id) is not None:
            return False
        with storage_errors(self.path, "reading a log to send it"):
            return reader.is_near_end(bytes_max, read_bytes)

    @property
    def is_inside_frame(self) -> bool:
        """Whether the last chunk ended inside a batch or block: the next ones complete it."""
        return self._reader is not None and self._reader.is_inside_frame

    def items(self, bytes_max: int = CHUNK_BYTES_MAX, *, chunk_bytes: int = CHUNK_BYTES_MAX) -> list[Item]:
        """The items that are available now, until their chunks hold `bytes_max` bytes, or up to a chunk more.

        No chunk is larger than `chunk_bytes`. If there are many small segments, about `ITEMS_MAX` items are
        returned.

        Blocks only for the disk. `rt.Corrupt`, `rt.Diverged`, `rt.LogNotFound`, storage errors. Earlier items
        stay good, and the items before the fault are returned before it is raised.
        """
        found: list[Item] = []
        self._chunk_bytes = chunk_bytes
        try:
            with storage_errors(self.path, "reading a log to send it"):
                self._collect(found, bytes_max)
        except RtError:
            if not found:
                raise
            # The next call raises it again.
        return found

    def close(self) -> None:
        if self._reader:
            self._reader.close()
            self._reader = None

    def _collect(self, found: list[Item], left: int) -> None:
        while left > 0 and len(found) < ITEMS_MAX:
            chunks: list[Chunk] = []
            if self._reader:
                self._reader.chunk_bytes = self._chunk_bytes
                chunks = self._reader.read_chunks(left)
            found += chunks
            left -= sum(len(chunk.data) for chunk in chunks)
            if left > 0 and not self._advance(found):
                break

    def _advance(self, found: list[Item]) -> bool:
        """Find what comes next, because the open segment has no more bytes. False if nothing comes next
        now.
        """
        self._poll(found)
        if self._reader is None:
            return self._open_next(found)
        return self._at_end(self._reader, found)

    def _poll(self, found: list[Item], *, is_fresh: bool = False) -> bool:
        """Return whether the table changed. If it shows trims of a merged log, they are emitted at once."""
        if not self._view.poll(is_fresh=is_fresh):
            return False
        if self.identity.kind is not LogKind.SESSION:
            trimmed = self._view.trimmed()
            if trimmed is not None and (self._trimmed is None or trimmed.before > self._trimmed.before):
                self._trimmed = trimmed
                found.append(trimmed)
        return True

    # From segment to segment

    def _open_next(self, found: list[Item]) -> bool:
        """Open the segment of `_resume_at`, or the next one after it. False if there is none yet."""
        entry = self._view.sealed(self._resume_at.segment)
        if entry is not None and self._is_past_end(entry):
            self._emit_run(entry.id.run, entry.run_id, found)
            self._emit_sealed(entry, found)
            return True
        segment = self._view.at_or_after(self._resume_at.segment)
        if segment is None:
            return False
        offset = self._resume_at.offset if segment == self._resume_at.segment else 0
        try:
            reader = SegmentReader.open(
                self._disk, self.path, segment, self.identity, offset=offset, cache=self._shared
            )
        except FileNotFoundError as error:
            return self._check_missing(segment, found, error)
        if reader is None:
            return False
        self._emit_last_of_run(segment, found)
        self._emit_run(segment.run, reader.header.run_id, found)
        self._reader = reader
        return True

    def _is_past_end(self, entry: SealedSegment) -> bool:
        """Whether `_resume_at` is the end of a sealed segment, or after it.

        A receiver has more bytes than this host if the host lost power: these bytes stay good.
        """
        if self._resume_at.offset <= entry.size_bytes:
            return entry.is_trimmed and self._resume_at.offset == entry.size_bytes > 0
        if self.identity.kind is not LogKind.SESSION:
            raise Diverged(
                "the receiver has more bytes of a sealed segment than this log",
                where=segment_path(self.path, entry.id),
                got=self._resume_at.offset,
                expected=entry.size_bytes,
            )
        return entry.reason is not TrimReason.LOST  # The end and the run id of a lost entry are unknown.

    def _at_end(self, reader: SegmentReader, found: list[Item]) -> bool:
        """Handle the end of a segment: seal it, wait for more (False), or raise if it must be longer."""
        entry = self._view.sealed(reader.header.id)
        durable = 0
        if entry is None and reader.problem is not None:
            durable = durable_offset(self._disk, self.path, reader.header.id, self.identity.origin)
        may_have_more = entry is not None or reader.problem is not None
        if may_have_more and (more := reader.read_chunks(1, is_fresh=True)):
            found += more
            return True
        end = durable if entry is None else entry.size_bytes
        is_trimmed = entry is not None and entry.is_trimmed
        if reader.is_deleted or (is_trimmed and reader.next_offset.offset < end):
            self._reader = None
            self._resume_at = reader.next_offset
            reader.close()
            return self._check_missing(reader.header.id, found)
        if reader.next_offset.offset < end:
            raise Corrupt(
                reader.problem or "the segment ends inside a batch",
                path=reader.path,
                offset=reader.next_offset.offset,
                hint=RESTORE_HINT,
            )
        if entry is None:
            return False
        self._reader = None
        reader.close()
        self._emit_sealed(entry, found)
        return True

    def _emit_sealed(self, entry: SealedSegment, found: list[Item]) -> None:
        """Append the seal of a segment that was returned whole, and continue after it."""
        run, roll = entry.id
        later = self._view.at_or_after(SegmentId(run, roll + 1))
        self._sealed = SegmentSealed(
            LogOffset(run, roll, entry.size_bytes),
            entry.end,
            later is not None and later.run > run,
            entry.sealed_ns,
        )
        found.append(self._sealed)
        self._resume_at = LogOffset(run, roll + 1, 0)

    def _emit_last_of_run(self, segment: SegmentId, found: list[Item]) -> None:
        """Repeat a seal once it is known that its segment is the last of its run."""
        sealed = self._sealed
        if sealed is not None and not sealed.is_last_of_run and segment.run > sealed.end_offset.run:
            self._sealed = replace(sealed, is_last_of_run=True)
            found.append(self._sealed)

    def _emit_run(self, run: int, run_id: bytes, found: list[Item]) -> None:
        if self.identity.kind is LogKind.SESSION and run != self._run_number:
            self._run_number = run
            found.append(Run(run, run_id))

    def _check_missing(self, segment: SegmentId, found: list[Item], error: OSError | None = None) -> bool:
        """A segment is missing: `rt.Corrupt` unless the table now says that it was trimmed."""
        if self._poll(found, is_fresh=True) or self._view.is_trimmed(segment):
            return True
        raise Corrupt(
            "a segment that was not trimmed is missing",
            path=segment_path(self.path, segment),
            offset=0,
            hint=RESTORE_HINT,
        ) from error


def carried_bytes(items: Iterable[Item]) -> int:
    """The bytes of the log that these items carry."""
    return sum(len(item.data) for item in items if isinstance(item, Chunk))

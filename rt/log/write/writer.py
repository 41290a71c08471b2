"""Write a log directory: append, sync, roll, trim, and recover when it is opened.

Invariants:
- A directory has one writer, which holds its lock.
- All segments except the newest are completely durable: a roll syncs the segment and its table entry before
  the next one appears.
- What recovery accepted is synced before anything is appended.
- If a write does not fit on the disk, only its complete frames stay.
- After a failed sync or an interrupted call the writer is unusable and raises.

The writer has no threads. It is not thread-safe, except that `sync_to` may run in one thread while `append`
runs in another. The caller must not run `roll`, `seal`, `trim`, `start` or `close` at the same time as these.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from rt.log.disk import REAL, Disk, File, Lock, storage_errors
from rt.log.format.constants import Buffer
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    encode_segment_header,
)
from rt.log.format.segment_table import LogIdentity, SealedSegment, SegmentTable, TrimReason
from rt.log.scan.directory import LOCK_FILE
from rt.log.scan.placed_batches import TimeRange
from rt.log.scan.scanner import Scanner, scanner_for
from rt.log.whole_files import open_whole, write_new_files
from rt.log.write.active_segment import ActiveSegment, DurableFile, resume_segment, sealed_entry
from rt.log.write.directory_recovery import DirectoryRecovery, RecoveredDirectory
from rt.log.write.failure_latch import FailureLatch
from rt.log.write.sealed_segments import SealedSegments
from rt.log.write.vectored_io import CopyRange, Piece, Scratch, check_sources, size_of, write_pieces

__all__ = ["BatchFrames", "CopyRange", "LogWriter", "SyncPoint", "WholeSegment"]


class BatchFrames(NamedTuple):
    """A group of complete frames to append: its buffers, the log end after it, the times of its messages.

    A piece is a buffer, or a range of another open file, which must stay open during the call. A declaration
    has no messages, and its times do not count.
    """

    pieces: Sequence[Piece]
    end: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    is_declaration: bool = False


class WholeSegment(NamedTuple):
    """All of a segment, header included; the log end after it, and the time range of its messages."""

    header: SegmentHeader
    content: Buffer
    end: int
    times_ns: tuple[int, int]


class SyncPoint(Struct, frozen=True):
    """What a sync covers: everything appended before it was created."""

    file: File
    id: SegmentId
    offset: int
    end: int


class LogWriter:
    """The only writer of a log directory. Create it with `LogWriter.open`."""

    def __init__(self, path: str, disk: Disk, clock: Callable[[], int]) -> None:
        self.path = path
        self.recovered: RecoveredDirectory
        self._disk = disk
        self._clock = clock
        self._scratch = Scratch()
        self._latch = FailureLatch(path)
        with storage_errors(path, "locking a log directory"):
            self._lock: Lock = disk.lock(os.path.join(path, LOCK_FILE))
        self._active: ActiveSegment | None = None
        self._sealed: SealedSegments
        self._durable: DurableFile | None = None

    @classmethod
    def open(
        cls,
        path: str,
        identity: LogIdentity,
        *,
        resume: bool = False,
        trimmed_elsewhere: Sequence[SealedSegment] = (),
        needed_from: SegmentId | None = None,
        scanner_for: Callable[[SegmentHeader], Scanner] = scanner_for,
        disk: Disk = REAL,
        clock: Callable[[], int] = time.time_ns,
    ) -> LogWriter:
        """Lock the directory (created if missing), recover it, and sync what recovery accepted.

        `identity.origin` is used for a new directory only. An existing directory keeps its own origin, and
        must have the same kind, name and dedup id. All segments are sealed afterwards.

        With `resume`, for copies and merged logs, the newest segment stays active if it was not sealed, and
        is completely durable. Then the origin must match too (else `rt.ClusterMismatch`). The segment is
        scanned by the scanner that `scanner_for` makes of its header. `recovered.resumed` has the state of
        that scanner (running checksum, marks, sessions, last block), valid at its `boundary`, where the
        segment was cut. `scanner_for` is called for no other segment. Segments in `trimmed_elsewhere` that
        the directory has are trimmed, even if they are corrupt. An incomplete sealed segment before
        `needed_from` is no error: then all segments before `needed_from` are trimmed.

        Raises `rt.DirectoryLocked`, `rt.InvalidName`, `rt.Corrupt`, `rt.UnknownVersion`, storage errors.
        """
        with storage_errors(path, "opening a log directory"):
            disk.make_directory(path)
        writer = cls(os.path.abspath(path), disk, clock)
        try:
            with storage_errors(path, "recovering a log directory"):
                recovery = DirectoryRecovery(
                    disk, writer.path, identity, clock, resume_with=scanner_for if resume else None
                )
                recovery.mark_trimmed(trimmed_elsewhere)
                if needed_from is not None:
                    recovery.release_before(needed_from)
                writer._adopt(recovery.run())
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def table(self) -> SegmentTable:
        return self._sealed.table

    @property
    def identity(self) -> LogIdentity:
        return self.table.identity

    @property
    def active(self) -> SegmentHeader | None:
        """The header of the active segment; None if there is none."""
        return self._active.header if self._active else None

    @property
    def end(self) -> int:
        """One past the last number or position in the log."""
        if self._active:
            return self._active.end
        return self.table.segments[-1].end if self.table.segments else 0

    @property
    def offset(self) -> int:
        """Where the next append starts in the active segment."""
        return self._growing().size_bytes

    @property
    def is_sealed(self) -> bool:
        """Whether the active segment is already sealed: a roll sealed it, then the disk was full."""
        sealed = self.table.segments
        return self._active is not None and bool(sealed) and sealed[-1].id == self._active.header.id

    @property
    def last_id(self) -> SegmentId | None:
        """The newest segment that the directory ever had, as far as its table remembers."""
        if self._active:
            return self._active.header.id
        return self.table.segments[-1].id if self.table.segments else None

    def start(
        self,
        segment: SegmentId,
        *,
        first: int,
        run_id: bytes = bytes(8),
        created_ns: int | None = None,
        header_bytes: bytes | None = None,
    ) -> None:
        """Seal the active segment, if any, and start `segment`. Durable on return.

        With `header_bytes`, which the caller has checked, the segment starts with exactly these bytes, as a
        copy must; `run_id` and creation time come from them. May be called again after `rt.DiskFull`:
        completed steps are not repeated.
        """
        self._latch.check()
        last = self.last_id
        assert last is None or segment > last, (segment, last)
        with self._latch.guarded(segment.file_name, "starting a segment"):
            if self._active:
                self._seal(self._active)
            path = os.path.join(self.path, segment.file_name)
            created = self._clock() if created_ns is None else created_ns
            header = SegmentHeader(self.identity.kind, segment, first, created, self.identity.origin, run_id)
            if header_bytes is not None:
                copied = decode_segment_header(header_bytes, path=path)
                expected = replace(header, run_id=copied.run_id, created_ns=copied.created_ns)
                assert copied == expected, (copied, expected)
                header = copied
            file = open_whole(self._disk, path, header_bytes or encode_segment_header(header))
            if self._active:
                self._active.release()
            self._active = ActiveSegment(header, file, SEGMENT_HEADER_BYTES, first)

    def add_whole(self, segments: Sequence[WholeSegment]) -> None:
        """Add segments that are whole and sealed, in their order, while none is active. Durable on return.

        The caller has checked their bytes. After `rt.DiskFull` none of them is there.
        """
        self._latch.check()
        assert self._active is None
        last = self.last_id
        sealed: list[SealedSegment] = []
        for segment in segments:
            header = segment.header
            assert last is None or header.id > last, (header.id, last)
            last = header.id
            times = TimeRange(*segment.times_ns, is_empty=False)
            sealed.append(sealed_entry(header, segment.end, len(segment.content), times, self._clock()))
        names = [segment.header.id.file_name for segment in segments]
        contents = [bytes(segment.content) for segment in segments]
        with self._latch.guarded(names[0], "adding whole segments"):
            if not self._lock.is_linked():
                raise FileNotFoundError(errno.ENOENT, "the lock was removed under its writer")
            write_new_files(self._disk, self.path, list(zip(names, contents, strict=True)))
            self._sealed.add_whole(sealed)

    def roll(self) -> None:
        """Seal the active segment and start the next one of the same run."""
        header = self._growing().header
        self.start(SegmentId(header.id.run, header.id.roll + 1), first=self.end, run_id=header.run_id)

    def seal(self) -> None:
        """Seal the active segment. Durable on return; `active` is None until `start`.

        May be called again after `rt.DiskFull`. Does nothing if no segment is active.
        """
        self._latch.check()
        if self._active is None:
            return
        with self._latch.guarded(self._active.header.id.file_name, "sealing a segment"):
            self._seal(self._active)
            self._active.release()
            self._active = None

    def complete_to(self, end: int) -> None:
        """Record that all messages below `end` that pass the filter are here. Durable with the next sync."""
        assert self.identity.kind is LogKind.FILTERED, self.identity
        assert not self.is_sealed
        active = self._growing()
        active.end = max(active.end, end)

    def append(self, frames: Sequence[BatchFrames]) -> None:
        """Write groups of complete frames, one after the other, at `offset`.

        One system call if all pieces are buffers. Raises `rt.Corrupt` if a source file ends before its range;
        then nothing is written. Raises `rt.Corrupt` if a range does not verify; then the groups before it are
        written. After `rt.DiskFull` the groups that fit stay, because a reader may have read them, and `end`
        is the end of these groups. The others are removed completely and may be retried.
        """
        self._latch.check()
        active = self._growing()
        assert not self.is_sealed, f"{active.header.id} is sealed: roll first"
        with self._latch.guarded(active.header.id.file_name, "writing a batch"):
            sizes = [sum(map(size_of, group.pieces)) for group in frames]
            pieces = [piece for group in frames for piece in group.pieces]
            check_sources(pieces)
            written, error = write_pieces(active.file, pieces, active.size_bytes, self._scratch)
            for group, size in zip(frames, sizes, strict=True):
                if written < size:
                    break
                written -= size
                active.add_to_index(self._disk, self.path, size, is_declaration=group.is_declaration)
                if not group.is_declaration:
                    active.times.widen(group.timestamp_low_ns, group.timestamp_high_ns)
                active.size_bytes += size
                active.end = group.end
            if error is not None:
                active.file.truncate(active.size_bytes)
                raise error

    def sync_point(self) -> SyncPoint:
        """Everything appended so far, for `sync_to`."""
        active = self._growing()
        return SyncPoint(active.file, active.header.id, active.size_bytes, active.end)

    def sync_to(self, point: SyncPoint) -> None:
        """Return when everything up to `point` is on the medium, and the durable end is recorded.

        Raises `rt.StorageFailed` if the sync fails, now and on every later call: it is never retried.
        """
        self._latch.check()
        try:
            if not (point.file.is_linked() and self._lock.is_linked()):
                raise FileNotFoundError(
                    errno.ENOENT, "the segment, or the lock, was removed under its writer"
                )
            point.file.sync()
        except OSError as error:
            raise self._latch.failed(error, point.id.file_name, "syncing a segment", is_final=True) from error
        assert self._durable is not None
        self._durable.record(point.id, point.offset, point.end, self.identity.origin)

    def sync(self) -> None:
        self.sync_to(self.sync_point())

    def uncacheable_bytes(self, before: int) -> int:
        """How many bytes `uncache(before)` would drop."""
        return 0 if self._active is None else self._active.uncacheable_bytes(before)

    def uncache(self, before: int) -> None:
        """Drop synced bytes of the active segment before offset `before` from the page cache.

        Call it if they are not expected to be read. A later read gets them from the medium.
        """
        if self._active is not None:
            self._active.uncache(before)

    def trim(self, before: SegmentId, reason: TrimReason) -> Sequence[SealedSegment]:
        """Trim every sealed segment before `before`, oldest first; returns those that were trimmed now.

        The table records it durably before any byte is deleted. The active segment is never trimmed.
        """
        why = (reason, self._clock())
        return self.trim_each({segment.id: why for segment in self.table.segments if segment.id < before})

    def trim_each(self, reasons: Mapping[SegmentId, tuple[TrimReason, int]]) -> Sequence[SealedSegment]:
        """Trim these sealed segments as `trim` does, each with its reason and time (ns).

        They must be the oldest ones. May be called again after `rt.DiskFull`.
        """
        self._latch.check()
        return self._sealed.trim(reasons)

    @property
    def pending_trims(self) -> Sequence[SegmentId]:
        """Trimmed segments whose files could not be removed yet: call `trim_each` with them again."""
        return self._sealed.pending_trims

    def close(self) -> None:
        if self._active:
            self._active.release()
            self._active = None
        if self._durable:
            self._durable.close()
        self._lock.close()

    def check_usable(self) -> None:
        """Raise the failure that made the writer unusable, if any."""
        self._latch.check()

    def _adopt(self, recovered: RecoveredDirectory) -> None:
        self._sealed = SealedSegments(self._disk, self.path, recovered.table, self._latch)
        self.recovered = recovered
        self._durable = DurableFile(self._disk, self.path, recovered.durable_sequence)
        if recovered.resumed is not None:
            self._active = resume_segment(self._disk, self.path, recovered.resumed, recovered.end)
            point = self.sync_point()
            self._durable.record(point.id, point.offset, point.end, self.identity.origin)

    def _seal(self, active: ActiveSegment) -> None:
        """Sync the active segment and list it as sealed, once."""
        if self.is_sealed:
            return
        self.sync_to(SyncPoint(active.file, active.header.id, active.size_bytes, active.end))
        self._sealed.add(active.sealed(self._clock()))

    def _growing(self) -> ActiveSegment:
        assert self._active is not None, "no active segment: call start first"
        return self._active

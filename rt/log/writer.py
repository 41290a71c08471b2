"""Writing a log directory: append, sync, roll, trim, and recovery when it is opened.

Laws. There is one writer a directory, by lock. A segment that is not the newest is durable whole: rolling
syncs it and its table entry before the next one appears. What recovery accepted is synced before anything is
added. Of a write that does not fit, whole frames stay and nothing else; after a failed sync, or a call that
was broken off, the writer is dead and says so.

The writer has no threads. It is not thread-safe, but `sync_to` may run in one thread while `append` runs in
another; the caller keeps `roll`, `seal`, `trim`, `start` and `close` apart from both.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rt.errors import DiskFull, RtError, StorageError, StorageFailed
from rt.log.active import ActiveSegment, resume_segment
from rt.log.copying import CopyRange, Piece, check_sources, size_of, write_pieces
from rt.log.directory import LOCK_FILE
from rt.log.disk import REAL, Disk, File, Lock, storage_error, storage_errors, write_whole
from rt.log.durable import DURABLE_FILE, RECORD_BYTES, DurableEnd, encode_durable_end, record_place
from rt.log.frames import Scanner, scanner_for
from rt.log.index import index_file_name
from rt.log.opening import Recovered, empty_segments, recover_directory, remove_segments
from rt.log.segment import (
    SEGMENT_HEADER_BYTES,
    Kind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    encode_segment_header,
)
from rt.log.table import TABLE_FILE, Identity, SealedSegment, Table, TrimReason, encode_table

__all__ = ["CopyRange", "Frames", "LogWriter", "SyncPoint"]


class Frames(NamedTuple):
    """A run of whole frames to append: its pieces, the log's end behind it, the times of its messages.

    A piece is a buffer, or a range of another open file, which must stay open for the call. A declaration
    holds no messages, and its times do not count.
    """

    pieces: Sequence[Piece]
    end: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    is_declaration: bool = False


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """How far a sync reaches: what was appended when it was taken."""

    file: File = field(repr=False)
    id: SegmentId
    offset: int
    end: int


class LogWriter:
    """The one writer of a log directory. Make it with `LogWriter.open`."""

    def __init__(self, path: str, disk: Disk, clock: Callable[[], int]) -> None:
        self.path = path
        self.table: Table
        self.recovered: Recovered
        self._disk = disk
        self._clock = clock
        self._lock: Lock = self._take_lock()
        self._active: ActiveSegment | None = None
        self._durable_file: File | None = None
        self._durable_sequence = 0
        self._to_empty: list[SegmentId] = []
        """Trimmed by the table, and about to be emptied."""
        self._to_remove: list[SegmentId] = []
        """Forgotten by the table, and about to be removed."""
        self._failure: StorageFailed | None = None

    @classmethod
    def open(
        cls,
        path: str,
        identity: Identity,
        *,
        resume: bool = False,
        gone: Sequence[SealedSegment] = (),
        scanner_for: Callable[[SegmentHeader], Scanner] = scanner_for,
        disk: Disk = REAL,
        clock: Callable[[], int] = time.time_ns,
    ) -> LogWriter:
        """Lock the directory (made if missing), recover it, and sync what recovery accepted.

        `identity.origin` counts for a new directory only; an old one keeps its own, and must be of the same
        kind, name and dedup id. Every segment is sealed then.

        With `resume`, for copies and merged logs, the newest segment stays active if it was not sealed, and
        all of it is durable; the origin must be that of `identity` as well (`rt.ClusterMismatch`). It is
        walked by the scanner that `scanner_for` makes of its header, so what that scanner carries (chain,
        marks, sessions, last block) is the caller's without a second walk: true at its `boundary`, where the
        segment was cut. `scanner_for` is called for no other segment. What is still here of the segments
        `gone` is trimmed as they are, even if it is damaged.

        `rt.DirectoryLocked`, `rt.InvalidName`, `rt.Damaged`, `rt.UnknownVersion`, storage errors.
        """
        with storage_errors(path, "opening a log directory"):
            disk.make_directory(path)
        writer = cls(os.path.abspath(path), disk, clock)
        try:
            with storage_errors(path, "recovering a log directory"):
                factory = scanner_for if resume else None
                recovered = recover_directory(
                    disk, writer.path, identity, clock, resume_with=factory, gone=gone
                )
                writer._take_over(recovered)
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def identity(self) -> Identity:
        """What the directory is."""
        return self.table.identity

    @property
    def active(self) -> SegmentHeader | None:
        """The header of the segment that grows; None before `start`."""
        return self._active.header if self._active else None

    @property
    def end(self) -> int:
        """One past the last number or position in the log."""
        if self._active:
            return self._active.end
        return self.table.segments[-1].end if self.table.segments else 0

    @property
    def offset(self) -> int:
        """Where the next append goes in the active segment."""
        return self._growing().size_bytes

    @property
    def is_sealed(self) -> bool:
        """Whether the active segment may not grow any more: rolling sealed it, then found the disk full."""
        sealed = self.table.segments
        return self._active is not None and bool(sealed) and sealed[-1].id == self._active.header.id

    @property
    def last_id(self) -> SegmentId | None:
        """The newest segment the directory ever had, as far as it remembers."""
        if self._active:
            return self._active.header.id
        return self.table.segments[-1].id if self.table.segments else None

    def start(
        self,
        segment: SegmentId,
        *,
        first: int,
        life: bytes = bytes(8),
        created_ns: int | None = None,
        header_bytes: bytes | None = None,
    ) -> None:
        """Seal the active segment, if there is one, and begin `segment`; durable on return.

        With `header_bytes`, which the caller has checked, it begins with these very bytes, as a copy must;
        life and creation time are theirs. May be called again after `rt.DiskFull`: what was done is not done
        twice.
        """
        self.check_usable()
        last = self.last_id
        assert last is None or segment > last, (segment, last)
        with self._guarded(segment.file_name, "starting a segment"):
            if self._active:
                self._seal(self._active)
            path = os.path.join(self.path, segment.file_name)
            created = self._clock() if created_ns is None else created_ns
            header = SegmentHeader(self.identity.kind, segment, first, created, self.identity.origin, life)
            if header_bytes is not None:
                copied = decode_segment_header(header_bytes, path=path)
                said = replace(header, life=copied.life, created_ns=copied.created_ns)
                assert copied == said, (copied, said)
                header = copied
            write_whole(self._disk, path, header_bytes or encode_segment_header(header))
            file = self._disk.open(path, write=True)
            if self._active:
                self._active.release()
            self._active = ActiveSegment(header, file, SEGMENT_HEADER_BYTES, first)

    def roll(self) -> None:
        """Seal the active segment and go on in the next one of the same X."""
        header = self._growing().header
        self.start(SegmentId(header.id.x, header.id.y + 1), first=self.end, life=header.life)

    def seal(self) -> None:
        """Seal the active segment and begin none: durable on return, and `active` is None until `start`.

        May be called again after `rt.DiskFull`; nothing is done where no segment is active.
        """
        self.check_usable()
        if self._active is None:
            return
        with self._guarded(self._active.header.id.file_name, "sealing a segment"):
            self._seal(self._active)
            self._active.release()
            self._active = None

    def complete_to(self, end: int) -> None:
        """Say that all a filter lets through below `end` is here; durable with the next sync."""
        assert self.identity.kind is Kind.FILTERED, self.identity
        assert not self.is_sealed
        active = self._growing()
        active.end = max(active.end, end)

    def append(self, frames: Sequence[Frames]) -> None:
        """Write runs of whole frames, one behind the other, at `offset`.

        It is one system call where all pieces are buffers. `rt.Damaged`, with nothing written, if a file to
        copy from ends before its range. On `rt.DiskFull` the runs that did fit stay, for a reader may have
        them already: `end` says which. No part of the others is left, and they may be tried again.
        """
        self.check_usable()
        active = self._growing()
        assert not self.is_sealed, f"{active.header.id} is sealed: roll first"
        with self._guarded(active.header.id.file_name, "writing a batch"):
            sizes = [sum(map(size_of, run.pieces)) for run in frames]
            pieces = [piece for run in frames for piece in run.pieces]
            check_sources(pieces)
            written, error = write_pieces(active.file, pieces, active.size_bytes)
            for run, size in zip(frames, sizes, strict=True):
                if written < size:
                    break
                written -= size
                active.add_to_index(self._disk, self.path, size, is_declaration=run.is_declaration)
                if not run.is_declaration:
                    active.see(run.timestamp_low_ns, run.timestamp_high_ns)
                active.size_bytes += size
                active.end = run.end
            if error is not None:
                active.file.truncate(active.size_bytes)
                raise error

    def sync_point(self) -> SyncPoint:
        """All that is appended now; hand it to `sync_to`."""
        active = self._growing()
        return SyncPoint(active.file, active.header.id, active.size_bytes, active.end)

    def sync_to(self, point: SyncPoint) -> None:
        """Return when everything up to `point` is on the medium, and the durable end is recorded.

        `rt.StorageFailed` if the sync fails, now and for every later call: it is never tried again.
        """
        self.check_usable()
        try:
            if not (point.file.is_linked() and self._lock.is_linked()):
                raise FileNotFoundError(
                    errno.ENOENT, "the segment, or the lock, was removed under its writer"
                )
            point.file.sync()
        except OSError as error:
            raise self._failed(error, point.id.file_name, "syncing a segment", is_final=True) from error
        self._record(point)

    def sync(self) -> None:
        """Sync all that is appended."""
        self.sync_to(self.sync_point())

    def uncached_with(self, before: int) -> int:
        """How many bytes `uncache(before)` gives up; 0 or less: none yet."""
        return 0 if self._active is None else self._active.uncached_with(before)

    def uncache(self, before: int) -> None:
        """Nobody is expected to read on in the active segment before the offset `before`, which is synced.

        So its pages make room for those of logs that are read. Who reads it all the same reads the medium.
        """
        if self._active is not None:
            self._active.uncache(before)

    def trim(self, before: SegmentId, reason: TrimReason) -> Sequence[SealedSegment]:
        """Trim every sealed segment that precedes `before`, oldest first; the ones that were trimmed now.

        The table says so, durably, before a byte goes. The active segment is never trimmed.
        """
        why = (reason, self._clock())
        return self.trim_each({segment.id: why for segment in self.table.segments if segment.id < before})

    def trim_each(self, gone: Mapping[SegmentId, tuple[TrimReason, int]]) -> Sequence[SealedSegment]:
        """Trim these sealed segments as `trim` does, each for its reason and at its time, in ns.

        They are the oldest ones. May be called again after `rt.DiskFull`.
        """
        self.check_usable()
        trimmed = [
            segment for segment in self.table.segments if segment.id in gone and not segment.is_trimmed
        ]
        if trimmed:
            table, forgotten = Table(
                self.identity,
                tuple(
                    segment
                    if segment.is_trimmed or segment.id not in gone
                    else segment.trimmed(*gone[segment.id])
                    for segment in self.table.segments
                ),
            ).forgotten()
            try:
                self._write_table(table)
            except DiskFull:
                self._make_room(trimmed)
                self._write_table(table)
            self._to_empty += [segment.id for segment in trimmed]
            self._to_remove += forgotten
        if self._to_empty or self._to_remove:
            with self._guarded("", "trimming segments"):
                empty_segments(self._disk, self.path, self._to_empty)
                remove_segments(self._disk, self.path, self._to_remove)
            self._to_empty, self._to_remove = [], []
        return trimmed

    def close(self) -> None:
        """Release files and lock. Does not sync."""
        if self._active:
            self._active.release()
            self._active = None
        if self._durable_file:
            self._durable_file.close()
        self._lock.close()

    def _take_over(self, recovered: Recovered) -> None:
        self.table = recovered.table
        self.recovered = recovered
        path = os.path.join(self.path, DURABLE_FILE)
        if self._disk.size(path) != 2 * RECORD_BYTES:
            write_whole(self._disk, path, bytes(2 * RECORD_BYTES))
        self._durable_file = self._disk.open(path, write=True)
        self._durable_sequence = recovered.durable_sequence
        if recovered.resumed is not None:
            self._active = resume_segment(self._disk, self.path, recovered.resumed, recovered.end)
            self._record(self.sync_point())

    def _take_lock(self) -> Lock:
        with storage_errors(self.path, "locking a log directory"):
            return self._disk.lock(os.path.join(self.path, LOCK_FILE))

    # Steps

    def _seal(self, active: ActiveSegment) -> None:
        """Sync the active segment and list it as sealed, once."""
        if self.is_sealed:
            return
        self.sync_to(SyncPoint(active.file, active.header.id, active.size_bytes, active.end))
        sealed = SealedSegment(
            active.header.id,
            active.header.first,
            active.end,
            active.size_bytes,
            active.header.created_ns,
            active.timestamp_low_ns,
            active.timestamp_high_ns,
            self._clock(),
            active.header.life,
        )
        self._write_table(self.table.with_sealed(sealed))

    def _make_room(self, trimmed: Sequence[SealedSegment]) -> None:
        """On a full disk even the table that says what is trimmed may not fit: their indexes go first.

        They would go with the segments; who still reads one of these reads it whole instead.
        """
        with self._guarded("", "making room for the segments table"):
            names = set(self._disk.list_directory(self.path))
            for name in {index_file_name(segment.id) for segment in trimmed} & names:
                self._disk.remove(os.path.join(self.path, name))

    def _write_table(self, table: Table) -> None:
        with self._guarded(TABLE_FILE, "writing the segments table"):
            write_whole(self._disk, os.path.join(self.path, TABLE_FILE), encode_table(table))
            self.table = table

    def _record(self, point: SyncPoint) -> None:
        """Note the durable end. It is a lower bound: a write that fails leaves the older one."""
        assert self._durable_file is not None
        sequence = self._durable_sequence + 1
        record = DurableEnd(sequence, point.id, point.offset, point.end, self.identity.origin)
        with contextlib.suppress(OSError):
            self._durable_file.pwritev([encode_durable_end(record)], record_place(sequence))
            self._durable_sequence = sequence

    def _growing(self) -> ActiveSegment:
        assert self._active is not None, "no active segment: call start first"
        return self._active

    # Failure

    def check_usable(self) -> None:
        """Raise why the writer is dead, if it is."""
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _guarded(self, name: str, doing: str) -> Iterator[None]:
        """A full disk may be tried again; any other failure in here, or being broken off, is the end.

        For then memory and disk may say different things: opening the directory again finds out.
        """
        try:
            yield
        except OSError as error:
            raise self._failed(error, name, doing) from error
        except RtError:
            raise
        except BaseException as error:
            self._failure = StorageFailed(
                f"broken off while {doing}",
                where=os.path.join(self.path, name),
                got=type(error).__name__,
                hint="Open it again; what was flushed is safe.",
            )
            raise

    def _failed(self, error: OSError, name: str, doing: str, *, is_final: bool = False) -> StorageError:
        """A full disk may be tried again (unless `is_final`); any other failure is the writer's end."""
        found = storage_error(error, os.path.join(self.path, name), doing)
        if isinstance(found, DiskFull) and not is_final:
            return found
        if not isinstance(found, StorageFailed):
            found = StorageFailed(found.what, where=found.where, got=found.got, hint="Open it again.")
        self._failure = found
        return found

"""Recover a log directory before writing: check what a crash left, cut the torn tail, make the rest durable.

Invariants:
- Sealed segments and bytes below the durable end were synced. If they are missing or do not verify, the log
  is corrupt, and nothing of them is changed.
- Only bytes that no sync covered are cut, and only from the newest segment.
- When recovery returns, what it accepted is on the medium, even if an earlier sync failed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

from rt.errors import ClusterMismatch, Corrupt, InvalidName
from rt.log.disk import Disk
from rt.log.format.durable_end import DURABLE_FILE, DurableEnd
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader, SegmentId
from rt.log.format.segment_table import (
    TABLE_FILE,
    LogIdentity,
    SealedSegment,
    SegmentTable,
    TrimReason,
    encode_table,
)
from rt.log.scan.directory import (
    READ_BYTES,
    identity_from,
    list_segments,
    read_durable_end,
    read_header,
    read_table,
)
from rt.log.scan.recovery_scan import RecoveryScan, walk_segment
from rt.log.scan.scanner import Scanner, scanner_for
from rt.log.whole_files import write_whole
from rt.log.write.active_segment import sealed_entry
from rt.log.write.recovery_checks import TornTail, check_nothing_vanished, check_numbers, judge_tail
from rt.log.write.sealed_segments import empty_segments, remove_segments

logger = logging.getLogger("rt.log")

ScannerFactory: TypeAlias = Callable[[SegmentHeader], Scanner]


class RecoveredDirectory(Struct, frozen=True):
    """A directory after recovery, and the torn tail that was cut, if there was one.

    Every segment is sealed, except the `resumed` one, which is durable up to the end of its scan.
    """

    table: SegmentTable
    durable_sequence: int
    torn: TornTail | None = None
    resumed: RecoveryScan | None = None

    @property
    def end(self) -> int:
        """The next number or position."""
        if self.resumed is not None:
            return self.resumed.end
        return self.table.segments[-1].end if self.table.segments else 0


class DirectoryRecovery:
    """Recovers the directory, which the caller has locked. A new directory gets the identity `expected`.

    If `resume_with` makes scanners, the newest segment stays unsealed and is scanned by one of them. Then the
    directory is a copy or a merged log, and its origin must equal the origin of `expected` (else
    `rt.ClusterMismatch`). `rt.Corrupt` and `rt.UnknownVersion` leave the segments unchanged. Raises `OSError`
    as the disk does.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        expected: LogIdentity,
        clock: Callable[[], int],
        *,
        resume_with: ScannerFactory | None = None,
    ) -> None:
        self.path = path
        self._resume_with = resume_with
        self._resumed: RecoveryScan | None = None
        self._disk = disk
        self._clock = clock
        self._remove_leftovers()
        self.table = self._load_table(expected)
        self.identity = self.table.identity

    def run(self) -> RecoveredDirectory:
        self._finish_trims()
        self._check_listed()
        durable = read_durable_end(self._disk, self.path)
        if durable is not None and durable.origin != self.identity.origin:
            durable = None
        torn = self._seal_unlisted(durable)
        recovered = RecoveredDirectory(self.table, durable.sequence if durable else 0, torn, self._resumed)
        remains = [(segment.id, segment.first, segment.end) for segment in self.table.segments]
        sizes = {segment.id: segment.size_bytes for segment in self.table.segments}
        if self._resumed is not None:
            header = self._resumed.header
            remains.append((header.id, header.first, self._resumed.end))
            sizes[header.id] = self._resumed.end_offset
        is_copy = self._resume_with is not None
        check_numbers(self.path, self.identity, remains, is_copy=is_copy)
        if durable is not None:
            check_nothing_vanished(self.path, self.identity, durable, sizes, recovered.end, is_copy=is_copy)
        return recovered

    def mark_trimmed(self, segments: Sequence[SealedSegment]) -> None:
        """List as trimmed each of `segments` that is listed or exists, even if its bytes are corrupt.

        Call it before `run`.
        """
        here = set(list_segments(self._disk, self.path))
        listed = {segment.id: segment for segment in self.table.segments}
        trimmed = {
            segment.id: segment
            for segment in segments
            if (not listed[segment.id].is_trimmed if segment.id in listed else segment.id in here)
        }
        if trimmed:
            entries = listed | trimmed
            self.table = SegmentTable(
                self.table.identity, tuple(entries[segment] for segment in sorted(entries))
            )
            write_whole(self._disk, os.path.join(self.path, TABLE_FILE), encode_table(self.table))

    def release_before(self, segment: SegmentId) -> None:
        """Trim the listed segments before `segment`, which are not needed any more, if one of them is
        incomplete.

        Call it before `run`. Nothing is written unless one is incomplete: the disk may be full.
        """
        released = [one for one in self.table.segments if one.id < segment and not one.is_trimmed]
        if any(self._size(one.id) != one.size_bytes for one in released):
            now_ns = self._clock()
            self.mark_trimmed([one.trimmed(TrimReason.MERGED, now_ns) for one in released])

    def _remove_leftovers(self) -> None:
        for name in self._disk.list_directory(self.path):
            if name.endswith(".new") and name.startswith((".log.", f".{TABLE_FILE}", f".{DURABLE_FILE}")):
                self._disk.remove(os.path.join(self.path, name))

    def _load_table(self, expected: LogIdentity) -> SegmentTable:
        path = os.path.join(self.path, TABLE_FILE)
        try:
            table = read_table(self._disk, self.path)
        except Corrupt as error:
            logger.warning("segment_table_rebuilt path=%s reason=%s", path, error)
            table = None
        if table is None:
            table = SegmentTable(self._identity_of_segments(expected) or expected)
            write_whole(self._disk, path, encode_table(table))
        found = table.identity
        if (found.kind, found.name, found.dedup_id) != (expected.kind, expected.name, expected.dedup_id):
            raise InvalidName(
                "the directory belongs to another log",
                where=self.path,
                got=f"{found.kind.name} {found.name} dedup {found.dedup_id}",
                expected=f"{expected.kind.name} {expected.name} dedup {expected.dedup_id}",
                hint="Use a separate directory for each session.",
            )
        if self._resume_with is not None and found.origin != expected.origin:
            raise ClusterMismatch(
                "the directory belongs to another cluster or incarnation",
                where=self.path,
                got=found.origin.hex(),
                expected=expected.origin.hex(),
                hint="Use a separate directory for each incarnation, and for each cluster's merged log.",
            )
        return table

    def _identity_of_segments(self, expected: LogIdentity) -> LogIdentity | None:
        for segment in reversed(list_segments(self._disk, self.path)):
            header = read_header(self._disk, self.path, segment)
            if header is not None:
                found = identity_from(header, self.path)
                return LogIdentity(found.kind, found.origin, expected.name, expected.dedup_id)
        return None

    def _finish_trims(self) -> None:
        """Empty segments that the table lists as trimmed: a crash may have happened before they were
        emptied.
        """
        trimmed = [segment.id for segment in self.table.segments if segment.is_trimmed]
        empty_segments(self._disk, self.path, trimmed)

    def _seal_unlisted(self, durable: DurableEnd | None) -> TornTail | None:
        """Verify the unlisted segments, cut the newest one's torn tail, then sync and list them."""
        on_disk = list_segments(self._disk, self.path)
        self._remove_forgotten(on_disk)
        headers = {segment: self._header(segment) for segment in on_disk if segment > self._last_listed}
        torn: TornTail | None = None
        found: list[SealedSegment] = []
        for segment, header in headers.items():
            path = os.path.join(self.path, segment.file_name)
            if header is None:
                found.append(self._lost(segment, headers))
                continue
            is_newest = segment == on_disk[-1]
            resume_with = self._resume_with if is_newest else None
            walk = walk_segment(self._disk, self.path, (resume_with or scanner_for)(header), header)
            durable_end = self._durable_end(walk, durable, is_newest=is_newest)
            tail = judge_tail(
                path=path,
                verified_end=walk.end_offset,
                size_bytes=walk.size_bytes,
                durable_end=durable_end,
                problem=walk.problem,
            )
            self._cut_and_sync(path, tail, durable_end)
            if tail.torn_bytes:
                torn = tail
            self._complete(walk, durable)
            if resume_with is None:
                found.append(sealed_entry(header, walk.end, walk.end_offset, walk.times, self._clock()))
            else:
                self._resumed = walk
        if found or self._resumed:
            self._disk.sync_directory(self.path)
        if found:
            self.table = SegmentTable(self.identity, (*self.table.segments, *found))
            write_whole(self._disk, os.path.join(self.path, TABLE_FILE), encode_table(self.table))
        return torn

    @property
    def _last_listed(self) -> SegmentId:
        return self.table.segments[-1].id if self.table.segments else SegmentId(-1, -1)

    def _remove_forgotten(self, on_disk: Sequence[SegmentId]) -> None:
        """Remove segments older than the oldest in the table: the table dropped them before a power loss.

        An unlisted segment between two listed ones is corruption: files of different times were mixed.
        """
        listed = {segment.id for segment in self.table.segments}
        for segment in on_disk:
            if segment in listed or segment > self._last_listed:
                continue
            if segment > self.table.segments[0].id:
                raise Corrupt(
                    "the segments table lists earlier and later segments, but not this one",
                    path=os.path.join(self.path, segment.file_name),
                    offset=0,
                    hint="The files are from different times: restore all of them, or start a new directory.",
                )
            remove_segments(self._disk, self.path, [segment])

    def _header(self, segment: SegmentId) -> SegmentHeader | None:
        header = read_header(self._disk, self.path, segment)
        if header is not None and (header.kind, header.origin) != (self.identity.kind, self.identity.origin):
            path = os.path.join(self.path, segment.file_name)
            raise Corrupt(
                "segment of another log",
                path=path,
                offset=0,
                got=header.origin.hex(),
                expected=self.identity.origin.hex(),
            )
        return header

    def _lost(self, segment: SegmentId, headers: dict[SegmentId, SegmentHeader | None]) -> SealedSegment:
        """The table entry for an empty segment that is not listed: it was trimmed before the table was
        lost.
        """
        for later, header in headers.items():
            if later > segment and header is not None:
                end, at = header.first, header.created_ns
                return SealedSegment(segment, end, end, 0, at, 0, 0, at).trimmed(
                    TrimReason.LOST, self._clock()
                )
        raise Corrupt(
            "the newest segment is empty, but was not trimmed",
            path=os.path.join(self.path, segment.file_name),
            offset=0,
            hint="Its numbers are unknown: restore the file, or start a new session directory.",
        )

    def _check_listed(self) -> None:
        """Sealed segments were completely durable, so a shorter or missing one is corrupt."""
        for segment in self.table.segments:
            if not segment.is_trimmed and (size := self._size(segment.id)) != segment.size_bytes:
                raise Corrupt(
                    "a sealed segment is incomplete",
                    path=os.path.join(self.path, segment.id.file_name),
                    offset=min(size or 0, segment.size_bytes),
                    got="no file" if size is None else f"{size} bytes",
                    expected=f"{segment.size_bytes} bytes",
                    hint="Restore the file, or start a new session directory.",
                )

    def _size(self, segment: SegmentId) -> int | None:
        return self._disk.size(os.path.join(self.path, segment.file_name))

    def _durable_end(self, walk: RecoveryScan, durable: DurableEnd | None, *, is_newest: bool) -> int:
        """The synced size of a segment: all of it, unless it is the newest one."""
        if not is_newest:
            return walk.size_bytes
        return (
            durable.offset if durable is not None and durable.id == walk.header.id else SEGMENT_HEADER_BYTES
        )

    def _cut_and_sync(self, path: str, tail: TornTail, durable_end: int) -> None:
        """Cut the torn tail, and make what recovery accepted durable.

        Bytes that may not be synced are first written again: if an earlier sync failed, the system considers
        the pages clean, and another sync would do nothing.
        """
        with contextlib.closing(self._disk.open(path, write=True)) as file:
            if tail.torn_bytes:
                logger.warning(
                    "torn_tail_cut path=%s offset=%d torn_bytes=%d", path, tail.end, tail.torn_bytes
                )
                file.truncate(tail.end)
            for start in range(durable_end, tail.end, READ_BYTES):
                data = file.pread(min(READ_BYTES, tail.end - start), start)
                if file.pwritev([data], start) != len(data):
                    raise OSError(errno.ENOSPC, "short write")
            file.sync()

    def _complete(self, walk: RecoveryScan, durable: DurableEnd | None) -> None:
        """In a filtered log, the filter may have left out positions after the last block."""
        is_filtered = self.identity.kind is LogKind.FILTERED
        if is_filtered and durable is not None and durable.id == walk.header.id:
            walk.end = max(walk.end, durable.end)

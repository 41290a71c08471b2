"""Opening a log directory to write: what a crash left is judged, cut, completed and made durable.

Laws. Sealed segments were durable whole, and bytes below the durable end were synced: where they are missing
or do not verify that is damage, and nothing of them is changed. Only what no sync covered may be cut, from
the newest segment. When recovery returns, what it accepted is on the medium, whatever a failed sync left.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rt.errors import ClusterMismatch, Damaged, InvalidName
from rt.log.directory import (
    READ_BYTES,
    identity_from,
    list_segments,
    read_durable_end,
    read_header,
    read_table,
)
from rt.log.disk import Disk, write_whole
from rt.log.durable import DURABLE_FILE, DurableEnd
from rt.log.frames import Scanner, scanner_for
from rt.log.index import index_file_name
from rt.log.recovery import Tail, judge_tail
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind, SegmentHeader, SegmentId
from rt.log.table import TABLE_FILE, Identity, SealedSegment, Table, TrimReason, encode_table
from rt.log.walk import Walk, walk_segment

logger = logging.getLogger("rt.log")

ScannerFactory: TypeAlias = Callable[[SegmentHeader], Scanner]


@dataclass(frozen=True, slots=True)
class Recovered:
    """A directory after recovery, and where a torn tail was cut, if one was.

    Every segment is sealed, but for the `resumed` one, whose bytes up to its walk's end are durable too.
    """

    table: Table
    durable_sequence: int
    torn: Tail | None = None
    torn_path: str = ""
    resumed: Walk | None = None

    @property
    def end(self) -> int:
        """The next number or position."""
        if self.resumed is not None:
            return self.resumed.end
        return self.table.segments[-1].end if self.table.segments else 0


def recover_directory(
    disk: Disk,
    path: str,
    wanted: Identity,
    clock: Callable[[], int],
    *,
    resume_with: ScannerFactory | None = None,
    gone: Sequence[SealedSegment] = (),
) -> Recovered:
    """Recover the directory, which the caller has locked; one that is new becomes `wanted`.

    Where `resume_with` makes scanners, the newest segment is not sealed, and is walked by one of them; the
    directory is a copy then, or a merged log, and its origin must be the wanted one (`rt.ClusterMismatch`).
    What is still here of the segments `gone`, which others trimmed, is trimmed too, whatever its bytes are.
    `rt.Damaged` and `rt.UnknownVersion` leave the segments as they are; `OSError` as the disk raises it.
    """
    recovery = _Recovery(disk, path, wanted, clock, resume_with)
    recovery.let_go(gone)
    return recovery.run()


def empty_segments(disk: Disk, path: str, segments: Sequence[SegmentId]) -> None:
    """Cut the files of trimmed segments to size 0 and remove their indexes, as far as they are there."""
    names = set(disk.list_directory(path))
    for segment in segments:
        if segment.file_name in names and disk.size(os.path.join(path, segment.file_name)):
            file = disk.open(os.path.join(path, segment.file_name), write=True)
            try:
                file.truncate(0)
            finally:
                file.close()
        if index_file_name(segment) in names:
            disk.remove(os.path.join(path, index_file_name(segment)))


def remove_segments(disk: Disk, path: str, segments: Sequence[SegmentId]) -> None:
    """Remove the files of segments that the table has forgotten, as far as they are there."""
    names = set(disk.list_directory(path))
    for segment in segments:
        for name in (segment.file_name, index_file_name(segment)):
            if name in names:
                disk.remove(os.path.join(path, name))


class _Recovery:
    def __init__(
        self,
        disk: Disk,
        path: str,
        wanted: Identity,
        clock: Callable[[], int],
        resume_with: ScannerFactory | None,
    ) -> None:
        self.path = path
        self._resume_with = resume_with
        self._resumed: Walk | None = None
        self._disk = disk
        self._clock = clock
        self._remove_leftovers()
        self.table = self._load_table(wanted)
        self.identity = self.table.identity

    def run(self) -> Recovered:
        self._finish_trims()
        self._check_listed()
        durable = read_durable_end(self._disk, self.path)
        if durable is not None and durable.origin != self.identity.origin:
            durable = None
        torn, torn_path = self._seal_unlisted(durable)
        recovered = Recovered(self.table, durable.sequence if durable else 0, torn, torn_path, self._resumed)
        self._check_numbers()
        self._check_nothing_vanished(durable, recovered.end)
        return recovered

    def let_go(self, gone: Sequence[SealedSegment]) -> None:
        """List as trimmed what is here of these segments."""
        here = set(list_segments(self._disk, self.path))
        listed = {segment.id: segment for segment in self.table.segments}
        trimmed = {
            segment.id: segment
            for segment in gone
            if segment.id in here and (segment.id not in listed or not listed[segment.id].is_trimmed)
        }
        if trimmed:
            entries = listed | trimmed
            self.table = Table(self.table.identity, tuple(entries[segment] for segment in sorted(entries)))
            write_whole(self._disk, os.path.join(self.path, TABLE_FILE), encode_table(self.table))

    def _remove_leftovers(self) -> None:
        for name in self._disk.list_directory(self.path):
            if name.endswith(".new") and name.startswith((".log.", f".{TABLE_FILE}", f".{DURABLE_FILE}")):
                self._disk.remove(os.path.join(self.path, name))

    def _load_table(self, wanted: Identity) -> Table:
        path = os.path.join(self.path, TABLE_FILE)
        try:
            table = read_table(self._disk, self.path)
        except Damaged as error:
            logger.warning("segments_table_rebuilt path=%s reason=%s", path, error)
            table = None
        if table is None:
            table = Table(self._identity_of_segments(wanted) or wanted)
            write_whole(self._disk, path, encode_table(table))
        found = table.identity
        if (found.kind, found.name, found.dedup_id) != (wanted.kind, wanted.name, wanted.dedup_id):
            raise InvalidName(
                "the directory belongs to another log",
                where=self.path,
                got=f"{found.kind.name} {found.name} dedup {found.dedup_id}",
                wanted=f"{wanted.kind.name} {wanted.name} dedup {wanted.dedup_id}",
                hint="Give each session a directory of its own.",
            )
        if self._resume_with is not None and found.origin != wanted.origin:
            raise ClusterMismatch(
                "the directory is of another cluster or incarnation",
                where=self.path,
                got=found.origin.hex(),
                wanted=wanted.origin.hex(),
                hint="Give each incarnation, and each cluster's merged log, a directory of its own.",
            )
        return table

    def _identity_of_segments(self, wanted: Identity) -> Identity | None:
        for segment in reversed(list_segments(self._disk, self.path)):
            header = read_header(self._disk, self.path, segment)
            if header is not None:
                found = identity_from(header, self.path)
                return Identity(found.kind, found.origin, wanted.name, wanted.dedup_id)
        return None

    def _finish_trims(self) -> None:
        """Empty what the table says is trimmed: a crash may have come between the two."""
        trimmed = [segment.id for segment in self.table.segments if segment.is_trimmed]
        empty_segments(self._disk, self.path, trimmed)

    def _seal_unlisted(self, durable: DurableEnd | None) -> tuple[Tail | None, str]:
        """Verify the segments the table does not list, cut the newest one's torn tail, sync and list them."""
        on_disk = list_segments(self._disk, self.path)
        self._remove_forgotten(on_disk)
        headers = {segment: self._header(segment) for segment in on_disk if segment > self._last_listed}
        torn, torn_path = None, ""
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
                next_number=walk.end,
                size_bytes=walk.size_bytes,
                durable_end=durable_end,
                problem=walk.problem,
            )
            self._cut_and_sync(path, tail, durable_end)
            if tail.torn_bytes:
                torn, torn_path = tail, path
            self._complete(walk, durable)
            if resume_with is None:
                found.append(self._entry(header, walk))
            else:
                self._resumed = walk
        if found or self._resumed:
            self._disk.sync_directory(self.path)
        if found:
            self.table = Table(self.identity, (*self.table.segments, *found))
            write_whole(self._disk, os.path.join(self.path, TABLE_FILE), encode_table(self.table))
        return torn, torn_path

    @property
    def _last_listed(self) -> SegmentId:
        return self.table.segments[-1].id if self.table.segments else SegmentId(-1, -1)

    def _remove_forgotten(self, on_disk: Sequence[SegmentId]) -> None:
        """Remove segments older than all the table remembers: it forgot them, then the power went.

        One between two of the table's is something else: the files are not of one moment.
        """
        listed = {segment.id for segment in self.table.segments}
        for segment in on_disk:
            if segment in listed or segment > self._last_listed:
                continue
            if segment > self.table.segments[0].id:
                raise Damaged(
                    "a segment that the table does not know, between two that it knows",
                    path=os.path.join(self.path, segment.file_name),
                    offset=0,
                    hint="Table and segments are not of one moment: restore both, or start a new directory.",
                )
            remove_segments(self._disk, self.path, [segment])

    def _header(self, segment: SegmentId) -> SegmentHeader | None:
        header = read_header(self._disk, self.path, segment)
        if header is not None and (header.kind, header.origin) != (self.identity.kind, self.identity.origin):
            path = os.path.join(self.path, segment.file_name)
            raise Damaged(
                "segment of another log",
                path=path,
                offset=0,
                got=header.origin.hex(),
                wanted=self.identity.origin.hex(),
            )
        return header

    def _lost(self, segment: SegmentId, headers: dict[SegmentId, SegmentHeader | None]) -> SealedSegment:
        """An empty segment that no table lists: it was trimmed before the table was lost."""
        for later, header in headers.items():
            if later > segment and header is not None:
                end, at = header.first, header.created_ns
                return SealedSegment(segment, end, end, 0, at, 0, 0, at).trimmed(
                    TrimReason.LOST, self._clock()
                )
        raise Damaged(
            "the newest segment was emptied, but not by trimming",
            path=os.path.join(self.path, segment.file_name),
            offset=0,
            hint="Its numbers are unknown: restore the file, or start a new session directory.",
        )

    def _check_listed(self) -> None:
        """Sealed segments were durable whole: one that is now shorter or gone is damage."""
        for segment in self.table.segments:
            path = os.path.join(self.path, segment.id.file_name)
            if not segment.is_trimmed and (size := self._disk.size(path)) != segment.size_bytes:
                raise Damaged(
                    "a sealed segment is not whole",
                    path=path,
                    offset=min(size or 0, segment.size_bytes),
                    got="no file" if size is None else f"{size} bytes",
                    wanted=f"{segment.size_bytes} bytes",
                    hint="Restore the file, or start a new session directory.",
                )

    def _durable_end(self, walk: Walk, durable: DurableEnd | None, *, is_newest: bool) -> int:
        """How far a segment is known to be synced: whole, unless it is the newest one."""
        if not is_newest:
            return walk.size_bytes
        return (
            durable.offset if durable is not None and durable.id == walk.header.id else SEGMENT_HEADER_BYTES
        )

    def _cut_and_sync(self, path: str, tail: Tail, durable_end: int) -> None:
        """Cut the torn tail, and make what recovery accepted durable.

        What is not known to be synced is written again first: if a sync of it failed, the system holds the
        bytes for clean, and another sync would do nothing.
        """
        file = self._disk.open(path, write=True)
        try:
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
        finally:
            file.close()

    def _entry(self, header: SegmentHeader, walk: Walk) -> SealedSegment:
        return SealedSegment(
            header.id,
            header.first,
            walk.end,
            walk.end_offset,
            header.created_ns,
            walk.timestamp_low_ns,
            walk.timestamp_high_ns,
            self._clock(),
            header.life,
        )

    def _complete(self, walk: Walk, durable: DurableEnd | None) -> None:
        """Behind the last block of a filtered log there may be positions that the filter left out."""
        is_filtered = self.identity.kind is Kind.FILTERED
        if is_filtered and durable is not None and durable.id == walk.header.id:
            walk.end = max(walk.end, durable.end)

    def _check_numbers(self) -> None:
        """Numbers or positions go on from one segment to the next.

        A copy may have left out what was trimmed at its source; and of a session's X it may hold more than
        the publisher's own disk remembered at the start of the next one, or less.
        """
        places = [(segment.id, segment.first, segment.end) for segment in self.table.segments]
        if self._resumed is not None:
            places.append((self._resumed.header.id, self._resumed.header.first, self._resumed.end))
        for (earlier, _, end), (later, first, _) in itertools.pairwise(places):
            if first == end or self.identity.dedup_id is not None:
                continue
            is_free = self.identity.kind is Kind.SESSION and later.x != earlier.x
            if self._resume_with is None or (first < end and not is_free):
                raise Damaged(
                    "numbers do not go on from one segment to the next",
                    path=os.path.join(self.path, later.file_name),
                    offset=0,
                    got=first,
                    wanted=end,
                    hint="The files are not of one moment: restore all of them, or start a new directory.",
                )

    def _check_nothing_vanished(self, durable: DurableEnd | None, end: int) -> None:
        """What was recorded as synced must be there, unless it was trimmed."""
        if durable is None:
            return
        sizes = {segment.id: segment.size_bytes for segment in self.table.segments}
        if self._resumed is not None:
            sizes[self._resumed.header.id] = self._resumed.end_offset
        last = max(sizes, default=SegmentId(-1, -1))
        is_gone = durable.id > last or sizes.get(durable.id, durable.offset) < durable.offset
        is_dense = self.identity.dedup_id is None and (self._resume_with is None or durable.id == last)
        if is_gone or (durable.end > end and is_dense):
            raise Damaged(
                "synced segments are missing",
                path=os.path.join(self.path, durable.id.file_name),
                offset=0,
                got=f"numbers up to {end}",
                wanted=f"up to {durable.end}, which were synced",
                hint="Restore the files, or start a new session directory.",
            )

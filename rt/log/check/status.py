"""The contents of a log directory, found without reading all of it: segments with range, size and times.

Takes no lock. Sealed and trimmed segments are reported as the table lists them; the active one as far as it
verifies, or is known to be synced.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum

from msgspec import Struct

from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.durable_end import DurableEnd
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentId
from rt.log.format.segment_table import LogIdentity, SealedSegment, TrimReason
from rt.log.scan.catalog import ReadableSegment, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import check_log_directory, read_durable_end, read_identity, read_index, scans
from rt.log.scan.scanner import Scanner, scanner_for

_BEYOND_ALL = 2**62


class SegmentState(StrEnum):
    ACTIVE = "active"
    SEALED = "sealed"
    TRIMMED = "trimmed"


class SegmentStatus(Struct, frozen=True):
    """One segment. Times are ns since the Unix epoch, 0 if there is none yet.

    `size_bytes` is the size of the file. If the segment is trimmed, it is the size before the trim. If the
    segment is active, it is the size of its complete frames. For the active segment, the timestamps are the
    lowest at its start and the highest at its end. In a filtered log `end - first` is larger than the number
    of messages.
    """

    id: SegmentId
    state: SegmentState
    first: int
    end: int
    size_bytes: int
    created_ns: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    sealed_ns: int = 0
    trimmed_ns: int = 0
    reason: TrimReason = TrimReason.NONE

    @property
    def message_count(self) -> int:
        """The number of positions."""
        return self.end - self.first


class LogStatus(Struct, frozen=True):
    path: str
    identity: LogIdentity
    durable: DurableEnd | None
    segments: tuple[SegmentStatus, ...]

    @property
    def kept(self) -> list[SegmentStatus]:
        return [segment for segment in self.segments if segment.state is not SegmentState.TRIMMED]

    @property
    def start(self) -> int:
        """The first position that is not trimmed; the end if all are."""
        kept = self.kept
        return kept[0].first if kept else self.end

    @property
    def end(self) -> int:
        """One past the last complete message."""
        return self.segments[-1].end if self.segments else 0


def read_status(path: str | os.PathLike[str], *, disk: Disk = REAL) -> LogStatus:
    """Read the directory. Raises `rt.LogNotFound`, or `rt.Corrupt` for a bad segment header."""
    path = os.path.abspath(os.fspath(path))
    check_log_directory(disk, path)
    with storage_errors(path, "reading the status of a log directory"):
        identity = read_identity(disk, path)
        durable = read_durable_end(disk, path)
        catalog = read_catalog(disk, path)
        grown = [
            _unlisted(disk, path, kept, durable, is_newest=kept is catalog.kept[-1])
            for kept in catalog.kept
            if kept.header is not None
        ]
    found = [*map(_listed, catalog.listed), *(segment for segment in grown if segment is not None)]
    found.sort(key=lambda segment: segment.id)
    return LogStatus(path, identity, durable, tuple(found))


def _listed(sealed: SealedSegment) -> SegmentStatus:
    return SegmentStatus(
        sealed.id,
        SegmentState.TRIMMED if sealed.is_trimmed else SegmentState.SEALED,
        sealed.first,
        sealed.end,
        sealed.size_bytes,
        sealed.created_ns,
        sealed.timestamp_low_ns,
        sealed.timestamp_high_ns,
        sealed.sealed_ns,
        sealed.trimmed_ns,
        sealed.reason,
    )


def _unlisted(
    disk: Disk, path: str, kept: ReadableSegment, durable: DurableEnd | None, *, is_newest: bool
) -> SegmentStatus | None:
    """A segment that the table does not list: the active one, or any if the table is lost."""
    assert kept.header is not None
    try:
        file = disk.open(segment_path(path, kept.id))
    except FileNotFoundError:
        return None
    with contextlib.closing(file):
        scanner = scanner_at(disk, path, kept.header, file, _BEYOND_ALL)
        low_ns, high_ns = _time_range(disk, path, kept.header, file, scanner)
        synced = durable.offset if durable is not None and durable.id == kept.id else SEGMENT_HEADER_BYTES
        return SegmentStatus(
            kept.id,
            SegmentState.ACTIVE if is_newest else SegmentState.SEALED,
            kept.first,
            scanner.next,
            min(max(scanner.boundary, synced), file.size()),
            kept.header.created_ns,
            low_ns,
            high_ns,
        )


def _time_range(disk: Disk, path: str, header: SegmentHeader, file: File, tail: Scanner) -> tuple[int, int]:
    """The lowest timestamp of the first read and the highest of all. Moves `tail` to the end."""
    start = next(scans(file.pread, scanner_for(header), values=False))
    lows = [batch.header.timestamp_low_ns for batch in start.batches]
    entries = read_index(disk, path, header)
    highs = [entry.timestamp_high_ns for entry in entries if entry.first > header.first]
    for scan in scans(file.pread, tail):
        highs += [batch.header.timestamp_high_ns for batch in scan.batches]
    return min(lows, default=0), max(highs, default=0)

"""Boundaries of the batches of a session replica, which nodes compare.

Invariant: a boundary is reported only if everything before it verified, columns and values. The later merge
copies the bytes in the kernel, which verifies nothing.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from rt.log.disk import Disk, storage_errors
from rt.log.format.running_checksum import ChecksummedBoundary
from rt.log.format.segment import SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_header, scans
from rt.log.scan.scanner import SessionScanner


class SegmentBoundaries(NamedTuple):
    """Some or all batch boundaries of one segment, in order."""

    segment: SegmentId
    marks: list[ChecksummedBoundary]


def read_marks(disk: Disk, path: str, segment: SegmentId) -> list[ChecksummedBoundary]:
    """The boundaries of a segment on disk, up to the first bytes that do not verify; [] if it was trimmed."""
    with storage_errors(path, "reading a segment"):
        header = read_header(disk, path, segment)
        if header is None:
            return []
        with closing(disk.open(segment_path(path, segment))) as file:
            scanner = SessionScanner(header, marks=True)
            return [mark for scan in scans(file.pread, scanner) for mark in scan.marks]

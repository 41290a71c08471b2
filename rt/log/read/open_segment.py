"""One segment of a log directory, open for reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rt.errors import Corrupt
from rt.log.disk import Disk, File
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import ReadableSegment, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import read_header
from rt.log.scan.scanner import Scanner

RESTORE: Final = "Repair a copy with `rt pull DIR --repair`. `rt log verify` lists all corrupt files."


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A segment's file, and a scanner for it."""

    id: SegmentId
    path: str
    file: File
    scanner: Scanner

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_segment(
    disk: Disk, directory: str, identity: LogIdentity, kept: ReadableSegment, position: int
) -> OpenSegment | None:
    """Open `kept` at the last known boundary at or before `position`; None if it was trimmed meanwhile.

    Raises `rt.Corrupt` if the file is missing but was not trimmed, or is of another log than `identity`.
    """
    path = segment_path(directory, kept.id)
    try:
        header = kept.header or read_header(disk, directory, kept.id)
        file = disk.open(path) if header is not None else None
    except FileNotFoundError:
        header = file = None
    if header is None or file is None:
        if any(again == kept for again in read_catalog(disk, directory).kept):
            raise Corrupt("a segment is missing that was not trimmed", path=path, offset=0, hint=RESTORE)
        return None
    try:
        if (header.kind, header.origin) != (identity.kind, identity.origin):
            raise Corrupt("segment of another log", path=path, offset=0, got=header.origin.hex())
        return OpenSegment(kept.id, path, file, scanner_at(disk, directory, header, file, position))
    except BaseException:
        file.close()
        raise

"""One segment of a log directory, open to be read from a position on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rt.errors import Damaged
from rt.log.catalog import Kept, read_catalog, scanner_at, segment_path
from rt.log.directory import read_header
from rt.log.disk import Disk, File
from rt.log.frames import Scanner
from rt.log.segment import SegmentId
from rt.log.table import Identity

RESTORE: Final = "Restore or refetch the file; `rt log verify` lists all damage."


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A segment's file, and a scanner that walks it."""

    id: SegmentId
    path: str
    file: File
    scanner: Scanner

    def close(self) -> None:
        """Give the file back."""
        self.file.close()


def open_segment(
    disk: Disk, directory: str, identity: Identity, kept: Kept, position: int
) -> OpenSegment | None:
    """Open `kept` at the last place that is known at or before `position`; None if it was trimmed meanwhile.

    Raises `rt.Damaged` if it is gone and was not trimmed, or is of another log than `identity`.
    """
    path = segment_path(directory, kept.id)
    try:
        header = kept.header or read_header(disk, directory, kept.id)
        file = disk.open(path) if header is not None else None
    except FileNotFoundError:
        header = file = None
    if header is None or file is None:
        if any(again == kept for again in read_catalog(disk, directory).kept):
            raise Damaged("a segment is missing that was not trimmed", path=path, offset=0, hint=RESTORE)
        return None
    try:
        if (header.kind, header.origin) != (identity.kind, identity.origin):
            raise Damaged("segment of another log", path=path, offset=0, got=header.origin.hex())
        return OpenSegment(kept.id, path, file, scanner_at(disk, directory, header, file, position))
    except BaseException:
        file.close()
        raise

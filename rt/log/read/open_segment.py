"""Open a segment for reading, at a position."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from rt.errors import Corrupt
from rt.log.disk import Disk, File
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import ReadableSegment, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import read_header
from rt.log.scan.scanner import Scanner

_LISTS: Final = "`rt log verify DIR` lists all corrupt files."


def restore_hint(kind: LogKind) -> str:
    """How to repair a corrupt log of that kind. A pull copies merged logs only."""
    if kind is LogKind.SESSION:
        return (
            "No pull can repair the log of a session: restore the file from a backup. If its messages are "
            f"merged, move the directory away and start with an empty one. {_LISTS}"
        )
    return f"Repair a copy with `rt pull DIR --repair`. {_LISTS}"


class OpenSegment(Struct, frozen=True):
    """A segment's file, and a scanner for it."""

    id: SegmentId
    path: str
    file: File
    scanner: Scanner

    def close(self) -> None:
        self.file.close()


def open_segment(
    disk: Disk, directory: str, identity: LogIdentity, kept: ReadableSegment, position: int
) -> OpenSegment | None:
    """Open `kept` as `open_visible`; None if it was trimmed meanwhile.

    Also raises `rt.Corrupt` if the file is missing but was not trimmed.
    """
    opened = open_visible(disk, directory, identity, kept, position)
    if opened is None and any(again == kept for again in read_catalog(disk, directory).kept):
        path = segment_path(directory, kept.id)
        hint = restore_hint(identity.kind)
        raise Corrupt("a segment is missing that was not trimmed", path=path, offset=0, hint=hint)
    return opened


def open_visible(
    disk: Disk, directory: str, identity: LogIdentity, kept: ReadableSegment, position: int
) -> OpenSegment | None:
    """Open `kept` at the last known boundary at or before `position`; None if its file is missing or empty.

    Raises `rt.Corrupt` if it is of another log than `identity`.
    """
    path = segment_path(directory, kept.id)
    try:
        header = kept.header or read_header(disk, directory, kept.id)
        if header is None:
            return None
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        if (header.kind, header.origin) != (identity.kind, identity.origin):
            raise Corrupt("segment of another log", path=path, offset=0, got=header.origin.hex())
        return OpenSegment(kept.id, path, file, scanner_at(disk, directory, header, file, position))
    except BaseException:
        file.close()
        raise

"""Open a segment for reading, and find the position where a reader starts."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from rt.errors import Corrupt, InvalidOption
from rt.log.disk import Disk, File
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import ReadableSegment, SegmentCatalog, read_catalog, scanner_at, segment_path
from rt.log.scan.directory import read_header, scans
from rt.log.scan.scanner import Scanner

Place: TypeAlias = int | Literal["earliest", "latest"]
RESTORE: Final = "Repair a copy with `rt pull DIR --repair`. `rt log verify` lists all corrupt files."


@dataclass(frozen=True, slots=True)
class OpenSegment:
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
        raise Corrupt("a segment is missing that was not trimmed", path=path, offset=0, hint=RESTORE)
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


class FoundStart(NamedTuple):
    """A position. Also the run of the segment that was scanned to its end to find it, if any."""

    position: int
    run: int | None


def check_place(place: Place) -> Place:
    """A position that a message may have, "earliest" or "latest". Raises `rt.InvalidOption`."""
    if place in ("earliest", "latest"):
        return place
    position = -1
    with contextlib.suppress(TypeError):
        position = operator.index(place)  # type: ignore[arg-type]
    if isinstance(place, bool) or not 0 <= position <= NUMBER_MAX:
        expected = "a number from 0 on, 'earliest' or 'latest'"
        raise InvalidOption("invalid position", got=repr(place)[:200], expected=expected)
    return position


def find_place(
    disk: Disk, directory: str, identity: LogIdentity, place: Place, *, may_be_ahead: bool = False
) -> FoundStart:
    """Raises `rt.InvalidOption` for an invalid place, or a position after the log end.

    A reader after the end would wait indefinitely; it is allowed if the log is being filled (`may_be_ahead`).
    In a dedup session any number may be the next one.
    """
    place = check_place(place)
    if isinstance(place, int):
        return FoundStart(place, None) if may_be_ahead else _checked(disk, directory, identity, place)
    catalog = read_catalog(disk, directory)
    if place == "earliest":
        return FoundStart(catalog.start, None)
    return _end(disk, directory, identity, catalog)


def _checked(disk: Disk, directory: str, identity: LogIdentity, position: int) -> FoundStart:
    catalog = read_catalog(disk, directory)
    if position <= catalog.known_end or identity.dedup_id is not None:
        return FoundStart(position, None)
    end = _end(disk, directory, identity, catalog)
    if position > end.position:
        raise InvalidOption(f"position {position} is beyond the end, {end.position}, of {directory}")
    return FoundStart(position, end.run)


def _end(disk: Disk, directory: str, identity: LogIdentity, catalog: SegmentCatalog) -> FoundStart:
    """One past the last complete message, found from the newest segment's last index entry."""
    if not catalog.kept or catalog.kept[-1].end is not None:
        return FoundStart(max(catalog.known_end, catalog.start), None)
    segment = open_segment(disk, directory, identity, catalog.kept[-1], 2**62)
    if segment is None:
        return FoundStart(catalog.known_end, None)
    try:
        for _ in scans(segment.file.pread, segment.scanner):
            pass
        return FoundStart(segment.scanner.next, segment.id.run)
    finally:
        segment.close()

"""Turn the start that a caller asks for into a position of the log."""

from __future__ import annotations

import operator
from typing import Literal, NamedTuple, TypeAlias

from rt.log.disk import Disk
from rt.log.format.segment_table import LogIdentity
from rt.log.read.open_segment import open_segment
from rt.log.scan.catalog import SegmentCatalog, read_catalog
from rt.log.scan.directory import scans

Place: TypeAlias = int | Literal["earliest", "latest"]


class FoundStart(NamedTuple):
    """A position. Also the X of the segment that was scanned to its end to find it, if any."""

    position: int
    x: int | None


def find_place(
    disk: Disk, directory: str, identity: LogIdentity, place: Place, *, may_be_ahead: bool = False
) -> FoundStart:
    """Raises `ValueError` for an invalid place, or a position after the log end.

    A reader after the end would wait indefinitely; it is allowed if the log is being filled (`may_be_ahead`).
    In a dedup session any number may be the next one.
    """
    if not isinstance(place, str | bool) and hasattr(place, "__index__"):
        position = operator.index(place)
        if position < 0:
            raise ValueError(f"position {position} is negative")
        return FoundStart(position, None) if may_be_ahead else _checked(disk, directory, identity, position)
    catalog = read_catalog(disk, directory)
    if place == "earliest":
        return FoundStart(catalog.start, None)
    if place == "latest":
        return _end(disk, directory, identity, catalog)
    raise ValueError(f"invalid position: got {place!r}, expected a number, 'earliest' or 'latest'")


def _checked(disk: Disk, directory: str, identity: LogIdentity, position: int) -> FoundStart:
    catalog = read_catalog(disk, directory)
    if position <= catalog.known_end or identity.dedup_id is not None:
        return FoundStart(position, None)
    end = _end(disk, directory, identity, catalog)
    if position > end.position:
        raise ValueError(f"position {position} is beyond the end, {end.position}, of {directory}")
    return FoundStart(position, end.x)


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
        return FoundStart(segment.scanner.next, segment.id.x)
    finally:
        segment.close()

"""Where a reader begins: a place that its caller names, as a position of the log as it is now."""

from __future__ import annotations

import operator
from typing import Literal, NamedTuple, TypeAlias

from rt.log.catalog import Catalog, read_catalog
from rt.log.directory import scans
from rt.log.disk import Disk
from rt.log.open_segment import open_segment
from rt.log.table import Identity

Place: TypeAlias = int | Literal["earliest", "latest"]


class Found(NamedTuple):
    """A position; and the X of the segment that had to be walked to its end for it, if one had."""

    position: int
    x: int | None


def find_place(
    disk: Disk, directory: str, identity: Identity, place: Place, *, may_be_ahead: bool = False
) -> Found:
    """`ValueError` for what is no place, or a position that is neither in the log nor about to be.

    A reader beyond the end would wait for ever, but where the log is being filled (`may_be_ahead`). In a
    dedup session any number may be the next one.
    """
    if not isinstance(place, str | bool) and hasattr(place, "__index__"):
        position = operator.index(place)
        if position < 0:
            raise ValueError(f"position {position} is negative")
        return Found(position, None) if may_be_ahead else _checked(disk, directory, identity, position)
    catalog = read_catalog(disk, directory)
    if place == "earliest":
        return Found(catalog.start, None)
    if place == "latest":
        return _end(disk, directory, identity, catalog)
    raise ValueError(f"position {place!r} is neither a number nor 'earliest' nor 'latest'")


def _checked(disk: Disk, directory: str, identity: Identity, position: int) -> Found:
    catalog = read_catalog(disk, directory)
    if position <= catalog.known_end or identity.dedup_id is not None:
        return Found(position, None)
    end = _end(disk, directory, identity, catalog)
    if position > end.position:
        raise ValueError(f"position {position} is beyond the end, {end.position}, of {directory}")
    return Found(position, end.x)


def _end(disk: Disk, directory: str, identity: Identity, catalog: Catalog) -> Found:
    """One past the last whole message, found from the newest segment's last hop."""
    if not catalog.kept or catalog.kept[-1].end is not None:
        return Found(max(catalog.known_end, catalog.start), None)
    segment = open_segment(disk, directory, identity, catalog.kept[-1], 2**62)
    if segment is None:
        return Found(catalog.known_end, None)
    try:
        for _ in scans(segment.file.pread, segment.scanner):
            pass
        return Found(segment.scanner.next, segment.id.x)
    finally:
        segment.close()

"""How the bytes of a merged log lie along its positions, as far as table and index tell.

Law: an outline says how to share work out, and what need not be looked at for a time. It reads no frame and
proves nothing; whoever reads a range finds its positions by frames that verify.
"""

from __future__ import annotations

from collections.abc import Iterator

from rt.log.catalog import Kept, read_catalog, segment_path
from rt.log.directory import read_header, read_index
from rt.log.disk import Disk, storage_errors
from rt.log.index import INDEX_STRIDE_BYTES, EntryKind
from rt.log.waypoints import Waypoint


def outline(
    disk: Disk, path: str, start: int, end: int, *, stride_bytes: int = INDEX_STRIDE_BYTES
) -> Iterator[Waypoint]:
    """Waypoints, about `stride_bytes` apart, from the last one up to `start` to the first one from `end` on.

    Where the log begins behind `start`, so does the outline; positions and bytes rise. The last waypoint is
    `end` if it is not before. Storage errors.
    """
    before: Waypoint | None = None
    last = -1
    for waypoint in _waypoints(disk, path, start, end, stride_bytes):
        if waypoint.position <= last:
            continue
        last = waypoint.position
        if waypoint.position <= start:
            before = waypoint
            continue
        if before is not None:
            yield before
            before = None
        yield waypoint
        if waypoint.position >= end:
            return
    if before is not None and before.position < end:
        yield before


def _waypoints(disk: Disk, path: str, start: int, end: int, stride_bytes: int) -> Iterator[Waypoint]:
    with storage_errors(path, "reading the outline of a log"):
        catalog = read_catalog(disk, path)
    sealed = {segment.id: segment for segment in catalog.table.segments} if catalog.table else {}
    log_bytes, high_ns = 0, None
    for kept in catalog.kept:
        if kept.end is not None and kept.end <= start:
            continue
        if kept.first >= end:
            break
        known = sealed.get(kept.id)
        yield Waypoint(kept.first, log_bytes, high_ns)
        with storage_errors(path, "reading the outline of a log"):
            size = known.size_bytes if known else disk.size(segment_path(path, kept.id)) or 0
            waypoints = _segment_waypoints(disk, path, kept, stride_bytes) if size > stride_bytes else []
        for waypoint in waypoints:
            yield waypoint._replace(log_bytes=log_bytes + waypoint.log_bytes)
        log_bytes += size
        high_ns = known.timestamp_high_ns if known else None
        if kept.end is not None and kept.end >= end:
            yield Waypoint(kept.end, log_bytes, high_ns)
            return
    yield Waypoint(end, log_bytes, high_ns)


def _segment_waypoints(disk: Disk, path: str, kept: Kept, stride_bytes: int) -> list[Waypoint]:
    """What the segment's index has, thinned out; nothing if it was trimmed meanwhile."""
    header = kept.header or read_header(disk, path, kept.id)
    if header is None:
        return []
    waypoints: list[Waypoint] = []
    behind = 0
    for entry in read_index(disk, path, header):
        if entry.kind is EntryKind.FRAME and entry.offset >= behind and entry.first > kept.first:
            waypoints.append(Waypoint(entry.first, entry.offset, entry.timestamp_high_ns))
            behind = entry.offset + stride_bytes
    return waypoints

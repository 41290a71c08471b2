"""The approximate layout of a merged log: bytes by position, from the segment table and the indexes.

An outline helps to divide a log into ranges of similar size, and to skip by time. It reads no frames, so it
is only an estimate: a range reader finds positions by verified frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rt.log.disk import Disk, storage_errors
from rt.log.format.index import INDEX_STRIDE_BYTES, EntryKind
from rt.log.scan.catalog import ReadableSegment, read_catalog, segment_path
from rt.log.scan.directory import read_header, read_index


class Waypoint(NamedTuple):
    """A block starts with `position`, or the outline ends there.

    `log_bytes` precede it, counted from the start of the outline's first segment. `timestamp_high_ns` is an
    upper bound of the timestamps of all messages from the previous waypoint up to this one; None if neither
    the table nor an index has it.
    """

    position: int
    log_bytes: int
    timestamp_high_ns: int | None = None


def outline(
    disk: Disk, path: str, start: int, end: int, *, stride_bytes: int = INDEX_STRIDE_BYTES
) -> Iterator[Waypoint]:
    """Waypoints, about `stride_bytes` apart, that cover the positions from `start` to `end`.

    The outline starts with the last waypoint at or before `start`. It ends with the first waypoint at or
    after `end`. Positions and bytes rise. If the log starts after `start`, so does the outline. If no
    waypoint is at or after `end`, `end` itself is the last one. Raises `rt.StorageError`.
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
    sealed = {segment.id: segment for segment in catalog.listed}
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


def _segment_waypoints(disk: Disk, path: str, kept: ReadableSegment, stride_bytes: int) -> list[Waypoint]:
    """The segment's index entries, one for each `stride_bytes`; none if it was trimmed meanwhile.

    Their `log_bytes` count from the start of the segment.
    """
    header = kept.header or read_header(disk, path, kept.id)
    if header is None:
        return []
    waypoints: list[Waypoint] = []
    next_offset = 0
    for entry in read_index(disk, path, header):
        if entry.kind is EntryKind.FRAME and entry.offset >= next_offset and entry.first > kept.first:
            waypoints.append(Waypoint(entry.first, entry.offset, entry.timestamp_high_ns))
            next_offset = entry.offset + stride_bytes
    return waypoints

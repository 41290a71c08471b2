"""Requests of readers to repair corrupt segments of a copy, for the process that fills the copy.

Each request is an empty file, named after the segment, in the directory `repairs` of the copy:

    repairs/log.X.Y.request

Invariants:
- A request stays until the segment was checked and, if it was corrupt, repaired.
- A request does not prevent trimming: a trimmed segment needs no repair.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from rt.log.disk import Disk
from rt.log.format.segment import SegmentId, parse_segment_name

REPAIRS_DIRECTORY: Final = "repairs"
_SUFFIX: Final = ".request"


def request_repair(disk: Disk, path: str, segment: SegmentId) -> None:
    """Request the repair of a segment of the copy in `path`. Raises `OSError` as the disk does."""
    disk.make_directory(os.path.join(path, REPAIRS_DIRECTORY))
    if not is_requested(disk, path, segment):
        with contextlib.suppress(FileExistsError):  # Another reader requested it.
            disk.create(_request_path(path, segment)).close()


def is_requested(disk: Disk, path: str, segment: SegmentId) -> bool:
    """Whether a repair of the segment is requested and not finished."""
    return disk.size(_request_path(path, segment)) is not None


def requested_repairs(disk: Disk, path: str) -> list[SegmentId]:
    """The segments of the copy in `path` whose repair is requested, oldest first."""
    try:
        names = disk.list_directory(os.path.join(path, REPAIRS_DIRECTORY))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (parse_segment_name(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX))
    return sorted(segment for segment in found if segment is not None)


def finish_repair(disk: Disk, path: str, segment: SegmentId) -> None:
    """Remove the request: the segment verifies again, or is trimmed."""
    with contextlib.suppress(FileNotFoundError):
        disk.remove(_request_path(path, segment))


def _request_path(path: str, segment: SegmentId) -> str:
    return os.path.join(path, REPAIRS_DIRECTORY, segment.file_name + _SUFFIX)

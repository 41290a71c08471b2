"""Positions that a copy of a merged log never received, because they were trimmed at the sender first.

File `skips` in the log directory, JSON: {"version": 1, "skips": [[first, end, "time"], …]}, the newest
`SKIPS_MAX`, oldest first; positions, and a name of `TrimReason`.

Invariants:
- A gap is recorded before the segment after it starts, so no reader finds the gap without its reason.
- The file only explains: an unreadable one is logged and ignored.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Final, NamedTuple

from rt.log.disk import Disk, storage_errors
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import read_file
from rt.log.whole_files import write_whole

SKIPS_FILE: Final = "skips"
SKIPS_MAX: Final = 1_000
_BYTES_MAX: Final = 1 << 20
_VERSION: Final = 1

logger = logging.getLogger("rt.log")


class GapReport(NamedTuple):
    """Positions `first` to `end` (exclusive) are missing for that reason."""

    first: int
    end: int
    reason: TrimReason


def record_skip(disk: Disk, path: str, skip: GapReport) -> None:
    """Record a gap. Durable on return. Raises storage errors."""
    known = [*read_skips(disk, path), skip][-SKIPS_MAX:]
    content = {"version": _VERSION, "skips": [[one.first, one.end, one.reason.name.lower()] for one in known]}
    with storage_errors(path, "noting what was skipped"):
        write_whole(disk, os.path.join(path, SKIPS_FILE), json.dumps(content).encode())


def read_skips(disk: Disk, path: str) -> list[GapReport]:
    """The recorded gaps, oldest first. Raises storage errors."""
    name = os.path.join(path, SKIPS_FILE)
    content = read_file(disk, name, _BYTES_MAX, doing="reading what was skipped")
    if content is None:
        return []
    try:
        stored = json.loads(content)
        if stored["version"] != _VERSION:
            raise ValueError(f"version {stored['version']}")
        return [
            GapReport(int(first), int(end), TrimReason[why.upper()]) for first, end, why in stored["skips"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("unreadable_skipped path=%s error=%r", name, str(error))
        return []


def reason_of(skips: list[GapReport], start: int, end: int) -> TrimReason | None:
    """Why part of positions `start` to `end` is missing: the newest reason; None if none is recorded."""
    return next((one.reason for one in reversed(skips) if one.first < end and one.end > start), None)

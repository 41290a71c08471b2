"""What a copy of a merged log never got, and why: it was trimmed at the sender first.

File `skips` beside the segments, JSON: {"version": 1, "skips": [[first, end, "time"], …]}, the newest
`SKIPS_MAX`, oldest first; positions, and a name of `TrimReason`. Laws: a skip is noted before the segment
behind it begins, so no reader meets the gap before its reason. The file only explains: what cannot be read
explains nothing, and says so in the log.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Final, NamedTuple

from rt.log.disk import Disk, storage_errors, write_whole
from rt.log.table import TrimReason

SKIPS_FILE: Final = "skips"
SKIPS_MAX: Final = 1_000
_BYTES_MAX: Final = 1 << 20
_VERSION: Final = 1

logger = logging.getLogger("rt.log")


class Skip(NamedTuple):
    """Positions `first` to `end`, which are gone for that reason."""

    first: int
    end: int
    reason: TrimReason


def note_skip(disk: Disk, path: str, skip: Skip) -> None:
    """Add a skip to the directory's; durable on return. Storage errors."""
    known = [*read_skips(disk, path), skip][-SKIPS_MAX:]
    content = {
        "version": _VERSION,
        "skips": [[one.first, one.end, one.reason.name.lower()] for one in known],
    }
    with storage_errors(path, "noting what was skipped"):
        write_whole(disk, os.path.join(path, SKIPS_FILE), json.dumps(content).encode())


def read_skips(disk: Disk, path: str) -> list[Skip]:
    """What was noted, oldest first. Storage errors."""
    name = os.path.join(path, SKIPS_FILE)
    with storage_errors(name, "reading what was skipped"):
        if disk.size(name) is None:
            return []
        file = disk.open(name)
        try:
            content = file.pread(_BYTES_MAX, 0)
        finally:
            file.close()
    try:
        told = json.loads(content)
        if told["version"] != _VERSION:
            raise ValueError(f"version {told['version']}")
        return [Skip(int(first), int(end), TrimReason[why.upper()]) for first, end, why in told["skips"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("skips_unreadable path=%s error=%r", name, str(error))
        return []


def reason_of(skips: list[Skip], start: int, end: int) -> TrimReason | None:
    """Why something of positions `start` to `end` was skipped: the newest reason; None if nothing was."""
    return next((one.reason for one in reversed(skips) if one.first < end and one.end > start), None)

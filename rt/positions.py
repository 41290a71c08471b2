"""A position in a file of its own: where a subscriber began, what it has acknowledged, what may be trimmed.

    offset  bytes  field
         0      8  magic: whose position it is
         8      8  position
        16      4  CRC-32C of bytes 0-15

Law: a crash leaves the old position or the new one; a damaged one is an error, never a beginning.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from rt.errors import Damaged
from rt.log.checksum import crc32c
from rt.log.disk import Disk, storage_errors, write_whole

ACKNOWLEDGED: Final = b"RTACKNOW"
BEGUN: Final = b"RTBEGUNS"
TRIMMABLE: Final = b"RTTRIMUP"

TRIMMABLE_FILE: Final = "trimmable"
"""In a copy that its subscriber trims: segments that end at or below this position may go."""

_RECORD = struct.Struct("<8sQI")


def write_position(disk: Disk, path: str, magic: bytes, position: int) -> None:
    """Keep `position`; durable on return. Storage errors."""
    record = _RECORD.pack(magic, position, 0)[:16]
    with storage_errors(path, "keeping a position"):
        write_whole(disk, path, record + crc32c(record).to_bytes(4, "little"))


def read_position(disk: Disk, path: str, magic: bytes) -> int | None:
    """The position that was kept; None if none was. `rt.Damaged`, storage errors."""
    with storage_errors(path, "reading a position"):
        if disk.size(path) is None:
            return None
        file = disk.open(path)
        try:
            data = file.pread(_RECORD.size, 0)
        finally:
            file.close()
    is_whole = len(data) == _RECORD.size and data[:8] == magic
    if not is_whole or crc32c(data[:16]) != int.from_bytes(data[16:], "little"):
        raise Damaged("a position fails its checksum", path=path, offset=0, hint="Give a position instead.")
    return int.from_bytes(data[8:16], "little")


def acknowledged_path(directory: str, name: str) -> str:
    """Where the subscriber of that name, which reads a log in `directory`, keeps what it has acknowledged."""
    return os.path.join(directory, f"acknowledged.{name}")


def begun_path(directory: str, name: str) -> str:
    """Where it keeps the position at which it began; that counts before it has acknowledged anything."""
    return os.path.join(directory, f"begun.{name}")


def read_needed(disk: Disk, directory: str, name: str) -> int | None:
    """From which position on that subscriber needs the log; None if there is none. As `read_position`."""
    acknowledged = read_position(disk, acknowledged_path(directory, name), ACKNOWLEDGED)
    if acknowledged is not None:
        return acknowledged
    return read_position(disk, begun_path(directory, name), BEGUN)

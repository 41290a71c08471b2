"""Positions that a subscriber keeps in files next to its log: start, acknowledged, trimmable.

    offset  bytes  field
         0      8  magic: which kind of position
         8      8  position
        16      4  CRC-32C of bytes 0-15

Invariants:
- After a crash a file holds the old position or the new one. A corrupt file is an error, not a missing one.
- Until a subscriber acknowledges, nodes hold the log back from its start position.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from rt.errors import Corrupt, InvalidOption
from rt.log.disk import Disk, storage_errors
from rt.log.format.checksum import crc32c
from rt.log.read.start_position import CheckedPlace
from rt.log.scan.directory import read_file
from rt.log.whole_files import write_whole_among_others


class SubscriberCursor:
    """Positions of subscriber `name`, which reads the log in `directory`. Methods raise storage errors."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self._disk, self._directory, self._name = disk, directory, name
        self._begun: int | None = None
        """The start position that was recorded last."""
        self._acknowledged = 0
        """The position that was acknowledged last. An explicit start may be lower than the stored one."""

    def resume(self) -> int | None:
        """The stored position; None if nothing was acknowledged."""
        found = read_position(self._disk, acknowledged_path(self._directory, self._name), ACKNOWLEDGED)
        self._acknowledged = found or 0
        return found

    def acknowledge(self, position: int) -> None:
        """Record that everything below is done. Durable on return.

        Raises `rt.InvalidOption` for a position below the one acknowledged last.
        """
        if position < self._acknowledged:
            raise InvalidOption(
                "a lower position was acknowledged after a higher one",
                where="ack",
                got=position,
                expected=f"{self._acknowledged} or more",
                hint="To read messages again, open the subscriber with position=.",
            )
        write_position(self._disk, acknowledged_path(self._directory, self._name), ACKNOWLEDGED, position)
        self._acknowledged = position

    def record_requested(self, start: CheckedPlace) -> None:
        """As `record_start`, if the position is known before a node was reached."""
        if start == "earliest" or isinstance(start, int):
            self.record_start(0 if start == "earliest" else start)

    def record_start(self, position: int) -> None:
        """Record the start position, unless something was acknowledged. Durable on return."""
        if self._begun == position:
            return
        path = acknowledged_path(self._directory, self._name)
        with storage_errors(path, "looking for a position"):
            if self._disk.size(path) is not None:
                return
        write_position(self._disk, begun_path(self._directory, self._name), BEGUN, position)
        self._begun = position


ACKNOWLEDGED: Final = b"RTACKNOW"
BEGUN: Final = b"RTBEGUNS"
TRIMMABLE: Final = b"RTTRIMUP"

TRIMMABLE_FILE: Final = "trimmable"
"""In a copy that its subscriber trims: segments that end at or below this position may be deleted."""

_RECORD = struct.Struct("<8sQI")


def write_position(disk: Disk, path: str, magic: bytes, position: int) -> None:
    """Store `position`. Durable on return. Raises storage errors.

    Subscribers of one name may share a copy, and the file.
    """
    record = _RECORD.pack(magic, position, 0)[:16]
    with storage_errors(path, "keeping a position"):
        write_whole_among_others(disk, path, record + crc32c(record).to_bytes(4, "little"))


def read_position(disk: Disk, path: str, magic: bytes) -> int | None:
    """The stored position; None if there is none. Raises `rt.Corrupt` and storage errors."""
    data = read_file(disk, path, _RECORD.size, doing="reading a position")
    if data is None:
        return None
    is_whole = len(data) == _RECORD.size and data[:8] == magic
    if not is_whole or crc32c(data[:16]) != int.from_bytes(data[16:], "little"):
        raise Corrupt(
            "the stored position fails its checksum",
            path=path,
            offset=0,
            hint="Open the subscriber with an explicit position.",
        )
    return int.from_bytes(data[8:16], "little")


def acknowledged_path(directory: str, name: str) -> str:
    return os.path.join(directory, f"acknowledged.{name}")


def begun_path(directory: str, name: str) -> str:
    return os.path.join(directory, f"begun.{name}")


def read_needed(disk: Disk, directory: str, name: str) -> int | None:
    """From which position this subscriber needs the log; None if unknown. Raises as `read_position`."""
    acknowledged = read_position(disk, acknowledged_path(directory, name), ACKNOWLEDGED)
    if acknowledged is not None:
        return acknowledged
    return read_position(disk, begun_path(directory, name), BEGUN)

"""Positions that a subscriber keeps in files next to its log: start, acknowledged, trimmable.

    offset  bytes  field
         0      8  magic: which kind of position
         8      2  version
        10      2  0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-31
        16      8  position
        24      4  number of an epoch in which the position is right; 4294967295: unknown
        28      4  0

Invariants:
- After a crash a file holds the old position or the new one. A corrupt file is an error, not a missing one.
- An acknowledged position goes back only if a reset was forced since: then positions have other messages.
- Until a subscriber acknowledges, nodes hold the log back from its start position.
"""

from __future__ import annotations

import os
import struct
from typing import Final, NamedTuple

from rt.cluster_epoch import generation_of_number
from rt.errors import Corrupt, InvalidOption, UnknownVersion
from rt.log.disk import Disk, storage_errors
from rt.log.format.checksum import around, sealed
from rt.log.format.constants import NEWER_HINT, VERSION
from rt.log.read.start_position import CheckedPlace
from rt.log.scan.directory import read_file
from rt.log.whole_files import write_whole_among_others


class StoredPosition(NamedTuple):
    """A position, and the number of an epoch in which it is right; None if that is unknown."""

    position: int
    epoch: int | None

    def is_before(self, other: StoredPosition) -> bool:
        """Whether it is lower, and as far as known no reset was forced between the two."""
        if self.epoch is None or other.epoch is None:
            return self.position < other.position
        is_later = generation_of_number(self.epoch) > generation_of_number(other.epoch)
        return self.position < other.position and not is_later


class SubscriberCursor:
    """Positions of subscriber `name`, which reads the log in `directory`. Methods raise storage errors."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self._disk, self._directory, self._name = disk, directory, name
        self._begun: int | None = None
        """The start position that was recorded last."""
        self._acknowledged = StoredPosition(0, None)
        """What was acknowledged last. An explicit start may be lower than the stored one."""

    def resume(self) -> StoredPosition | None:
        """The position that was acknowledged last; None if there is none."""
        found = read_position(self._disk, acknowledged_path(self._directory, self._name), ACKNOWLEDGED)
        if found is not None:
            self._acknowledged = found
        return found

    def acknowledge(self, position: int, epoch: int | None) -> None:
        """Record that everything below `position`, which is right in `epoch`, is done. Durable on return.

        Raises `rt.InvalidOption` for a position below the one acknowledged last.
        """
        done = StoredPosition(position, epoch)
        if done.is_before(self._acknowledged):
            raise InvalidOption(
                "a lower position was acknowledged after a higher one",
                where="ack",
                got=position,
                expected=f"{self._acknowledged.position} or more",
                hint="To read messages again, open the subscriber with position=.",
            )
        write_position(self._disk, acknowledged_path(self._directory, self._name), ACKNOWLEDGED, *done)
        self._acknowledged = done

    def record_requested(self, start: CheckedPlace) -> None:
        """Do the same as `record_start`, if the position is known before a node was reached."""
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
"""A file in a copy that its subscriber trims. Segments that end at or below its position may be deleted."""

_RECORD = struct.Struct("<8sHHIQI4x")
_EPOCH_UNKNOWN: Final = 0xFFFFFFFF


def write_position(disk: Disk, path: str, magic: bytes, position: int, epoch: int | None = None) -> None:
    """Store `position`, and `epoch` with it. Durable on return. Raises storage errors.

    Subscribers of one name may share a copy, and the file.
    """
    number = _EPOCH_UNKNOWN if epoch is None else epoch
    with storage_errors(path, "keeping a position"):
        record = sealed(_RECORD.pack(magic, VERSION, 0, 0, position, number))
        write_whole_among_others(disk, path, record)


def read_position(disk: Disk, path: str, magic: bytes) -> StoredPosition | None:
    """The stored position; None if there is none. Raises `rt.Corrupt`, `rt.UnknownVersion`, storage
    errors.
    """
    data = read_file(disk, path, _RECORD.size, doing="reading a position")
    if data is None:
        return None
    if len(data) != _RECORD.size or data[:8] != magic or data[12:16] != around(data).to_bytes(4, "little"):
        raise Corrupt(
            "the stored position fails its checksum",
            path=path,
            offset=0,
            hint="Open the subscriber with an explicit position.",
        )
    _, version, _, _, position, number = _RECORD.unpack(data)
    if version != VERSION:
        what = "unknown version of a stored position"
        raise UnknownVersion(what, where=path, got=version, expected=VERSION, hint=NEWER_HINT)
    return StoredPosition(position, None if number == _EPOCH_UNKNOWN else number)


def acknowledged_path(directory: str, name: str) -> str:
    return os.path.join(directory, f"acknowledged.{name}")


def begun_path(directory: str, name: str) -> str:
    return os.path.join(directory, f"begun.{name}")


def read_needed(disk: Disk, directory: str, name: str) -> int | None:
    """The position from which this subscriber needs the log; None if unknown. Raises as `read_position`."""
    found = read_position(disk, acknowledged_path(directory, name), ACKNOWLEDGED)
    if found is None:
        found = read_position(disk, begun_path(directory, name), BEGUN)
    return None if found is None else found.position

"""What a named subscriber remembers beside the log it reads: where it began, and what it has acknowledged.

Law: as long as it has acknowledged nothing, the log is held back for it from where it began.
"""

from __future__ import annotations

from rt.log.disk import Disk, storage_errors
from rt.positions import (
    ACKNOWLEDGED,
    BEGUN,
    acknowledged_path,
    begun_path,
    read_position,
    write_position,
)


class Cursor:
    """Of the subscriber `name`, which reads the log in `directory`. Storage errors."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self._disk, self._directory, self._name = disk, directory, name
        self._begun: int | None = None
        """What was noted last of where it began."""

    @property
    def acknowledged(self) -> int | None:
        """Everything below is done; None if nothing was ever acknowledged. `rt.Damaged`."""
        return read_position(self._disk, acknowledged_path(self._directory, self._name), ACKNOWLEDGED)

    def acknowledge(self, position: int) -> None:
        """Remember that everything below is done; durable on return."""
        write_position(self._disk, acknowledged_path(self._directory, self._name), ACKNOWLEDGED, position)

    def note_beginning(self, position: int) -> None:
        """Keep where it began, as long as it has acknowledged nothing; durable on return."""
        if self._begun == position:
            return
        path = acknowledged_path(self._directory, self._name)
        with storage_errors(path, "looking for a position"):
            if self._disk.size(path) is not None:
                return
        write_position(self._disk, begun_path(self._directory, self._name), BEGUN, position)
        self._begun = position

"""The file of a Raft log's next segment, made in advance, so that starting the segment needs no long write.

Invariants:
- `prepare` may run on another thread: it changes only the spare's own file, and sets `file` as its last step.
- A spare contains only zeros, written and synced into a new file, so no bytes of an old segment can appear.
- A spare gets a segment's name only after it has a header. Until then recovery removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from rt.log.disk import Disk, File, storage_errors

SPARE_FILE: Final = ".log.spare.new"

_ZEROS = memoryview(bytes(1 << 20))


def write_zeros(file: File, start: int, end: int) -> None:
    """Write zeros from `start` to `end`, without sync. After an `OSError` a part may be written."""
    while start < end:
        count = file.pwritev((_ZEROS[: end - start],), start)
        if count == 0:
            raise OSError(errno.ENOSPC, "nothing more could be written")
        start += count


class SpareSegment:
    """One spare. `prepare` may run on any thread; everything else on the log's thread."""

    def __init__(self, disk: Disk, directory: str, size_bytes: int) -> None:
        self.file: File | None = None
        """Zeros, synced. None before it is made."""
        self.has_failed = False
        self._disk, self._directory, self._size_bytes = disk, directory, size_bytes
        self._path = os.path.join(directory, SPARE_FILE)
        self._is_dropped = False

    def prepare(self) -> None:
        """Make the file. It is synced on return."""
        try:
            with storage_errors(self._path, "preparing a segment of the Raft log"):
                file = self._make()
        except BaseException:
            self.has_failed = True
            raise
        self.file = file
        if (
            self._is_dropped
        ):  # Dropped in the meantime. The second of the two threads sees the other's change.
            self.drop()

    def promote(self, path: str, header: bytes) -> File:
        """Make the file the segment `path`. Its header and name are durable on return.

        After an `OSError` the spare is removed; after ENOSPC `path` does not exist either.
        """
        file = self.file
        assert file is not None
        try:
            if file.pwritev((header,), 0) != len(header):
                raise OSError(errno.ENOSPC, "short write")
            file.sync()
            with self._disk.hold_directory(self._directory):
                self._disk.rename(self._path, path)
                try:
                    self._disk.sync_directory(self._directory)
                except OSError as error:
                    # The file already has its new name, so this cannot be retried as after a full disk.
                    raise OSError(errno.EIO, f"syncing the directory: {error.strerror}") from error
        except BaseException:
            self.drop()
            raise
        return file

    def drop(self) -> None:
        """Release and remove it. If it cannot be removed, the next opening removes it."""
        self._is_dropped = True
        if self.file is not None:
            self.file.close()
            with contextlib.suppress(OSError):
                self._disk.remove(self._path)

    def _make(self) -> File:
        if self._disk.size(self._path) is not None:
            self._disk.remove(self._path)
        file = self._disk.create(self._path)
        try:
            write_zeros(file, 0, self._size_bytes)
            file.sync()
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # On a full disk the file would use the last free bytes.
                self._disk.remove(self._path)
            raise
        return file

"""The file of a Raft log's next segment, made ahead, so that going on in it takes no long write.

Laws. The work of making it may run on another thread: it touches nothing but the spare's own file, and hands
it over by setting one attribute, last of all. A spare holds zeros that were written and synced, in a file
that is always new: bytes of an old segment never come back in it. Until it has a header it has no segment's
name, so recovery takes it for a leftover.
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
    """Write zeros from `start` to `end`; not synced. `OSError` as the disk raises it, a part may be there."""
    while start < end:
        count = file.pwritev((_ZEROS[: end - start],), start)
        if count == 0:
            raise OSError(errno.ENOSPC, "nothing more could be written")
        start += count


class SpareSegment:
    """One spare: `prepare` makes its file, on any thread; all else is for the log's thread."""

    def __init__(self, disk: Disk, directory: str, size_bytes: int) -> None:
        self.file: File | None = None
        """Of zeros, synced; None before it is made."""
        self.has_failed = False
        """There will never be a file."""
        self._disk, self._directory, self._size_bytes = disk, directory, size_bytes
        self._path = os.path.join(directory, SPARE_FILE)
        self._is_dropped = False

    def prepare(self) -> None:
        """Make the file; it is synced on return. After a storage error there is no spare."""
        try:
            with storage_errors(self._path, "preparing a segment of the Raft log"):
                file = self._make()
        except BaseException:
            self.has_failed = True
            raise
        self.file = file
        if self._is_dropped:  # Meanwhile: whoever of the two comes second sees the other.
            self.drop()

    def become(self, path: str, header: bytes) -> File:
        """Make the file the segment `path`, whose header and name are durable on return.

        `OSError` as the disk raises it: the spare is gone then, and if it is for want of space, so is `path`.
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
                    # It has its name already: this is no full disk that could be tried again.
                    raise OSError(errno.EIO, f"syncing the directory: {error.strerror}") from error
        except BaseException:
            self.drop()
            raise
        return file

    def drop(self) -> None:
        """Let go of it; a file that cannot be removed is a leftover for the next opening."""
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
            with contextlib.suppress(OSError):  # On a full disk it would keep the last free bytes.
                self._disk.remove(self._path)
            raise
        return file

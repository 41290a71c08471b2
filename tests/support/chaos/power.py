"""A disk of real files that can lose unsynced changes: `power_cut` undoes them after the process has
ended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from disks.wrapped_disk import WrappedDisk, WrappedFile

from chaos.power_journal import Journal
from rt.log.disk import REAL, Disk, File
from rt.log.format.constants import Buffer


class _UndoableFile(WrappedFile):
    __slots__ = ("_inode", "_is_honest", "_journal")

    def __init__(self, file: File, inode: int, journal: Journal, is_honest: bool) -> None:
        super().__init__(file)
        self._inode, self._journal, self._is_honest = inode, journal, is_honest

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._journal.lock:
            size = self._file.size()
            old = self._file.pread(min(length, size - offset), offset) if offset < size else b""
            self._journal.note("write", inode=self._inode, offset=offset, length=length, size=size, old=old)
            return self._file.pwritev(buffers, offset)

    def truncate(self, size: int) -> None:
        with self._journal.lock:
            before = self._file.size()
            old = self._file.pread(before - size, size) if size < before else b""
            self._journal.note("truncate", inode=self._inode, length=size, size=before, old=old)
            self._file.truncate(size)

    def sync(self) -> None:
        if not self._is_honest:
            return
        numbers = self._journal.data_of(self._inode)  # Before the sync, which may not cover later writes.
        self._file.sync()
        self._journal.settle(numbers)


class UndoableDisk(WrappedDisk):
    """The machine's file system. `cut_power` can undo changes made through this object and not synced.

    All files are in one directory, and only this object changes them. It continues the journal of an earlier
    process. It is as strict as `disks.MemoryDisk`: a sync of the directory makes a new name durable, a sync
    of the file does not. Created directories and lock files are durable at once.

    Files whose names start with one of `lies_about` never become durable, although `sync` returns.
    """

    def __init__(self, journal: str, disk: Disk = REAL, *, lies_about: Sequence[str] = ()) -> None:
        super().__init__(disk)
        self._journal = Journal(os.path.abspath(journal))
        self._lies_about = tuple(lies_about)

    def create(self, path: str) -> File:
        """Make a new file."""
        with self._journal.lock:
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._journal.note("create", path=os.path.abspath(path))
            return super().create(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file. A replaced file is kept until the rename is durable."""
        source, target = os.path.abspath(source), os.path.abspath(target)
        with self._journal.lock:
            os.lstat(source)
            kept = self._journal.keep(target) if os.path.lexists(target) else ""
            self._journal.note("rename", path=source, target=target, kept=kept)
            self._disk.rename(source, target)

    def remove(self, path: str) -> None:
        """Unlink a file. It is kept until the removal is durable."""
        path = os.path.abspath(path)
        with self._journal.lock:
            self._journal.note("remove", path=path, kept=self._journal.keep(path))
            self._disk.remove(path)

    def sync_directory(self, path: str) -> None:
        """Sync the names in a directory."""
        numbers = self._journal.names_of(os.path.abspath(path))
        self._disk.sync_directory(path)
        self._journal.settle(numbers)

    def wrapped(self, file: File, path: str, *, write: bool) -> File:
        """Wrap only files that are opened for writing."""
        is_honest = not os.path.basename(path).startswith(self._lies_about)
        return _UndoableFile(file, os.stat(path).st_ino, self._journal, is_honest) if write else file

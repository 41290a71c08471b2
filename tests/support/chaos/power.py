"""A disk of real files that can lose what was not synced: `power_cut` takes it back from a dead process."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

from chaos.power_journal import Journal
from rt.log.disk import REAL, Disk, File, Lock
from rt.log.format.constants import Buffer


class _UndoableFile:
    __slots__ = ("_file", "_inode", "_is_honest", "_journal")

    def __init__(self, file: File, inode: int, journal: Journal, is_honest: bool) -> None:
        self._file, self._inode, self._journal, self._is_honest = file, inode, journal, is_honest

    def pread(self, size: int, offset: int) -> bytes:
        return self._file.pread(size, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        return self._file.pread_into(buffer, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._journal.lock:
            size = self._file.size()
            old = self._file.pread(min(length, size - offset), offset) if offset < size else b""
            self._journal.note("write", inode=self._inode, offset=offset, length=length, size=size, old=old)
            return self._file.pwritev(buffers, offset)

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        data = source.pread(size, source_offset)
        return self.pwritev([data], offset) if data else 0

    def truncate(self, size: int) -> None:
        with self._journal.lock:
            before = self._file.size()
            old = self._file.pread(before - size, size) if size < before else b""
            self._journal.note("truncate", inode=self._inode, length=size, size=before, old=old)
            self._file.truncate(size)

    def sync(self) -> None:
        if not self._is_honest:
            return
        numbers = self._journal.data_of(self._inode)  # Before: what is written meanwhile may not be covered.
        self._file.sync()
        self._journal.settle(numbers)

    def uncache(self, offset: int, size: int) -> None:
        self._file.uncache(offset, size)

    def size(self) -> int:
        return self._file.size()

    def is_linked(self) -> bool:
        return self._file.is_linked()

    def close(self) -> None:
        self._file.close()


class UndoableDisk:
    """The machine's file system; what is changed through this and not synced, `cut_power` can take back.

    All files are in one directory, and this object is the only one that changes them. It takes up the
    journal that an earlier process left. As strict as `disks.MemoryDisk`: a new name is durable by the
    sync of its directory only, not by that of the file; but made directories and lock files are at once.

    Of files whose names begin with one of `lies_about` nothing is ever durable, though `sync` returns.
    """

    def __init__(self, journal: str, disk: Disk = REAL, *, lies_about: Sequence[str] = ()) -> None:
        self._disk = disk
        self._journal = Journal(os.path.abspath(journal))
        self._lies_about = tuple(lies_about)

    def open(self, path: str, *, write: bool = False) -> File:
        """Open; only what is opened to write is watched."""
        file = self._disk.open(path, write=write)
        return self._watched(file, path) if write else file

    def create(self, path: str) -> File:
        """Make a new file."""
        with self._journal.lock:
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._journal.note("create", path=os.path.abspath(path))
            return self._watched(self._disk.create(path), path)

    def rename(self, source: str, target: str) -> None:
        """Rename; a replaced file is kept until that is durable."""
        source, target = os.path.abspath(source), os.path.abspath(target)
        with self._journal.lock:
            os.lstat(source)
            kept = self._journal.keep(target) if os.path.lexists(target) else ""
            self._journal.note("rename", path=source, target=target, kept=kept)
            self._disk.rename(source, target)

    def remove(self, path: str) -> None:
        """Unlink; the file is kept until that is durable."""
        path = os.path.abspath(path)
        with self._journal.lock:
            self._journal.note("remove", path=path, kept=self._journal.keep(path))
            self._disk.remove(path)

    def make_directory(self, path: str) -> None:
        """Make it, durable at once as far as `cut_power` is concerned."""
        self._disk.make_directory(path)

    def list_directory(self, path: str) -> list[str]:
        """Names in a directory."""
        return self._disk.list_directory(path)

    def sync_directory(self, path: str) -> None:
        """Sync the names in a directory."""
        numbers = self._journal.names_of(os.path.abspath(path))
        self._disk.sync_directory(path)
        self._journal.settle(numbers)

    def hold_directory(self, path: str) -> AbstractContextManager[None]:
        """Hold it on the disk below."""
        return self._disk.hold_directory(path)

    def size(self, path: str) -> int | None:
        """Bytes in a file."""
        return self._disk.size(path)

    def lock(self, path: str) -> Lock:
        """Take a lock; its file is durable at once."""
        return self._disk.lock(path)

    def _watched(self, file: File, path: str) -> File:
        is_honest = not os.path.basename(path).startswith(self._lies_about)
        return _UndoableFile(file, os.stat(path).st_ino, self._journal, is_honest)

"""The disk as the log library sees it: a small protocol, and the real one.

Every change of a file or directory goes through here, so that a test can put `rt.testing.MemoryDisk` in its
place, cut the power between any two changes and look at what is left. Durability is the caller's: nothing
here syncs unless asked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Protocol

from rt.errors import DirectoryLocked, DiskFull, NotALog, StorageError, StorageFailed
from rt.log.layout import Buffer

COPY_BYTES = 2**20
"""What is copied at a time where the kernel does not do it."""

_NO_COPY = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What copy_file_range(2) says of files, or file systems, that it does not copy between."""


class File(Protocol):
    """An open file. Not thread-safe, but `sync` may run beside `pwritev` of another thread."""

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; the count, smaller only at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write `buffers` one behind the other at `offset`; the count, which may be smaller (disk full)."""

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        """Write at `offset` up to `size` bytes that `source` holds from `source_offset` on.

        In the kernel if it can. The count, which may be smaller at any time; 0 only where `source` ends.
        """

    def truncate(self, size: int) -> None:
        """Cut, or lengthen with zeros, to `size` bytes."""

    def sync(self) -> None:
        """Return when content and size are on the medium. A failure is final: never call it again."""

    def uncache(self, offset: int, size: int) -> None:
        """Nobody is expected to read these bytes: what of them is on the medium may leave memory. A hint."""

    def size(self) -> int:
        """Bytes in the file now."""

    def is_linked(self) -> bool:
        """Whether some directory still holds the file."""

    def close(self) -> None:
        """Release it. Closing twice is allowed."""


class Lock(Protocol):
    """An exclusive lock that ends with `close` or with the process."""

    def is_linked(self) -> bool:
        """Whether the lock's file is still there: where it was removed, another writer may have come in."""

    def close(self) -> None:
        """Give the lock back."""


class Disk(Protocol):
    """Files and directories. Paths are absolute or relative to the working directory.

    Methods raise `OSError` as the system does; `storage_errors` at the edge turns them into ours.
    """

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a regular file that exists, never through a symbolic link."""

    def create(self, path: str) -> File:
        """Make a new empty file (mode 0600) and open it for writing; `FileExistsError` if there is one."""

    def rename(self, source: str, target: str) -> None:
        """Atomically give `source` the name `target`, replacing what is there."""

    def remove(self, path: str) -> None:
        """Take a file's name away."""

    def make_directory(self, path: str) -> None:
        """Make a directory (mode 0700) and its missing parents; nothing if it is there."""

    def list_directory(self, path: str) -> list[str]:
        """Names in a directory, in any order."""

    def sync_directory(self, path: str) -> None:
        """Return when names made, renamed and removed in the directory are on the medium."""

    def size(self, path: str) -> int | None:
        """Bytes in the file, None if there is none."""

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock kept in the file `path` (made if missing); `BlockingIOError` if held."""


class _RealFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(self._fd, buffers, offset)

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        if isinstance(source, _RealFile):
            try:
                # A kernel may also say 0 where it cannot copy; then reading finds out.
                if count := os.copy_file_range(source._fd, self._fd, size, source_offset, offset):
                    return count
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
        data = source.pread(min(size, COPY_BYTES), source_offset)
        return self.pwritev([data], offset) if data else 0

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        if self._fd < 0:
            raise OSError(errno.EBADF, "the file is closed")
        os.fdatasync(self._fd)

    def uncache(self, offset: int, size: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def is_linked(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _RealLock(_RealFile):
    """Given back by who took it at once, whoever has a copy of its descriptor: a program that another thread
    is just starting has one until it runs. A forked child that closes its own takes nothing from the parent.
    """

    __slots__ = ("_pid",)

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._pid = os.getpid()

    def close(self) -> None:
        if self._fd >= 0 and os.getpid() == self._pid:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        super().close()


class RealDisk:
    """The machine's file system."""

    def open(self, path: str, *, write: bool = False) -> File:
        """Open; `O_NONBLOCK` so that a planted FIFO cannot hang us."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EISDIR, "not a regular file", path)
        return _RealFile(fd)

    def create(self, path: str) -> File:
        """Create exclusively."""
        return _RealFile(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        )

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, as the system does."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Unlink."""
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        """Make it and its parents, each made durable in its own parent.

        One that is there is made durable again: a process may have died between making and syncing it.
        """
        path = os.path.abspath(path)
        parent = os.path.dirname(path)
        if os.path.isdir(path):
            with contextlib.suppress(PermissionError):  # Then it is not ours, and somebody else made it.
                self.sync_directory(parent)
            return
        if os.path.isdir(parent) or not os.path.lexists(parent):
            self.make_directory(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        self.sync_directory(parent)

    def list_directory(self, path: str) -> list[str]:
        """Names, unsorted."""
        return os.listdir(path)

    def sync_directory(self, path: str) -> None:
        """Fsync the directory itself."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def size(self, path: str) -> int | None:
        """From lstat(2)."""
        try:
            return os.lstat(path).st_size
        except FileNotFoundError:
            return None

    def lock(self, path: str) -> Lock:
        """By flock: held by the open file, so a second lock in this very process is refused as well."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return _RealLock(fd)


REAL: Disk = RealDisk()

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def storage_error(error: OSError, path: str, doing: str) -> StorageError:
    """The system's `error` as one of rt's, naming `path` and what was being done."""
    got = f"{errno.errorcode.get(error.errno or 0, error.errno)} {error.strerror}"
    if error.errno in _FULL:
        return DiskFull(
            f"disk full while {doing}", where=path, got=got, hint="Free space; nothing written is lost."
        )
    if isinstance(error, BlockingIOError):
        hint = "One writer a directory: stop the other one."
        return DirectoryLocked(f"already in use while {doing}", where=path, hint=hint)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotALog(f"not found while {doing}", where=path, got=got)
    hint = "Mend the disk, then open it again; what was flushed is safe."
    return StorageFailed(f"the disk failed while {doing}", where=path, got=got, hint=hint)


@contextlib.contextmanager
def storage_errors(path: str, doing: str) -> Iterator[None]:
    """Raise the system's `OSError` as `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, doing) from error


def write_whole(disk: Disk, path: str, content: bytes) -> None:
    """Replace the file `path` by `content` so that a crash leaves the old or the new one; durable on return.

    Written aside, synced, renamed, directory synced.
    """
    directory = os.path.dirname(path) or "."
    aside = os.path.join(directory, f".{os.path.basename(path)}.new")
    if disk.size(aside) is not None:
        disk.remove(aside)
    file = disk.create(aside)
    try:
        try:
            if file.pwritev([content], 0) != len(content):
                raise OSError(errno.ENOSPC, "short write")
            file.sync()
        finally:
            file.close()
    except OSError:
        disk.remove(aside)  # On a full disk it would keep the last free bytes.
        raise
    disk.rename(aside, path)
    try:
        disk.sync_directory(directory)
    except OSError as error:
        # The new content is in place already: this is no full disk that could be tried again.
        raise OSError(errno.EIO, f"syncing the directory: {error.strerror}") from error

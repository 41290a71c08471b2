"""The disk as the log library uses it: a small protocol, and its implementation for real files.

Every change of a file or directory goes through it. So a test can use a disk in memory instead, cut
the power between any two changes and check the result. The caller is responsible for durability: nothing here
syncs unless asked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rt.child_process import no_fork
from rt.errors import (
    DirectoryLocked,
    DiskFull,
    LogNotFound,
    RtError,
    StorageError,
    StorageFailed,
    TooManyFiles,
)
from rt.log.format.constants import Buffer

COPY_BYTES = 2**20
"""Bytes to copy at a time if the kernel cannot copy."""

_NO_COPY = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of copy_file_range(2) for files or file systems that it cannot copy between."""


class File(Protocol):
    """An open file. Not thread-safe, except that `sync` may run during `pwritev` of another thread."""

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`. Returns the count, smaller only at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write `buffers` one after the other at `offset`. Returns the count, smaller if the disk is full."""

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        """Copy up to `size` bytes from `source_offset` of `source` to `offset` of this file, in the kernel if
        possible.

        Returns the count, which may be smaller at any time; 0 only at the end of `source`.
        """

    def truncate(self, size: int) -> None:
        """Cut, or extend with zeros, to `size` bytes."""

    def sync(self) -> None:
        """Return when content and size are on the medium. A failure is final: do not call it again."""

    def uncache(self, offset: int, size: int) -> None:
        """Hint: these bytes are not expected to be read, so synced pages of them may leave memory."""

    def is_cached(self, offset: int, size: int) -> bool:
        """Guess whether these bytes can be read without waiting for the medium."""

    def size(self) -> int: ...

    def is_linked(self) -> bool:
        """Whether the file still has a name in some directory."""

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""


class Lock(Protocol):
    """An exclusive lock that ends with `close` or with the process."""

    def is_linked(self) -> bool:
        """Whether the lock's file still exists. If it was removed, another writer may have started."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Files and directories. Paths are absolute or relative to the working directory.

    Methods raise `OSError` as the system does; callers convert it with `storage_errors`.
    """

    def open(self, path: str, *, write: bool = False) -> File:
        """Open an existing regular file, never through a symbolic link."""

    def create(self, path: str) -> File:
        """Create an empty file (mode 0600) and open it for writing; `FileExistsError` if it exists."""

    def rename(self, source: str, target: str) -> None:
        """Atomically rename `source` to `target`, replacing an existing file."""

    def remove(self, path: str) -> None: ...

    def make_directory(self, path: str) -> None:
        """Create a directory (mode 0700) and its missing parents. Does nothing if it exists."""

    def list_directory(self, path: str) -> list[str]:
        """Names in a directory, in any order."""

    def sync_directory(self, path: str) -> None:
        """Return when created, renamed and removed names in the directory are on the medium."""

    def hold_directory(self, path: str) -> AbstractContextManager[None]:
        """Keep the directory open, so that this thread can sync it inside the block without a new descriptor.

        Raises on entry if no descriptor is left. May be nested for different directories.
        """

    def size(self, path: str) -> int | None:
        """The size of the file in bytes; None if there is none."""

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock in the file `path` (created if missing). `BlockingIOError` if held."""


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
                # A kernel may also return 0 if it cannot copy. So after a 0, a read decides whether this is
                # the end.
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

    def is_cached(self, offset: int, size: int) -> bool:
        byte = bytearray(1)
        try:
            for at in (offset, max(offset, offset + size - 1)):
                os.preadv(self._fd, [byte], at, os.RWF_NOWAIT)
        except OSError:  # Not in memory, or the file system cannot tell.
            return False
        return True

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def is_linked(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Readers are often dropped without a close."""
        self.close()


class _RealLock(_RealFile):
    """`close` unlocks at once, even if another thread is starting a child process that still has a copy of
    the descriptor. A forked child closes its copy, and this does not unlock the parent's lock. The child must
    close it, because a lock must not outlive the process that has taken it.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        _locks.add(self)

    def take(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        super().close()

    def disown(self) -> None:
        """In a forked child."""
        super().close()


_locks: weakref.WeakSet[_RealLock] = weakref.WeakSet()


def _disown_locks() -> None:
    for lock in list(_locks):
        with contextlib.suppress(OSError):  # Another thread of the parent was closing it.
            lock.disown()
    _locks.clear()


os.register_at_fork(after_in_child=_disown_locks)


class RealDisk:
    def open(self, path: str, *, write: bool = False) -> File:
        """Uses `O_NONBLOCK`, so that a FIFO at the path cannot block."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EISDIR, "not a regular file", path)
        return _RealFile(fd)

    def create(self, path: str) -> File:
        return _RealFile(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        )

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        """Create it and its parents, each made durable in its own parent.

        An existing one is synced again: a process may have died between creating and syncing it.
        """
        path = os.path.abspath(path)
        parent = os.path.dirname(path)
        if os.path.isdir(path):
            with contextlib.suppress(PermissionError):  # Then another user created it.
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
        return os.listdir(path)

    def sync_directory(self, path: str) -> None:
        held: int | None = vars(_held).get(path)
        if held is not None:
            os.fsync(held)
            return
        fd = _open_directory(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def hold_directory(self, path: str) -> Iterator[None]:
        held: dict[str, int] = vars(_held)
        fd = held[path] = _open_directory(path)
        try:
            yield
        finally:
            del held[path]
            os.close(fd)

    def size(self, path: str) -> int | None:
        try:
            return os.lstat(path).st_size
        except FileNotFoundError:
            return None

    def lock(self, path: str) -> Lock:
        """Uses flock: the open file holds the lock, so a second lock in the same process fails too."""
        with no_fork:
            lock = _RealLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            try:
                lock.take()
            except BaseException:
                lock.close()
                raise
        return lock


_held = threading.local()
"""For each thread, the descriptors of the directories that it holds, by path."""


def _open_directory(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


REAL: Disk = RealDisk()

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_UNUSABLE = frozenset({errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST, errno.EISDIR, errno.ESPIPE})
OPEN_AGAIN = "Open the publisher or reader again, or restart the node."


def storage_error(error: OSError, path: str, doing: str) -> StorageError:
    """Convert the system's `error` to one of rt's, with `path` and what was being done.

    If a file of the directory `path` cannot be opened, the error names the file instead.
    """
    got = f"{errno.errorcode.get(error.errno or 0, error.errno)} {error.strerror}"
    if error.errno in _FULL:
        hint = "Free space, then try again. Written messages are safe."
        return DiskFull(f"disk full while {doing}", where=path, got=got, hint=hint)
    if error.errno in _NO_DESCRIPTOR:
        hint = "Nothing is lost: try again. `ulimit -n` says how many files a process may have open."
        return TooManyFiles(f"no file descriptor left while {doing}", where=path, got=got, hint=hint)
    if isinstance(error, BlockingIOError):
        hint = "A directory has one writer: stop the other one."
        return DirectoryLocked(f"already in use while {doing}", where=path, hint=hint)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if (obstacle := _obstacle(path, error)) is None:
            return LogNotFound(f"not found while {doing}", where=path, got=got)
        hint = f"{obstacle} Move it away, or choose another path."
        return StorageFailed(f"this path cannot be used, while {doing}", where=path, got=got, hint=hint)
    if isinstance(name := error.filename, str) and name.startswith(os.path.join(path, "")):
        path = name
    if isinstance(error, PermissionError):
        hint = "Give the user of this process the right to it; `ls -ld` shows owner and mode."
        return StorageFailed(f"no permission while {doing}", where=path, got=got, hint=hint)
    if error.errno in _UNUSABLE:
        hint = "Choose another path, or move away what is there."
        return StorageFailed(f"this path cannot be used, while {doing}", where=path, got=got, hint=hint)
    if error.errno == errno.EROFS:
        hint = f"Mount it for writing; an error of the disk may be why it is not (`dmesg`). {OPEN_AGAIN}"
        return StorageFailed(f"the file system is read-only, while {doing}", where=path, got=got, hint=hint)
    hint = f"Repair the disk. {OPEN_AGAIN} Flushed messages are safe."
    return StorageFailed(f"the disk failed while {doing}", where=path, got=got, hint=hint)


def _obstacle(path: str, error: OSError) -> str | None:
    """The obstacle where `path` needs a directory: a file, or a link to a missing target. None if there is
    none.
    """
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):  # It has just been removed.
        if os.path.islink(path) and not os.path.exists(path):
            return f"{path} is a link to {os.readlink(path)}, where nothing is."
    is_file = isinstance(error, NotADirectoryError) and path and not os.path.isdir(path)
    return f"{path} is not a directory." if is_file else None


@contextlib.contextmanager
def storage_errors(path: str, doing: str) -> Iterator[None]:
    """Convert `OSError` with `storage_error`. rt's own errors stay: `rt.Timeout` is an `OSError` too."""
    try:
        yield
    except RtError:
        raise
    except OSError as error:
        raise storage_error(error, path, doing) from error

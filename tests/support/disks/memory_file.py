"""Open files and locks of `MemoryDisk`."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from disks.faults import Operation, PowerCut, os_error
from disks.inode import Inode, Truncate, Write
from rt.log.disk import File
from rt.log.format.constants import Buffer

BUFFERS_MAX: Final = 1024
"""IOV_MAX of Linux: the limit of pwritev(2)."""


class Around(Protocol):
    """The disk, as its files see it. The files call it while they hold `guard`."""

    guard: threading.RLock
    changes: int
    used_bytes: int

    def count_call(self, operation: Operation) -> None:
        """Count a call of the program, and raise the fault configured for it."""

    def require_power(self) -> None:
        """Raise `PowerCut` if the power is off."""

    def fitting(self, size: int, offset: int, wanted: int) -> int:
        """Return how many of `wanted` bytes fit at `offset` in a file of `size`. ENOSPC if none fits."""

    def require_room(self, growth: int) -> None:
        """Raise ENOSPC unless a file may grow by `growth`."""

    def release(self, inode: Inode) -> None:
        """A file was closed: release its space if it has no name left."""


class MemoryFile:
    __slots__ = ("_disk", "_inode", "_is_closed", "_is_writable")

    def __init__(self, disk: Around, inode: Inode, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._is_writable = write
        self._is_closed = False
        inode.opened += 1

    def pread(self, size: int, offset: int) -> bytes:
        with self._disk.guard:
            inode = self._usable(size, offset)
            self._disk.count_call("pread")
            with memoryview(inode.content) as content:
                return bytes(content[offset : offset + size])

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer. Returns the number of bytes."""
        with self._disk.guard:
            inode = self._usable(offset)
            self._disk.count_call("pread")
            with memoryview(inode.content) as content:
                found = content[offset : offset + len(buffer)]
                buffer[: len(found)] = found
                return len(found)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write up to the free space. Returns the number of bytes."""
        with self._disk.guard:
            self._usable(offset, BUFFERS_MAX - len(buffers))
            return self._write_fitting("pwritev", b"".join(buffers), offset)

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        """Copy from another file, up to the free space. Returns the number of bytes."""
        with self._disk.guard:
            self._usable(offset, source_offset, size)
            data = source.pread(size, source_offset)
            return self._write_fitting("copy_from", data, offset) if data else 0

    def _write_fitting(self, operation: Operation, data: bytes, offset: int) -> int:
        """Write `data` up to the free space, as one change. Returns the number of bytes."""
        if not self._is_writable:
            raise os_error(errno.EBADF)
        try:
            self._disk.count_call(operation)
        except PowerCut:
            # A part of the write takes effect: a prefix, chosen by the number of the change.
            self._write(data[: random.Random(self._disk.changes).randint(0, len(data))], offset)
            raise
        fitting = self._disk.fitting(len(self._inode.content), offset, len(data))
        self._write(data[:fitting], offset)
        return fitting

    def truncate(self, size: int) -> None:
        with self._disk.guard:
            inode = self._usable(size)
            if not self._is_writable:
                raise os_error(errno.EINVAL)  # as ftruncate(2), while pwritev(2) returns EBADF
            self._disk.count_call("truncate")
            self._disk.require_room(size - len(inode.content))
            self._change(Truncate(size))

    def sync(self) -> None:
        """Make content and size durable. See `MemoryDisk` for a failed sync."""
        with self._disk.guard:
            inode = self._usable()
            try:
                self._disk.count_call("sync")
            except OSError:
                # As on Linux: the pages count as clean from now on, so no later sync writes them.
                inode.pending.clear()
                raise
            inode.sync()

    def uncache(self, offset: int, size: int) -> None:
        with self._disk.guard:
            self._usable(offset, size)

    def is_cached(self, offset: int, size: int) -> bool:
        with self._disk.guard:
            self._usable(offset, size)
        return True

    def size(self) -> int:
        with self._disk.guard:
            return len(self._usable().content)

    def is_linked(self) -> bool:
        with self._disk.guard:
            return self._usable().is_linked

    def close(self) -> None:
        with self._disk.guard:
            self._disk.require_power()
            if not self._is_closed:
                self._is_closed = True
                self._inode.opened -= 1
                self._disk.release(self._inode)

    def _usable(self, *not_negative: int) -> Inode:
        self._disk.require_power()
        if self._is_closed:
            raise os_error(errno.EBADF)
        if any(number < 0 for number in not_negative):
            raise os_error(errno.EINVAL)
        return self._inode

    def _write(self, data: bytes, offset: int) -> None:
        if data:  # otherwise even the size stays
            self._change(Write(offset, data))

    def _change(self, change: Write | Truncate) -> None:
        before = len(self._inode.content)
        self._inode.change(change)
        self._disk.used_bytes += len(self._inode.content) - before


class MemoryLock:
    """A held lock: an open file that frees its inode's lock when it closes."""

    __slots__ = ("_file", "_inode")

    def __init__(self, disk: Around, inode: Inode) -> None:
        inode.is_locked = True
        self._inode: Inode | None = inode
        self._file = MemoryFile(disk, inode, write=True)

    def is_linked(self) -> bool:
        return self._file.is_linked()

    def close(self) -> None:
        self._file.close()
        if self._inode is not None:
            self._inode.is_locked = False
            self._inode = None

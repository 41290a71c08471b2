"""A disk that wraps another disk. Subclasses override the methods that they change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from rt.log.disk import Disk, File, Lock
from rt.log.format.constants import Buffer


class WrappedFile:
    """A file that forwards to a file of the wrapped disk."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def pread(self, size: int, offset: int) -> bytes:
        return self._file.pread(size, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        return self._file.pread_into(buffer, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._file.pwritev(buffers, offset)

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        """Copy through memory, so that the copy is a write like any other."""
        data = source.pread(size, source_offset)
        return self.pwritev([data], offset) if data else 0

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def sync(self) -> None:
        self._file.sync()

    def uncache(self, offset: int, size: int) -> None:
        self._file.uncache(offset, size)

    def is_cached(self, offset: int, size: int) -> bool:
        return self._file.is_cached(offset, size)

    def size(self) -> int:
        return self._file.size()

    def is_linked(self) -> bool:
        return self._file.is_linked()

    def close(self) -> None:
        self._file.close()


class WrappedDisk:
    """A disk that forwards to another disk. `wrapped` makes the results of `open` and `create`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def wrapped(self, file: File, path: str, *, write: bool) -> File:
        raise NotImplementedError

    def open(self, path: str, *, write: bool = False) -> File:
        return self.wrapped(self._disk.open(path, write=write), path, write=write)

    def create(self, path: str) -> File:
        return self.wrapped(self._disk.create(path), path, write=True)

    def rename(self, source: str, target: str) -> None:
        self._disk.rename(source, target)

    def remove(self, path: str) -> None:
        self._disk.remove(path)

    def make_directory(self, path: str) -> None:
        self._disk.make_directory(path)

    def list_directory(self, path: str) -> list[str]:
        return self._disk.list_directory(path)

    def sync_directory(self, path: str) -> None:
        self._disk.sync_directory(path)

    def hold_directory(self, path: str) -> AbstractContextManager[None]:
        return self._disk.hold_directory(path)

    def size(self, path: str) -> int | None:
        return self._disk.size(path)

    def lock(self, path: str) -> Lock:
        return self._disk.lock(path)

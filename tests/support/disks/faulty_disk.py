"""`FaultyDisk`: makes any disk fail."""

from __future__ import annotations

from collections.abc import Sequence

from disks.faults import Faults
from disks.wrapped_disk import WrappedDisk, WrappedFile
from rt.log.disk import Disk, File, Lock
from rt.log.format.constants import Buffer


class _FaultyFile(WrappedFile):
    """A file of the underlying disk, with the faults of a `FaultyDisk`."""

    __slots__ = ("_disk",)

    def __init__(self, disk: FaultyDisk, file: File) -> None:
        super().__init__(file)
        self._disk = disk

    def pread(self, size: int, offset: int) -> bytes:
        self._disk.check("pread")
        return self._file.pread(size, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        self._disk.check("pread")
        return self._file.pread_into(buffer, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._disk.check("pwritev")
        wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._disk.guard:
            before = self._file.size()
            fitting = self._disk.fitting(before, offset, wanted)
            written = self._file.pwritev(
                buffers if fitting == wanted else [b"".join(buffers)[:fitting]], offset
            )
            self._disk.used_bytes += self._file.size() - before
        return written

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:
        self._disk.check("copy_from")
        below = source._file if isinstance(source, _FaultyFile) else source
        with self._disk.guard:
            before = self._file.size()
            fitting = self._disk.fitting(before, offset, size)
            written = self._file.copy_from(below, source_offset, fitting, offset)
            self._disk.used_bytes += self._file.size() - before
        return written

    def truncate(self, size: int) -> None:
        self._disk.check("truncate")
        with self._disk.guard:
            before = self._file.size()
            self._disk.require_room(size - before)
            self._file.truncate(size)
            self._disk.used_bytes += size - before

    def sync(self) -> None:
        self._disk.check("sync")
        self._file.sync()


class FaultyDisk(Faults, WrappedDisk):
    """Adds faults and a space limit to any disk: `FaultyDisk(RealDisk())` for real files.

    Removing a name releases its space, even while the file is open. Thread-safe if the underlying disk is.
    """

    def __init__(self, disk: Disk, capacity_bytes: int | None = None) -> None:
        Faults.__init__(self, capacity_bytes)
        WrappedDisk.__init__(self, disk)

    def wrapped(self, file: File, path: str, *, write: bool) -> File:
        return _FaultyFile(self, file)

    def open(self, path: str, *, write: bool = False) -> File:
        self.check("open")
        return super().open(path, write=write)

    def create(self, path: str) -> File:
        self.check("create")
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self.check("rename")
        replaced_bytes = self._disk.size(target) or 0 if source != target else 0
        self._disk.rename(source, target)
        self._give_back(replaced_bytes)

    def remove(self, path: str) -> None:
        self.check("remove")
        removed_bytes = self._disk.size(path) or 0
        self._disk.remove(path)
        self._give_back(removed_bytes)

    def make_directory(self, path: str) -> None:
        self.check("make_directory")
        self._disk.make_directory(path)

    def list_directory(self, path: str) -> list[str]:
        self.check("list_directory")
        return self._disk.list_directory(path)

    def sync_directory(self, path: str) -> None:
        self.check("sync_directory")
        self._disk.sync_directory(path)

    def lock(self, path: str) -> Lock:
        self.check("lock")
        return self._disk.lock(path)

    def _give_back(self, count: int) -> None:
        with self.guard:
            self.used_bytes -= count

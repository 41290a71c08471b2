"""Running out of file descriptors is a retriable overload, and a path error is not called a failed disk."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk

from rt.errors import StorageFailed, TooManyFiles
from rt.log.disk import REAL, Disk, File, Lock, storage_error
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.write.writer import BatchFrames, LogWriter

IDENTITY = LogIdentity(LogKind.SESSION, bytes(range(16)), "feed")


class Descriptors:
    """A disk that counts each call that takes a descriptor. Call number `refused` and later ones raise."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._held: set[str] = set()
        self.refused: int | None = None
        self.taken = 0

    def _take(self) -> None:
        self.taken += 1
        if self.refused is not None and self.taken >= self.refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def open(self, path: str, *, write: bool = False) -> File:
        self._take()
        return self._disk.open(path, write=write)

    def create(self, path: str) -> File:
        self._take()
        return self._disk.create(path)

    def lock(self, path: str) -> Lock:
        self._take()
        return self._disk.lock(path)

    def list_directory(self, path: str) -> list[str]:
        self._take()
        return self._disk.list_directory(path)

    def sync_directory(self, path: str) -> None:
        if path not in self._held:
            self._take()
        self._disk.sync_directory(path)

    @contextmanager
    def hold_directory(self, path: str) -> Iterator[None]:
        self._take()
        self._held.add(path)
        try:
            yield
        finally:
            self._held.discard(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_exhausted_descriptors_map_to_retriable_too_many_files(code: int) -> None:
    found = storage_error(OSError(code, os.strerror(code)), "/a", "opening")
    assert isinstance(found, TooManyFiles)
    assert not isinstance(found, StorageFailed)
    assert found.retriable
    assert found.grpc_status == "RESOURCE_EXHAUSTED"
    assert "ulimit" in str(found)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_missing_permission_is_not_reported_as_failed_disk(code: int) -> None:
    found = storage_error(OSError(code, os.strerror(code)), "/a", "listing a directory")
    assert isinstance(found, StorageFailed)
    assert "no permission while listing a directory (at /a)" in str(found)
    assert "Repair the disk" not in str(found)


@pytest.mark.parametrize("code", [errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST, errno.EISDIR])
def test_unusable_path_is_not_reported_as_failed_disk(code: int) -> None:
    found = storage_error(OSError(code, os.strerror(code)), "/a", "opening a log directory")
    assert isinstance(found, StorageFailed)
    assert str(found).startswith("this path cannot be used, while opening a log directory (at /a)")
    assert "Repair the disk" not in str(found)


def test_failed_disk_error_hints_to_reopen_and_full_disk_error_to_retry() -> None:
    failed = storage_error(OSError(errno.EIO, os.strerror(errno.EIO)), "/a", "writing")
    assert "Repair the disk. Open the publisher or reader again, or restart the node." in str(failed)
    full = storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "/a", "writing")
    assert str(full).endswith("Free space, then try again. Written messages are safe.")


def grow(writer: LogWriter) -> None:
    """Roll and trim, so that every kind of file of a log directory is created, replaced or removed."""
    roll = writer.end + 1
    writer.start(SegmentId(0, roll), first=writer.end, created_ns=1)
    writer.append([BatchFrames([bytes(64)], writer.end + 1, 1, 1)])
    writer.sync()
    writer.trim(SegmentId(0, max(0, roll - 1)), TrimReason.MERGED)


def test_writer_continues_with_same_segments_after_any_refused_descriptor() -> None:
    whole = MemoryDisk()
    writer = LogWriter.open("/s", IDENTITY, disk=(counting := Descriptors(whole)))
    writer.start(SegmentId(0, 0), first=0, created_ns=1)
    for _ in range(2):
        grow(writer)
    before = counting.taken
    grow(writer)
    steps = counting.taken - before
    assert steps > 5
    wanted = [(one.id, one.first, one.end, one.is_trimmed) for one in writer.table.segments]
    for step in range(1, steps + 1):
        disk = Descriptors(MemoryDisk())
        writer = LogWriter.open("/s", IDENTITY, disk=disk)
        writer.start(SegmentId(0, 0), first=0, created_ns=1)
        for _ in range(2):
            grow(writer)
        disk.refused = disk.taken + step
        with suppress(TooManyFiles):
            grow_again(writer)
        disk.refused = None
        grow_again(writer)
        assert [(one.id, one.first, one.end, one.is_trimmed) for one in writer.table.segments] == wanted
        writer.close()


def grow_again(writer: LogWriter) -> None:
    """Do what `grow` does, from the refused step on."""
    target = SegmentId(0, 3)
    if writer.active is None or writer.active.id != target:
        writer.start(target, first=writer.end, created_ns=1)
    if writer.end < 3:
        writer.append([BatchFrames([bytes(64)], 3, 1, 1)])
        writer.sync()
    writer.trim(SegmentId(0, 2), TrimReason.MERGED)


def test_segment_start_refused_for_descriptors_leaves_no_file_and_next_start_succeeds() -> None:
    step = 0
    while True:
        step += 1
        memory = MemoryDisk()
        disk = Descriptors(memory)
        writer = LogWriter.open("/s", IDENTITY, disk=disk, resume=True)
        writer.start(SegmentId(0, 0), first=0, created_ns=1)
        disk.refused = disk.taken + step
        try:
            writer.start(SegmentId(0, 1), first=0, created_ns=1)
            break
        except TooManyFiles:
            assert "/s/log.0.1" not in memory.paths()
        disk.refused = None
        # The source of this copy has trimmed the other segment.
        writer.start(SegmentId(0, 2), first=0, created_ns=1)
        writer.seal()
        writer.close()
        with closing(LogWriter.open("/s", IDENTITY, disk=disk, resume=True)) as writer:
            assert [one.id.roll for one in writer.table.segments] == [0, 2]
    assert step > 3


def test_log_open_refused_for_descriptors_succeeds_on_retry() -> None:
    plain = Descriptors(MemoryDisk())
    LogWriter.open("/s", IDENTITY, disk=plain).close()
    for step in range(1, plain.taken + 1):
        disk = Descriptors(MemoryDisk())
        disk.refused = step
        with pytest.raises(TooManyFiles):
            LogWriter.open("/s", IDENTITY, disk=disk)
        disk.refused = None
        LogWriter.open("/s", IDENTITY, disk=disk).close()


SCRIPT = """
import os, resource, sys
from rt.errors import TooManyFiles
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.write.writer import LogWriter
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
writer = LogWriter.open(sys.argv[1], LogIdentity(LogKind.SESSION, bytes(16), "feed"))
writer.start(SegmentId(0, 0), first=0)
spare = []
for free in range(12):
    while True:
        try:
            spare.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    for _ in range(free):
        os.close(spare.pop())
    roll = writer.active.id.roll
    try:
        writer.start(SegmentId(0, roll + 1), first=0)
        print("done", free)
    except TooManyFiles:
        print("refused", free)
    for fd in spare:
        os.close(fd)
    spare = []
    if writer.active.id.roll == roll:
        writer.start(SegmentId(0, roll + 1), first=0)
"""


def test_process_at_descriptor_limit_is_refused_and_then_continues(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 64
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "s")], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert said[0] == "refused 0"
    assert said[-1] == "done 11"
    assert REAL.size(str(tmp_path / "s" / "log.0.12")) is not None

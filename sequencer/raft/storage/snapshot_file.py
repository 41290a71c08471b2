"""The files of snapshots: written under a temporary name, and read. `snapshots` knows which one is used."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Final

from rt.log.disk import Disk, File, storage_errors
from rt.log.format.constants import Buffer
from sequencer.raft.storage.sealed_head import damaged
from sequencer.raft.storage.snapshot_format import SNAPSHOT_HEADER_BYTES, SnapshotMeta, encode_snapshot_header

_CALL_BYTES_MAX: Final = 1 << 30
"""Bytes of one read or write call. Linux moves at most 2 GiB less a page."""


class PendingSnapshot:
    """A snapshot that is not used yet: the header, then the appended content. Raises `OSError`.

    Ends with `on_named` after the caller renamed the file, or with `discard`.
    """

    def __init__(self, disk: Disk, path: str, meta: SnapshotMeta) -> None:
        self.path = path
        self.meta = meta
        self.size = 0  # of the content
        self.is_over = False
        self._disk = disk
        self._file = disk.create(path)
        with self.discarded_on_error():
            _write_all(self._file, encode_snapshot_header(meta), 0)

    def append(self, data: Buffer) -> None:
        with self.discarded_on_error():
            _write_all(self._file, data, SNAPSHOT_HEADER_BYTES + self.size)
        self.size += len(data)

    def sync(self) -> None:
        """Sync the content, not the name."""
        with self.discarded_on_error(), synced():
            self._file.sync()

    def content(self) -> bytes:
        with self.discarded_on_error():
            return read_exactly(self._file, self.size, SNAPSHOT_HEADER_BYTES)

    def on_named(self) -> None:
        self.is_over = True
        self._file.close()

    def discard(self) -> None:
        """Remove it. If that fails, the next start removes it."""
        if not self.is_over:
            self.is_over = True
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._disk.remove(self.path)

    @contextlib.contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Discard it if the body fails. A simulated power cut is no `Exception` and discards nothing."""
        try:
            yield
        except Exception:
            self.discard()
            raise


class SnapshotReader:
    """One snapshot, readable until `close` even if a newer one replaced it. For one thread."""

    def __init__(self, meta: SnapshotMeta, path: str, file: File) -> None:
        self.meta = meta
        self.path = path
        self._file = file

    def read_at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes of the content from `offset`, fewer only at its end. The digest is not verified.

        Raises `rt.Corrupt` if the file is shorter than the content.
        """
        if offset < 0 or size < 0:
            raise ValueError(f"{size} bytes at {offset}")
        expected = min(size, max(0, self.meta.length - offset))
        with storage_errors(self.path, "reading a snapshot"):
            data = read_exactly(self._file, expected, SNAPSHOT_HEADER_BYTES + offset)
        if len(data) < expected:
            end = SNAPSHOT_HEADER_BYTES + offset + len(data)
            raise damaged("truncated snapshot", self.path, len(data), expected, offset=end)
        return data

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


@contextlib.contextmanager
def synced() -> Iterator[None]:
    """Make every error of a sync final: a sync may not be retried, even after a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(errno.EIO, f"sync: {error.strerror}") from error


def read_exactly(file: File, size: int, offset: int) -> bytes:
    """Read `size` bytes from `offset`; fewer only at the end of the file."""
    data = file.pread(min(size, _CALL_BYTES_MAX), offset)
    if len(data) == size or not data:
        return data
    pieces, done = [data], len(data)
    while done < size and (data := file.pread(min(size - done, _CALL_BYTES_MAX), offset + done)):
        pieces.append(data)
        done += len(data)
    return b"".join(pieces)


def _write_all(file: File, data: Buffer, offset: int) -> None:
    left = memoryview(data)
    while left:
        count = file.pwritev([left[:_CALL_BYTES_MAX]], offset)
        if count == 0:
            raise OSError(errno.ENOSPC, "nothing could be written")
        left, offset = left[count:], offset + count

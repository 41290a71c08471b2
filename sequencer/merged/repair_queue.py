"""Repairs corrupt segments of this node with good bytes from peers. Bytes from the corruption on are not
served.

Invariants:
- Only the part of a segment before its corruption is served.
- A corrupt segment stays as it is until verified bytes of the same segment are here. Then only the bytes
  that differ are overwritten.
- If the replica of a peer differs from the valid part here, the process ends.
- While no peer has good bytes, peers are asked again and everything else continues. Data may be given up only
  if it can be obtained elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple

from msgspec import Struct

from replicator.protocol.run_in_thread import run_to_end
from rt.errors import Corrupt, Diverged, LogNotFound, RtError, StorageFailed, Timeout, TooManyFiles
from rt.log.disk import REAL, Disk, File, RealDisk, storage_errors
from rt.log.format.constants import Buffer
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId, parse_segment_name
from rt.log.write.segment_repair import repair_segment, synced_end, valid_end
from rt.net.grpc_errors import Unreachable

AGAIN_S_MIN: Final = 0.5
AGAIN_S_MAX: Final = 30.0
"""Pause between two attempts to repair a segment: it doubles from the minimum to the maximum."""
logger = logging.getLogger("sequencer")

Fetch = Callable[[str, SegmentId, str, int], Awaitable[None]]
"""`fetch(directory, segment, aside, end)`: copy a verified replica of a segment up to `end`, or as much of it
as any peer has, into the new directory `aside`. Raises the errors of peers."""


class CorruptFiles(dict[str, Corrupt]):
    """The corrupt files, by absolute path. Any thread may read this."""

    def add(self, path: str, error: Corrupt) -> bool:
        """Add a corrupt file. Returns whether it was not known as corrupt yet."""
        return self.setdefault(path, error) is error

    def record_valid_end(self, path: str, offset: int) -> None:
        """Record that a corrupt file verifies up to `offset` and no further."""
        known = self.get(path)
        if known is not None and known.offset != offset:
            self[path] = Corrupt(known.what, path=path, offset=offset)


class VerifiedDisk(RealDisk):
    """The disk through which servers read: a corrupt file can be read only up to its corruption."""

    def __init__(self, corrupt_files: CorruptFiles) -> None:
        self._corrupt_files = corrupt_files

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a file. `rt.Corrupt` if it is known to be corrupt in its header, or known to be corrupt and
        opened to write.

        If the file is corrupt after its header, a read at or after the corrupt offset raises `rt.Corrupt`.
        """
        known = self._corrupt_files.get(os.path.abspath(path)) if self._corrupt_files else None
        if known is None:
            return super().open(path, write=write)
        if write or known.offset < SEGMENT_HEADER_BYTES:
            raise _damaged(path, 0)
        return _ValidPart(super().open(path), path, known.offset)

    def check_reach(self, path: str, offset: int) -> None:
        """`rt.Corrupt` if the file is known to be corrupt before `offset`: its bytes there prove nothing."""
        known = self._corrupt_files.get(os.path.abspath(path)) if self._corrupt_files else None
        if known is not None and known.offset < offset:
            raise _damaged(path, known.offset)


def _damaged(path: str, offset: int) -> Corrupt:
    what = "the segment is corrupt on this node and is being repaired"
    return Corrupt(what, path=path, offset=offset, hint="Ask another node.")


class _ValidPart:
    """A corrupt file that can be read up to `end`."""

    def __init__(self, file: File, path: str, end: int) -> None:
        self._file, self._path, self._end = file, path, end

    def pread(self, size: int, offset: int) -> bytes:
        return self._file.pread(self._left(size, offset), offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        return self._file.pread_into(buffer[: self._left(len(buffer), offset)], offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:  # noqa: ARG002
        raise _damaged(self._path, self._end)

    def copy_from(self, source: File, source_offset: int, size: int, offset: int) -> int:  # noqa: ARG002
        raise _damaged(self._path, self._end)

    def truncate(self, size: int) -> None:  # noqa: ARG002
        raise _damaged(self._path, self._end)

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

    def _left(self, size: int, offset: int) -> int:
        if size > 0 and offset >= self._end:
            raise _damaged(self._path, self._end)
        return min(size, self._end - offset)


class CorruptSegment(NamedTuple):
    """A corrupt segment: where it is corrupt, and how many attempts found no good bytes at any peer."""

    path: str
    segment: SegmentId
    offset: int
    tries: int


class _CorruptFile(Struct):
    directory: str
    segment: SegmentId
    pause_s: float
    due_s: float = 0.0
    tries: int = 0
    last_error: str = ""


class Repairer:
    """Repairs segments, one after the other. For one event loop; a thread of `pool` accesses files.

    `aside` is a directory for this repairer alone. `on_failed` gets the error that must end the process.
    `give_up(directory, tries)` returns True if the directory was moved aside, so that no repair is needed.
    `on_repaired(directory, segment)` is awaited when a segment is found valid. If it raises an error, it is
    awaited again later.
    """

    def __init__(
        self,
        aside: str,
        pool: Executor,
        fetch: Fetch,
        *,
        on_failed: Callable[[RtError], None],
        give_up: Callable[[str, int], bool] = lambda *_: False,
        on_repaired: Callable[[str, SegmentId], Awaitable[None]] | None = None,
        again_s: float = AGAIN_S_MIN,
        disk: Disk = REAL,
    ) -> None:
        self._again_s = again_s
        self.corrupt_files = CorruptFiles()
        self._aside, self._pool, self._fetch, self._disk = aside, pool, fetch, disk
        self._on_failed, self._give_up, self._on_repaired = on_failed, give_up, on_repaired
        self._pending: dict[str, _CorruptFile] = {}
        self._changed = asyncio.Event()
        self.found = self.repaired = 0
        """Numbers of segments, since the start."""
        self.last: tuple[str, int] = "", 0
        """The last corruption found: path with offset, and when; ns since 1970."""

    @property
    def corrupt_segments(self) -> list[CorruptSegment]:
        return [
            CorruptSegment(path, one.segment, known.offset, one.tries)
            for path, one in sorted(self._pending.items())
            if (known := self.corrupt_files.get(path)) is not None
        ]

    def on_corrupt(self, error: Corrupt) -> bool:
        """Stop serving a corrupt segment and queue its repair. False if the path is no segment."""
        path = os.path.abspath(error.path)
        directory, name = os.path.split(path)
        segment = parse_segment_name(name)
        if segment is None:
            return False
        if self.corrupt_files.add(path, error):
            logger.error("segment_corrupt path=%s offset=%d error=%r", path, error.offset, str(error))
            self.found, self.last = self.found + 1, (f"{path} at offset {error.offset}", time.time_ns())
            self._pending[path] = _CorruptFile(directory, segment, self._again_s)
            self._changed.set()
        return True

    async def run(self) -> None:
        """Repair corrupt segments until cancelled."""
        loop = asyncio.get_running_loop()
        await self._clear_aside()
        while True:
            self._changed.clear()
            for path, corrupt in list(self._pending.items()):
                if corrupt.due_s <= loop.time() and await self._try_repair(path, corrupt):
                    del self._pending[path]
                    self.corrupt_files.pop(path, None)  # Repaired or trimmed.
            due_s = min((one.due_s for one in self._pending.values()), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(0.0, due_s - loop.time())):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _try_repair(self, path: str, corrupt: _CorruptFile) -> bool:
        """Try to repair a segment; returns whether it is good or no longer needed."""
        try:
            return await self._repair(path, corrupt.directory, corrupt.segment)
        except (Diverged, StorageFailed) as error:
            self._on_failed(error)
            raise
        except RtError as error:
            if isinstance(error, LogNotFound) and not os.path.isdir(corrupt.directory):
                return True  # The replica was removed: its session is closed.
            if str(error) != corrupt.last_error:
                corrupt.last_error = str(error)
                logger.error("segment_repair_failed path=%s error=%r", path, corrupt.last_error)
            # A peer that was not reached may have good bytes, so such an attempt does not count.
            corrupt.tries += not isinstance(error, Unreachable | Timeout | TooManyFiles)
        if self._give_up(corrupt.directory, corrupt.tries):
            return True
        corrupt.due_s = asyncio.get_running_loop().time() + corrupt.pause_s
        corrupt.pause_s = min(2 * corrupt.pause_s, AGAIN_S_MAX)
        return False

    async def _repair(self, path: str, directory: str, segment: SegmentId) -> bool:
        disk = self._disk
        end, valid = await run_to_end(self._pool, lambda: self._find_corruption(directory, segment))
        if end and valid < end:
            self.corrupt_files.record_valid_end(path, valid)
            try:
                await self._clear_aside()
                await self._fetch(directory, segment, self._aside, end)
                good = await run_to_end(self._pool, partial(valid_end, disk, self._aside, segment, end))
                if good <= valid:
                    raise Corrupt("no peer has good bytes of this segment", path=path, offset=valid)
                changed = await run_to_end(self._pool, lambda: self._overwrite(directory, segment, good))
            finally:
                await self._clear_aside()
            end, valid = await run_to_end(self._pool, lambda: self._find_corruption(directory, segment))
            if valid < end:
                self.corrupt_files.record_valid_end(path, valid)
                raise Corrupt("the good bytes of the peers end too early", path=path, offset=valid)
            self.repaired += 1
            logger.warning("segment_repaired path=%s changed_bytes=%d", path, changed)
        if self._on_repaired is not None:
            await self._on_repaired(directory, segment)
        return True

    def _find_corruption(self, directory: str, segment: SegmentId) -> tuple[int, int]:
        with storage_errors(directory, "looking for damage"):
            end = synced_end(self._disk, directory, segment)
            return end, valid_end(self._disk, directory, segment, end)

    def _overwrite(self, directory: str, segment: SegmentId, end: int) -> int:
        with storage_errors(directory, "repairing a segment"):
            return repair_segment(self._disk, directory, self._aside, segment, end)

    async def _clear_aside(self) -> None:
        await run_to_end(self._pool, partial(shutil.rmtree, self._aside, ignore_errors=True))

"""Damaged segments of this node: not served from the damage on, and mended by good bytes that peers have.

Laws. Of what is damaged only the part before the damage is served. It stays as it is until bytes are here
that were verified, of this very segment; then only what differs is overwritten. A peer whose copy differs
from what is sound here ends the process. While no peer has good bytes they are asked for again and again, and
the rest goes on; only what can be had from elsewhere may be given up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from replicator.protocol.run_in_thread import run_to_end
from rt.errors import Corrupt, Diverged, LogNotFound, RtError, StorageFailed, Timeout, TooManyFiles
from rt.log.disk import REAL, Disk, File, RealDisk, storage_errors
from rt.log.format.constants import Buffer
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId, parse_segment_name
from rt.log.write.segment_repair import repair_segment, synced_end, valid_end
from rt.net.grpc_errors import Unreachable

AGAIN_S_MIN: Final = 0.5
AGAIN_S_MAX: Final = 30.0
"""Between two tries to mend a segment: the pause doubles from the least to the most."""
logger = logging.getLogger("sequencer")

Fetch = Callable[[str, SegmentId, str, int], Awaitable[None]]
"""`fetch(directory, segment, aside, end)`: get a verified copy of a directory's segment up to `end`, or as
much of it as anybody has, into the new directory `aside`. The errors of peers."""


class CorruptFiles:
    """The files that are damaged, by path; any thread may ask."""

    def __init__(self) -> None:
        self._paths: dict[str, Corrupt] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def add(self, path: str, error: Corrupt) -> bool:
        """Whether it was not known yet."""
        return self._paths.setdefault(path, error) is error

    def find(self, path: str) -> Corrupt | None:
        """What is wrong with a file; None if nothing is known."""
        return self._paths.get(path)

    def note_sound(self, path: str, offset: int) -> None:
        """Its frames verify up to `offset`, and not behind it."""
        known = self._paths.get(path)
        if known is not None and known.offset != offset:
            self._paths[path] = Corrupt(known.what, path=path, offset=offset)

    def discard(self, path: str) -> None:
        """It is good again, or gone."""
        self._paths.pop(path, None)


class VerifiedDisk(RealDisk):
    """The machine's files, of damaged ones only what lies before the damage: for who serves others."""

    def __init__(self, damages: CorruptFiles) -> None:
        self._damages = damages

    def open(self, path: str, *, write: bool = False) -> File:
        """As the protocol says; `rt.Corrupt` if the file is known to be damaged in its header.

        Of one that is damaged further on, a read at or behind the damage raises it.
        """
        known = self._damages.find(os.path.abspath(path)) if len(self._damages) else None
        if known is None:
            return super().open(path, write=write)
        if write or known.offset < SEGMENT_HEADER_BYTES:
            raise _damaged(path, 0)
        return _SoundPart(super().open(path), path, known.offset)

    def check_reach(self, path: str, offset: int) -> None:
        """`rt.Corrupt` if the file is known to be damaged before `offset`: what lies there proves nothing."""
        known = self._damages.find(os.path.abspath(path)) if len(self._damages) else None
        if known is not None and known.offset < offset:
            raise _damaged(path, known.offset)


def _damaged(path: str, offset: int) -> Corrupt:
    what = "the segment is damaged here, and being fetched again"
    return Corrupt(what, path=path, offset=offset, hint="Ask another node.")


class _SoundPart:
    """A damaged file, to be read up to `end`."""

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


class Patient(NamedTuple):
    """A damaged segment: from where on it is, and how often the peers had no good bytes of it."""

    path: str
    segment: SegmentId
    offset: int
    tries: int


@dataclass(slots=True)
class _CorruptFile:
    directory: str
    segment: SegmentId
    pause_s: float
    due_s: float = 0.0
    tries: int = 0
    told: str = ""


class Repairer:
    """Mends segments, one after the other. For one event loop; files are touched in `pool`.

    `aside` is a directory that nobody else uses. `on_failed` gets what must end the process. `give_up` hears
    for which directory peers were asked in vain, and how often: True if it is not wanted any more.
    """

    def __init__(
        self,
        aside: str,
        pool: Executor,
        fetch: Fetch,
        *,
        on_failed: Callable[[RtError], None],
        give_up: Callable[[str, int], bool] = lambda *_: False,
        again_s: float = AGAIN_S_MIN,
        disk: Disk = REAL,
    ) -> None:
        self._again_s = again_s
        self.damages = CorruptFiles()
        self._aside, self._pool, self._fetch, self._disk = aside, pool, fetch, disk
        self._on_failed, self._give_up = on_failed, give_up
        self._patients: dict[str, _CorruptFile] = {}
        self._changed = asyncio.Event()

    @property
    def patients(self) -> list[Patient]:
        """What is damaged and not mended yet."""
        return [
            Patient(path, one.segment, known.offset, one.tries)
            for path, one in sorted(self._patients.items())
            if (known := self.damages.find(path)) is not None
        ]

    def on_damaged(self, error: Corrupt) -> bool:
        """A segment was found damaged: serve it no more, and mend it. False if it is no segment."""
        path = os.path.abspath(error.path)
        directory, name = os.path.split(path)
        segment = parse_segment_name(name)
        if segment is None:
            return False
        if self.damages.add(path, error):
            logger.error("segment_corrupt path=%s offset=%d error=%r", path, error.offset, str(error))
            self._patients[path] = _CorruptFile(directory, segment, self._again_s)
            self._changed.set()
        return True

    async def run(self) -> None:
        """Mend what is damaged until cancelled."""
        loop = asyncio.get_running_loop()
        await self._clear_aside()
        while True:
            self._changed.clear()
            for path, patient in list(self._patients.items()):
                if patient.due_s <= loop.time() and await self._resolve_pending_error(path, patient):
                    del self._patients[path]
                    self.damages.discard(path)
            due_s = min((one.due_s for one in self._patients.values()), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(0.0, due_s - loop.time())):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _resolve_pending_error(self, path: str, patient: _CorruptFile) -> bool:
        """Try to mend it; whether it is good, or gone, now."""
        try:
            return await self._mend(path, patient.directory, patient.segment)
        except (Diverged, StorageFailed) as error:
            self._on_failed(error)
            raise
        except RtError as error:
            if isinstance(error, LogNotFound) and not os.path.isdir(patient.directory):
                return True  # The copy was removed: its session is closed.
            if str(error) != patient.told:
                patient.told = str(error)
                logger.error("segment_repair_failed path=%s error=%r", path, patient.told)
            # Who was not reached may have it.
            patient.tries += not isinstance(error, Unreachable | Timeout | TooManyFiles)
        if self._give_up(patient.directory, patient.tries):
            return True
        patient.due_s = asyncio.get_running_loop().time() + patient.pause_s
        patient.pause_s = min(2 * patient.pause_s, AGAIN_S_MAX)
        return False

    async def _mend(self, path: str, directory: str, segment: SegmentId) -> bool:
        disk = self._disk
        end, sound = await run_to_end(self._pool, lambda: self._look(directory, segment))
        if end and sound < end:
            self.damages.note_sound(path, sound)
            try:
                await self._clear_aside()
                await self._fetch(directory, segment, self._aside, end)
                good = await run_to_end(self._pool, partial(valid_end, disk, self._aside, segment, end))
                if good <= sound:
                    raise Corrupt("no peer has good bytes of it", path=path, offset=sound)
                changed = await run_to_end(self._pool, lambda: self._overwrite(directory, segment, good))
            finally:
                await self._clear_aside()
            end, sound = await run_to_end(self._pool, lambda: self._look(directory, segment))
            if sound < end:
                self.damages.note_sound(path, sound)
                raise Corrupt("a peer's good bytes do not reach far enough", path=path, offset=sound)
            logger.warning("segment_repaired path=%s changed_bytes=%d", path, changed)
        return True

    def _look(self, directory: str, segment: SegmentId) -> tuple[int, int]:
        with storage_errors(directory, "looking for damage"):
            end = synced_end(self._disk, directory, segment)
            return end, valid_end(self._disk, directory, segment, end)

    def _overwrite(self, directory: str, segment: SegmentId, end: int) -> int:
        with storage_errors(directory, "mending a segment"):
            return repair_segment(self._disk, directory, self._aside, segment, end)

    async def _clear_aside(self) -> None:
        await run_to_end(self._pool, partial(shutil.rmtree, self._aside, ignore_errors=True))

"""Damaged segments of this node: not served any more, and mended by good bytes that a peer has.

Laws. What is damaged stays as it is until bytes are here that were verified whole, of this very segment; then
only what differs is overwritten. A peer whose copy differs from what is sound here ends the process. While no
peer has good bytes they are asked for again and again, and the rest goes on; only what can be had from
elsewhere may be given up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

from replicator.threads import run_to_end
from rt.errors import Damaged, Diverged, RtError, StorageFailed, Timeout
from rt.log.disk import REAL, Disk, File, RealDisk, storage_errors
from rt.log.mending import mend_segment, sound_end, synced_end
from rt.log.segment import SegmentId, parse_segment_name
from rt.net.rpc_errors import Unreachable

AGAIN_S_MIN: Final = 0.5
AGAIN_S_MAX: Final = 30.0
"""Between two tries to mend a segment: the pause doubles from the least to the most."""
logger = logging.getLogger("sequencer")

Fetch = Callable[[str, SegmentId, str, int], Awaitable[None]]
"""`fetch(directory, segment, aside, end)`: get a verified copy of a directory's segment up to `end`, or as
much of it as anybody has, into the new directory `aside`. The errors of peers."""


class Damages:
    """The files that are damaged, by path; any thread may ask."""

    def __init__(self) -> None:
        self._paths: dict[str, Damaged] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def add(self, path: str, error: Damaged) -> bool:
        """Whether it was not known yet."""
        return self._paths.setdefault(path, error) is error

    def discard(self, path: str) -> None:
        """It is good again, or gone."""
        self._paths.pop(path, None)


class SoundDisk(RealDisk):
    """The machine's files but for the damaged ones: for who serves them to others."""

    def __init__(self, damages: Damages) -> None:
        self._damages = damages

    def open(self, path: str, *, write: bool = False) -> File:
        """As the protocol says; `rt.Damaged` if the file is known to be."""
        if len(self._damages) and os.path.abspath(path) in self._damages:
            raise Damaged(
                "the segment is damaged here, and being fetched again",
                path=path,
                offset=0,
                hint="Ask another node.",
            )
        return super().open(path, write=write)


@dataclass(slots=True)
class _Patient:
    directory: str
    segment: SegmentId
    pause_s: float
    due_s: float = 0.0
    tries: int = 0
    told: str = ""


class Mender:
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
        self.damages = Damages()
        self._aside, self._pool, self._fetch, self._disk = aside, pool, fetch, disk
        self._on_failed, self._give_up = on_failed, give_up
        self._patients: dict[str, _Patient] = {}
        self._changed = asyncio.Event()

    def on_damaged(self, error: Damaged) -> bool:
        """A segment was found damaged: serve it no more, and mend it. False if it is no segment."""
        path = os.path.abspath(error.path)
        directory, name = os.path.split(path)
        segment = parse_segment_name(name)
        if segment is None:
            return False
        if self.damages.add(path, error):
            logger.error("damaged_segment path=%s offset=%d error=%r", path, error.offset, str(error))
            self._patients[path] = _Patient(directory, segment, self._again_s)
            self._changed.set()
        return True

    async def run(self) -> None:
        """Mend what is damaged until cancelled."""
        loop = asyncio.get_running_loop()
        await self._clear_aside()
        while True:
            self._changed.clear()
            for path, patient in list(self._patients.items()):
                if patient.due_s <= loop.time() and await self._attend(path, patient):
                    del self._patients[path]
                    self.damages.discard(path)
            due_s = min((one.due_s for one in self._patients.values()), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(0.0, due_s - loop.time())):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _attend(self, path: str, patient: _Patient) -> bool:
        """Try to mend it; whether it is good, or gone, now."""
        try:
            return await self._mend(path, patient.directory, patient.segment)
        except (Diverged, StorageFailed) as error:
            self._on_failed(error)
            raise
        except RtError as error:
            if str(error) != patient.told:
                patient.told = str(error)
                logger.error("segment_not_mended path=%s error=%r", path, patient.told)
            # Who was not reached may have it.
            patient.tries += not isinstance(error, Unreachable | Timeout)
        if self._give_up(patient.directory, patient.tries):
            return True
        patient.due_s = asyncio.get_running_loop().time() + patient.pause_s
        patient.pause_s = min(2 * patient.pause_s, AGAIN_S_MAX)
        return False

    async def _mend(self, path: str, directory: str, segment: SegmentId) -> bool:
        disk = self._disk
        end, sound = await run_to_end(self._pool, lambda: self._look(directory, segment))
        if end and sound < end:
            try:
                await self._clear_aside()
                await self._fetch(directory, segment, self._aside, end)
                good = await run_to_end(self._pool, partial(sound_end, disk, self._aside, segment, end))
                if good <= sound:
                    raise Damaged("no peer has good bytes of it", path=path, offset=sound)
                changed = await run_to_end(self._pool, lambda: self._overwrite(directory, segment, good))
            finally:
                await self._clear_aside()
            end, sound = await run_to_end(self._pool, lambda: self._look(directory, segment))
            if sound < end:
                raise Damaged("a peer's good bytes do not reach far enough", path=path, offset=sound)
            logger.warning("segment_mended path=%s changed_bytes=%d", path, changed)
        return True

    def _look(self, directory: str, segment: SegmentId) -> tuple[int, int]:
        with storage_errors(directory, "looking for damage"):
            end = synced_end(self._disk, directory, segment)
            return end, sound_end(self._disk, directory, segment, end)

    def _overwrite(self, directory: str, segment: SegmentId, end: int) -> int:
        with storage_errors(directory, "mending a segment"):
            return mend_segment(self._disk, directory, self._aside, segment, end)

    async def _clear_aside(self) -> None:
        await run_to_end(self._pool, partial(shutil.rmtree, self._aside, ignore_errors=True))

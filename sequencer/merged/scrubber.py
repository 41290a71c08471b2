"""Verifies this node's segments slowly and continuously, so that flipped bits are found before they matter.

Only synced bytes are verified, unless they are trimmed meanwhile. The read rate is bounded, so nothing else
waits for the scrubber.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple

from replicator.protocol.run_in_thread import run_to_end
from rt.errors import Corrupt, LogNotFound, RtError, TooManyFiles
from rt.log.disk import REAL, Disk, storage_error
from rt.log.format.segment import SegmentId
from rt.log.scan.catalog import segment_path
from rt.log.write.segment_repair import check_segment, synced_end

SCRUB_BYTES_S: Final = 4 << 20
"""One hundredth of the rate that a disk and a checksum can reach: 1 TB takes three days."""
ROUND_S: Final = 10.0
"""Pause between the end of a round and the start of the next. Small logs need not be read without a pause."""
LEAST_BYTES: Final = 64 << 10
"""Each segment counts as at least this number of bytes read, because opening a file has a cost too."""

logger = logging.getLogger("sequencer")


class ScrubTarget(NamedTuple):
    """A segment to verify, of the log directory `path`."""

    path: str
    segment: SegmentId


class Scrubber:
    """Verifies all `targets()` again and again; `on_corrupt` gets the errors. For one event loop."""

    def __init__(
        self,
        targets: Callable[[], Iterable[ScrubTarget]],
        on_corrupt: Callable[[Corrupt], object],
        pool: Executor,
        *,
        bytes_s: int = SCRUB_BYTES_S,
        round_s: float = ROUND_S,
        disk: Disk = REAL,
    ) -> None:
        self._targets, self._on_corrupt, self._pool = targets, on_corrupt, pool
        self._bytes_s, self._round_s, self._disk = bytes_s, round_s, disk
        self.rounds = 0
        """Number of rounds completed."""

    async def run(self) -> None:
        """Scrub until cancelled."""
        while True:
            try:
                for target in list(self._targets()):
                    await self._scrub(target)
            except (TooManyFiles, OSError) as error:
                if not isinstance(failure := _storage_error(error), TooManyFiles):
                    raise
                logger.warning("scrub_deferred error=%r", str(failure))
            self.rounds += 1
            await asyncio.sleep(self._round_s)

    async def _scrub(self, target: ScrubTarget) -> None:
        try:
            end = await run_to_end(self._pool, partial(synced_end, self._disk, *target))
            steps = check_segment(self._disk, *target, end) if end else iter(())
            verified = 0
            while (size := await run_to_end(self._pool, partial(next, steps, None))) is not None:
                verified += size
                await asyncio.sleep(size / self._bytes_s)
            await asyncio.sleep(max(0, LEAST_BYTES - verified) / self._bytes_s)
        except LogNotFound:
            return  # The directory was removed: its session is closed.
        except (Corrupt, FileNotFoundError) as error:
            await self._report_corrupt(target, error)

    async def _report_corrupt(self, target: ScrubTarget, error: Corrupt | FileNotFoundError) -> None:
        """Report the error, unless the segment was trimmed. A trim is recorded in the table before bytes are
        deleted.
        """
        with contextlib.suppress(FileNotFoundError, LogNotFound):
            if not await run_to_end(self._pool, partial(synced_end, self._disk, *target)):
                return
            if not isinstance(error, Corrupt):
                error = Corrupt("a segment is missing", path=segment_path(*target), offset=0)
            self._on_corrupt(error)


def _storage_error(error: RtError | OSError) -> RtError:
    if isinstance(error, RtError):
        return error
    return storage_error(error, str(error.filename or ""), "reading again what is on the disk")

"""A pull that repairs its copy: corrupt segments get good bytes from the nodes, as nodes repair each other.

Invariants:
- Corrupt bytes stay until verified bytes are here that start with all valid bytes of the segment. Then only
  the bytes that differ are overwritten (`rt.log.write.segment_repair`).
- While a node may have good bytes, the nodes are asked again. If no node can repair a segment, the pull ends
  with `rt.Corrupt`, which names the file, the range and the next step.
- A reader's request (`rt.log.write.repair_requests`) is finished when the segment verifies, or was trimmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from replicator.protocol.grpc_service import first_of
from replicator.protocol.messages import LogOffset
from replicator.protocol.run_in_thread import run_to_end
from replicator.pull.client import PullClient
from replicator.pull.local_copy import LocalCopy
from rt.errors import (
    Corrupt,
    DirectoryLocked,
    Diverged,
    FormatError,
    LogNotFound,
    ProtocolViolation,
    RtError,
    StorageError,
    StorageFailed,
)
from rt.log.disk import Disk, storage_errors
from rt.log.format.segment import SegmentId, parse_segment_name
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_header, read_table
from rt.log.scan.recovery_scan import walk_segment
from rt.log.scan.scanner import scanner_for
from rt.log.write.repair_requests import finish_repair, requested_repairs
from rt.log.write.segment_repair import repair_segment, synced_end, valid_end
from rt.net.grpc_errors import Unreachable

logger = logging.getLogger("replicator")

ASIDE_DIRECTORY: Final = "repair"
"""A directory in the copy's directory. Good bytes are fetched to it while `LOCK_FILE` is locked."""
LOCK_FILE: Final = "repair.lock"
AGAIN_SECONDS_MIN: Final = 0.5
AGAIN_SECONDS_MAX: Final = 30.0
"""The pause between two attempts to repair a segment doubles from `AGAIN_SECONDS_MIN` up to this value."""
REQUEST_SECONDS: Final = 0.5  # How often requests of readers are looked for.
_LOOK_SECONDS: Final = 0.02

MakeClient = Callable[[LocalCopy], PullClient]
"""A client for a copy, with `raises_damage`, that pulls from the nodes."""

_Result = TypeVar("_Result")


class CopyRepairer:
    """Repairs the segments of `copy`, one at a time. For one event loop; `close` it."""

    def __init__(
        self, copy: LocalCopy, make_client: MakeClient, *, again_seconds: float = AGAIN_SECONDS_MIN
    ) -> None:
        self._copy, self._make_client = copy, make_client
        self._disk: Disk = copy.disk
        self._again_seconds = again_seconds
        self._aside = os.path.join(copy.path, ASIDE_DIRECTORY)
        self._pool: Executor = ThreadPoolExecutor(1, thread_name_prefix="rt-copy-repair")
        self._repair_lock = asyncio.Lock()

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    async def serve_requests(self) -> None:
        """Repair the segments that readers request, until cancelled. Raises the errors of `repair`."""
        # Another process may use it, or there is no copy yet.
        with contextlib.suppress(DirectoryLocked, LogNotFound), self._locked():
            await self._clear_aside()  # A pull that was killed may have left files.
        while True:
            requested = await self._in_thread(partial(requested_repairs, self._disk, self._copy.path))
            for segment in requested:
                await self.repair(segment)
                await self._in_thread(partial(finish_repair, self._disk, self._copy.path, segment))
            await asyncio.sleep(REQUEST_SECONDS)

    async def repair(self, segment: SegmentId, *, is_patient: bool = True) -> int:
        """Repair a segment. Return the number of changed bytes: 0 if the segment was valid, or trimmed.

        `rt.Corrupt` if no node can repair it, `rt.Diverged` if the nodes have another log; storage errors.
        Without `is_patient`, also the error because of which a node could not be asked.
        """
        async with self._repair_lock:
            changed, pause, told = 0, self._again_seconds, ""
            while True:
                try:
                    more = await self._repair_once(segment)
                except (Corrupt, Diverged, StorageFailed):
                    raise
                except RtError as error:
                    if not is_patient and not isinstance(error, DirectoryLocked):
                        raise
                    if str(error) != told:
                        told = str(error)
                        path = segment_path(self._copy.path, segment)
                        logger.error("segment_repair_failed path=%s error=%r", path, told)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, AGAIN_SECONDS_MAX)
                    continue
                if more is None:
                    return changed
                changed, pause = changed + more, self._again_seconds

    async def repair_all(self) -> dict[SegmentId, int]:
        """Check every segment of the copy, and repair the corrupt ones. Return the number of changed bytes by
        segment.

        If a segment cannot be repaired, it goes on, and raises the first such error at the end.
        """
        changed: dict[SegmentId, int] = {}
        failed: RtError | None = None
        for segment in await self._in_thread(partial(list_segments, self._disk, self._copy.path)):
            try:
                if count := await self.repair(segment, is_patient=False):
                    changed[segment] = count
                await self._in_thread(partial(finish_repair, self._disk, self._copy.path, segment))
            except RtError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return changed

    async def _repair_once(self, segment: SegmentId) -> int | None:
        """Overwrite the bytes for which the nodes have good ones, and return how many changed. None if
        nothing is corrupt (any more).
        """
        disk, path = self._disk, self._copy.path
        end, sound = await self._in_thread(partial(_verify_segment, disk, path, segment))
        if sound >= end:
            return None
        with self._locked():
            return await self._repair_locked(segment, end, sound)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory for fetched bytes. `rt.DirectoryLocked` if another process uses it."""
        with storage_errors(self._copy.path, "locking a copy to repair it"):
            lock = self._disk.lock(os.path.join(self._copy.path, LOCK_FILE))
        try:
            yield
        finally:
            lock.close()

    async def _repair_locked(self, segment: SegmentId, end: int, sound: int) -> int:
        disk, path = self._disk, self._copy.path
        logger.error("segment_corrupt path=%s offset=%d", segment_path(path, segment), sound)
        first = await self._in_thread(partial(_first_of, disk, path, segment))
        if first is None:
            raise self._unrepairable("where it begins is not known", segment, sound, end)
        await self._clear_aside()
        try:
            place, left = await self._fetch(segment, first, end)
            good = await self._in_thread(partial(valid_end, disk, self._aside, segment, end))
            if good <= sound:
                raise await self._judge(segment, sound, end, place, left)
            changed = await self._in_thread(partial(self._overwrite, segment, good, sound, end))
        finally:
            await self._clear_aside()
        logger.warning(
            "segment_repaired path=%s changed_bytes=%d up_to=%d", segment_path(path, segment), changed, good
        )
        return changed

    async def _fetch(
        self, segment: SegmentId, first: int, end: int
    ) -> tuple[LogOffset | None, dict[str, RtError]]:
        """Pull the segment into the directory for fetched bytes, as far as any node has it. Return where the
        next bytes begin, and why nodes were left after that.
        """
        aside = self._copy.aside(self._aside, first)
        client, goal = self._make_client(aside), LogOffset(*segment, end)
        running = asyncio.ensure_future(client.run())
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_LOOK_SECONDS)
                place = aside.next_offset
                if client.has_left_all or (place is not None and place >= goal):
                    return place, dict(client.left)
            running.result()
        except Diverged as error:  # The nodes differ from each other.
            raise Unreachable("the nodes do not agree on that segment", where=segment, got=error) from error
        finally:
            running.cancel()
            await asyncio.wait([running])
        raise AssertionError

    async def _judge(
        self, segment: SegmentId, sound: int, end: int, place: LogOffset | None, left: dict[str, RtError]
    ) -> RtError:
        """The error that explains why nothing was repaired: `rt.Corrupt` if the segment can never be
        repaired.
        """
        here = list[SegmentId]()
        with contextlib.suppress(LogNotFound):
            here = await self._in_thread(partial(list_segments, self._disk, self._aside))
        if not here and place is not None:
            here = [place.segment]  # The log of the node begins there, and no byte of it is here yet.
        if here and segment < here[0]:
            what = "the nodes have trimmed that segment"
            return self._unrepairable(
                what, segment, sound, end, "Readers get an error that names what they skip."
            )
        said = "; ".join(f"{endpoint}: {error}" for endpoint, error in sorted(left.items()))
        are_all_damaged = left and all(
            isinstance(one, FormatError | ProtocolViolation) for one in left.values()
        )
        what = "no node has good bytes of it" if are_all_damaged else "not every node could be asked for it"
        return Unreachable(what, where=segment_path(self._copy.path, segment), got=said or None)

    def _overwrite(self, segment: SegmentId, good: int, sound: int, end: int) -> int:
        path = self._copy.path
        with storage_errors(path, "repairing a copy"):
            try:
                return repair_segment(self._disk, path, self._aside, segment, good)
            except Diverged:
                if not self._copy.is_filtered:
                    raise
        # Where each pull began decides where the declarations of the copy are, so another pull makes other
        # bytes.
        raise self._unrepairable("a filtered copy cannot be repaired in part", segment, sound, end)

    def _unrepairable(self, what: str, segment: SegmentId, sound: int, end: int, more: str = "") -> Corrupt:
        path = self._copy.path
        hint = f"Remove the directory {path}: it is filled again from the nodes. {more}".rstrip()
        return Corrupt(
            f"a segment of the copy is damaged, and {what}",
            path=segment_path(path, segment),
            offset=sound,
            got=_range_of(self._disk, path, segment, sound, end),
            hint=hint,
        )

    async def _clear_aside(self) -> None:
        await self._in_thread(partial(shutil.rmtree, self._aside, ignore_errors=True))

    async def _in_thread(self, act: Callable[[], _Result]) -> _Result:
        return await run_to_end(self._pool, act)


class RepairingPull:
    """Keeps `copy` up to date with a client that `make_client` makes, and repairs its corrupt segments."""

    def __init__(self, copy: LocalCopy, make_client: MakeClient) -> None:
        self._copy, self._make_client = copy, make_client

    async def run(self) -> None:
        """Follow the log until cancelled. Raises only what no node can repair."""
        repairer = CopyRepairer(self._copy, self._make_client)
        try:
            while True:
                try:
                    await first_of(self._make_client(self._copy).run(), repairer.serve_requests())
                except Corrupt as error:
                    segment = self._segment_of(error)
                    if segment is None or not await repairer.repair(segment):
                        raise  # It is no segment, or a check of its frames finds no damage.
        finally:
            repairer.close()

    def _segment_of(self, error: Corrupt) -> SegmentId | None:
        directory, name = os.path.split(error.path)
        return parse_segment_name(name) if directory == self._copy.path else None


def _verify_segment(disk: Disk, path: str, segment: SegmentId) -> tuple[int, int]:
    """The offset up to which a segment must verify, and the offset up to which it does."""
    with storage_errors(path, "looking for damage"):
        end = synced_end(disk, path, segment)
        return end, valid_end(disk, path, segment, end)


def _first_of(disk: Disk, path: str, segment: SegmentId) -> int | None:
    """The first position of a segment; None if neither table nor header contain it."""
    with storage_errors(path, "looking for damage"):
        table = read_table(disk, path)
        listed = () if table is None else table.segments
        for entry in listed:
            if entry.id == segment:
                return entry.first
        try:
            header = read_header(disk, path, segment)
        except (FormatError, FileNotFoundError):
            header = None
        if header is not None:
            return header.first
        return listed[-1].end if listed and listed[-1].id < segment else None


def _range_of(disk: Disk, path: str, segment: SegmentId, sound: int, end: int) -> str:
    """The bytes and positions that cannot be read, as far as they are known, in words."""
    said = f"bytes {sound} to {end}"
    try:
        header = read_header(disk, path, segment)
        if header is None:
            return said
        start = walk_segment(disk, path, scanner_for(header), header).end
        table = read_table(disk, path)
    except (FormatError, OSError, StorageError):
        return said
    ends = [] if table is None else [entry.end for entry in table.segments if entry.id == segment]
    return f"{said}, positions {start} to {ends[0] - 1}" if ends else f"{said}, positions from {start} on"

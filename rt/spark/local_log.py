"""A merged log in a directory that driver and executors see: on a local disk, or shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from rt.errors import NotALog
from rt.events import Event
from rt.log.catalog import read_catalog
from rt.log.directory import is_log_directory, read_durable_end, read_identity
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.durable import DurableEnd
from rt.log.interest import Interest
from rt.log.messages import MessageBatch
from rt.log.outline import outline
from rt.log.ranges import LossHandler, RangeReader
from rt.log.reader import LogReader
from rt.log.segment import Kind
from rt.log.waypoints import Waypoint

LEAP_BYTES: Final = 8 * 2**20
"""From so many synced bytes on they are leapt over: getting into the log again reads about half of that."""

_HINT = "path is a directory that holds log.X.Y files: <root>/<stream>/merged."


class LocalLog:
    """The log at `path`. `bounds` reads what is new since the last call, and verifies it.

    Much that is new is not read up to the durable end: its writer has verified and synced that, and who reads
    the messages verifies them again. So what the driver reads of a stream does not grow with the stream.
    """

    def __init__(self, path: str, *, disk: Disk = REAL) -> None:
        self.path = path
        self._disk = disk
        self._tail: LogReader | None = None
        self._synced: DurableEnd | None = None
        """The durable end, as it was when `bounds` last looked."""
        if not is_log_directory(disk, path):
            raise NotALog("no log directory", where=path, hint=_HINT)
        if read_identity(disk, path).kind is Kind.SESSION:
            raise NotALog("the log of one session, not a merged one", where=path, hint=_HINT)

    def bounds(self) -> tuple[int, int]:
        """See `LogSource`."""
        if self._tail is None:
            self._tail = LogReader(self.path, position="latest", on_event=_ignore, disk=self._disk)
        self._leap(self._tail)
        for _ in self._tail.batches():
            pass
        with storage_errors(self.path, "listing a log"):
            start = read_catalog(self._disk, self.path).start
        return min(start, self._tail.position), self._tail.position

    def _leap(self, tail: LogReader) -> None:
        """Go on at the durable end, if there is much before it."""
        synced, before = read_durable_end(self._disk, self.path), self._synced
        self._synced = synced
        if synced is None or synced.origin != tail.identity.origin or tail.identity.kind is not Kind.MERGED:
            return  # In a filtered log it may lie behind the last message.
        known = before.offset if before is not None and before.id == synced.id else 0
        if synced.end > tail.position and synced.offset - known >= LEAP_BYTES:
            with contextlib.suppress(ValueError):  # Not to be seen yet: then what is there is read.
                tail.seek(synced.end)

    def outline(self, start: int, end: int) -> Iterator[Waypoint]:
        """See `LogSource`."""
        return outline(self._disk, self.path, start, end)

    def read(self, start: int, end: int, interest: Interest, on_loss: LossHandler) -> Iterator[MessageBatch]:
        """See `LogSource`."""
        return RangeReader(
            self.path, start, end, interest=interest, on_loss=on_loss, disk=self._disk
        ).batches()

    def hold(self, name: str, position: int) -> None:
        """See `LogSource`. A directory holds nothing back, and `rt.spark.options` lets nobody want it."""

    def close(self) -> None:
        """See `LogSource`."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None


def _ignore(event: Event) -> None:
    """A torn tail is no part of the log yet; what is trimmed is told to who reads it."""

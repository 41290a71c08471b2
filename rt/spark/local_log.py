"""A merged log in a directory that driver and executors see: on a local disk, or shared."""

from __future__ import annotations

from collections.abc import Iterator

from rt.errors import NotALog
from rt.events import Event
from rt.log.catalog import read_catalog
from rt.log.directory import is_log_directory, read_identity
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.interest import Interest
from rt.log.messages import MessageBatch
from rt.log.outline import outline
from rt.log.ranges import LossHandler, RangeReader
from rt.log.reader import LogReader
from rt.log.segment import Kind
from rt.log.waypoints import Waypoint

_HINT = "path is a directory that holds log.X.Y files: <root>/<stream>/merged."


class LocalLog:
    """The log at `path`. `bounds` reads what is new since the last call, and verifies it."""

    def __init__(self, path: str, *, disk: Disk = REAL) -> None:
        self.path = path
        self._disk = disk
        self._tail: LogReader | None = None
        if not is_log_directory(disk, path):
            raise NotALog("no log directory", where=path, hint=_HINT)
        if read_identity(disk, path).kind is Kind.SESSION:
            raise NotALog("the log of one session, not a merged one", where=path, hint=_HINT)

    def bounds(self) -> tuple[int, int]:
        """See `LogSource`."""
        if self._tail is None:
            self._tail = LogReader(self.path, position="latest", on_event=_ignore, disk=self._disk)
        for _ in self._tail.batches():
            pass
        with storage_errors(self.path, "listing a log"):
            start = read_catalog(self._disk, self.path).start
        return min(start, self._tail.position), self._tail.position

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

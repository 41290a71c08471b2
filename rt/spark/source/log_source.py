"""Where rows come from: a log directory, or the nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from typing import Final

from rt.cluster_epoch import epoch_of, number_of
from rt.errors import LogNotFound
from rt.events import Event
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.durable_end import DurableEnd
from rt.log.format.segment import LogKind
from rt.log.read.log_source import LogSource, open_nodes
from rt.log.read.outline import Waypoint, outline
from rt.log.read.projection import Projection
from rt.log.read.range_reader import LossHandler, RangeReader
from rt.log.read.reader import LogReader
from rt.log.read.start_position import check_not_replaced
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import is_log_directory, read_durable_end, read_identity
from rt.log.scan.message_batch import MessageBatch
from rt.spark.options import ClusterSource
from rt.spark.source.options import DirectorySource

LEAP_BYTES: Final = 8 * 2**20
"""`bounds` skips synced bytes if there are at least this many: reopening the log reads about half of this
number.
"""

_HINT = "path is a directory that holds log.X.Y files: <root>/<stream>/merged."


class LocalLog:
    """The log at `path`. `bounds` reads and verifies the messages that are new since the last call.

    A large amount of new data is skipped up to the durable end: its writer has verified and synced it, and
    readers verify it again. So the driver's reads do not grow with the stream.
    """

    def __init__(self, path: str, *, disk: Disk = REAL) -> None:
        self.path = path
        self.epoch = 0
        """The epoch of the log when `bounds` read it last. It is without its line, because a directory does
        not have the line.
        """
        self._disk = disk
        self._tail: LogReader | None = None
        self._synced: DurableEnd | None = None
        """The durable end at the last call of `bounds`."""
        if not is_log_directory(disk, path):
            raise LogNotFound("not a log directory", where=os.path.abspath(path), hint=_HINT)
        if read_identity(disk, path).kind is LogKind.SESSION:
            raise LogNotFound(
                "the directory holds the log of a session, expected a merged log", where=path, hint=_HINT
            )

    def bounds(self) -> tuple[int, int]:
        if self._tail is None:
            self._tail = LogReader(self.path, position="latest", on_event=_ignore, disk=self._disk)
        self._leap(self._tail)
        for _ in self._tail.batches():
            pass
        with storage_errors(self.path, "listing a log"):
            catalog = read_catalog(self._disk, self.path)
        # The X of the first segments is 0. The first epoch has the number 1.
        self.epoch = epoch_of(max(catalog.run_at(self._tail.position), 1), 0)
        return min(catalog.start, self._tail.position), self._tail.position

    def check(self, position: int, epoch: int) -> None:
        """`rt.Diverged` if a forced reset has replaced messages before `position` since `epoch`, in which
        `position` was right.

        If `epoch` is 0, nothing is known about the position.
        """
        if epoch:
            with storage_errors(self.path, "listing a log"):
                catalog = read_catalog(self._disk, self.path)
            check_not_replaced(self.path, catalog, position, number_of(epoch))

    def _leap(self, tail: LogReader) -> None:
        """Skip to the durable end, if it is far ahead."""
        synced, before = read_durable_end(self._disk, self.path), self._synced
        self._synced = synced
        if (
            synced is None
            or synced.origin != tail.identity.origin
            or tail.identity.kind is not LogKind.MERGED
        ):
            return  # In a filtered log the end may be after the last message.
        known = before.offset if before is not None and before.id == synced.id else 0
        if synced.end > tail.position and synced.offset - known >= LEAP_BYTES:
            with contextlib.suppress(ValueError):  # Not visible yet: then read the log instead.
                tail.seek(synced.end)

    def outline(self, start: int, end: int) -> Iterator[Waypoint]:
        return outline(self._disk, self.path, start, end)

    def find_time(self, start: int, end: int, timestamp_ns: int) -> int:
        with LogReader(self.path, on_event=_ignore, disk=self._disk) as reader:
            return min(max(reader.position_at(timestamp_ns), start), end)

    def read(
        self, start: int, end: int, interest: Projection, on_loss: LossHandler
    ) -> Generator[MessageBatch]:
        reader = RangeReader(self.path, start, end, interest=interest, on_loss=on_loss, disk=self._disk)
        return reader.batches()

    def hold(self, name: str, position: int) -> None:
        """A directory has no holds, and `rt.spark.source.options` does not allow them."""

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None


def _ignore(event: Event) -> None:
    """A torn tail is not part of the log yet. Trimmed messages are reported to the reader."""


def open_log(
    where: DirectorySource | ClusterSource, *, is_planned: bool = False, epoch: int = 0, position: int = 0
) -> LogSource:
    """Open the log. `rt.LogNotFound`, storage errors, `rt.CertificateError`.

    `is_planned`: the driver has reached nodes to plan this. If no node answers any more, the call waits
    longer than `connect_seconds`, as the nodes may be restarting. `position` was right in `epoch`.
    `rt.Diverged` if a forced reset has replaced messages before `position` since then.
    """
    if isinstance(where, DirectorySource):
        log = LocalLog(where.path)
        log.check(position, epoch)
        return log
    return open_nodes(
        where.endpoints,
        where.stream,
        ca=where.ca,
        cert=where.cert,
        key=where.key,
        connect_seconds=None if is_planned else where.connect_seconds,
        epoch=epoch,
    )

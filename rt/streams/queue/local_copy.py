"""This host's copy of a queue's log: whether it is of the log that the nodes have, and the book next to it.

After a forced reset the nodes have other messages at positions that a copy had before. A reader of the copy
would take the old ones for them, until the pull client has compared the bytes.

The book is that of subscriptions that are kept in memory: its id and position.

    book.NAME           the id: 16 hexadecimal digits
    book-position.NAME  what was acknowledged, as in `rt.client.cursor`

So a host that starts again without its subscriptions continues where it acknowledged, under the same hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from rt.client.cursor import read_position, write_position
from rt.errors import Corrupt, Diverged
from rt.log.disk import REAL, storage_errors, write_whole
from rt.log.read.reader import LogReader
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import is_log_directory, read_file
from rt.net.lease_client import LogEpoch
from rt.streams.queue.queue_epoch import generation_of_run

_MAGIC: Final = b"RTBOOKED"
_ID_BYTES: Final = 8


class CopiedRun(NamedTuple):
    """A segment of the copy: its run, and the end of its positions."""

    run: int
    end: int


def start_of(directory: str) -> int:
    """The first position that a log has, or has left out because of its topics."""
    return read_catalog(REAL, directory).start


def end_of(directory: str) -> int | None:
    """The end of a log; None if it does not exist yet."""
    if not is_log_directory(REAL, directory):
        return None
    with LogReader(directory, position="latest") as reader:
        return reader.position


def position_at(directory: str, timestamp_ns: int) -> int:
    """0 if the log does not exist yet."""
    if not is_log_directory(REAL, directory):
        return 0
    with LogReader(directory) as reader:
        return reader.position_at(timestamp_ns)


def check_copy(directory: str, epoch: LogEpoch) -> None:
    """`rt.Diverged` if the copy has messages that a forced reset replaced."""
    if not epoch.forced or (end := end_of(directory)) is None:
        return
    kept = read_catalog(REAL, directory).kept
    ends = [*(later.first for later in kept[1:]), end]
    copied = (CopiedRun(each.id.run, until) for each, until in zip(kept, ends, strict=True))
    if (at := replaced_from(copied, epoch)) is not None:
        raise Diverged(
            "the copy on this host is of before a forced reset",
            where=directory,
            got=f"other messages from position {at} on",
            hint="Move the directory away: what it has is copied from the nodes again.",
        )


def replaced_from(copied: Iterable[CopiedRun], epoch: LogEpoch) -> int | None:
    """The first position of which the copy has a message of an earlier generation than the log."""
    for each in copied:
        later = [first for run, first in epoch.runs.items() if _is_later(run, each.run) and first < each.end]
        if later:
            return min(later)
    return None


def _is_later(run: int, copied: int) -> bool:
    return generation_of_run(run) > generation_of_run(copied)


class CopyBook:
    """The book of `name` in `directory`, which is made. Raises storage errors, `rt.Corrupt`."""

    def __init__(self, directory: str, name: str) -> None:
        self._path = os.path.join(directory, f"book-position.{name}")
        with storage_errors(directory, "making a directory for a copy"):
            REAL.make_directory(directory)
        self.id: Final = _id(os.path.join(directory, f"book.{name}"))
        self.position = read_position(REAL, self._path, _MAGIC)
        """None: nothing was acknowledged."""

    def acknowledge(self, position: int) -> None:
        """Durable on return."""
        if self.position is None or position > self.position:
            write_position(REAL, self._path, _MAGIC, position)
            self.position = position


def _id(path: str) -> str:
    data = read_file(REAL, path, 64, doing="reading the id of a book")
    if data is None:
        data = os.urandom(_ID_BYTES).hex().encode()
        with storage_errors(path, "keeping the id of a book"):
            write_whole(REAL, path, data)
    try:
        return bytes.fromhex(data.decode()).hex()
    except ValueError as error:
        raise Corrupt(
            "the id of a book is not valid",
            path=path,
            offset=0,
            hint="Remove the file: the subscriptions in memory get another hold.",
        ) from error

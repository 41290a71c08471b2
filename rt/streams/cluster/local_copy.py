"""This host's copy of a queue's log: its start and end, its times, and whether it is a copy of the log on the
nodes.

After a forced reset the nodes have other messages at positions that a copy had before. Until the pull client
has compared the bytes, a reader of the copy would mistake the old messages for the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rt.cluster_epoch import generation_of_number
from rt.errors import Diverged
from rt.log.disk import REAL
from rt.log.read.reader import LogReader
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import is_log_directory
from rt.net.lease_client import LogEpoch


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
    """The result of `LogReader.position_at`; 0 if the log does not exist yet."""
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
    """The first position at which the message in the copy has an earlier generation than the log."""
    for each in copied:
        later = [first for run, first in epoch.runs.items() if _is_later(run, each.run) and first < each.end]
        if later:
            return min(later)
    return None


def _is_later(run: int, copied: int) -> bool:
    return generation_of_number(run) > generation_of_number(copied)

"""Delete merged segments of a publisher's own log.

`on_progress` is called by the threads that read the progress, one at a time. `run` is called by the
background thread, which may wait for disks. `trimmable` is pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from time import time_ns
from typing import Final, NamedTuple

from rt.errors import DiskFull
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import SealedSegment
from rt.sidecar.progress_file import NO_LEVEL, Level, ProgressRecord

TRIM_AGAIN_SECONDS: Final = 1.0
"""When to retry a deletion, if the disk was too full for the segment table that records it."""


class LocalRetention:
    """Deletes sealed segments `persistence_ns` after they were sealed, once they are merged.

    `segments` returns the sealed segments. `delete` deletes all segments before the given segment; it is
    retried after `rt.DiskFull`. `wake` makes the background thread call `run`.
    """

    def __init__(
        self,
        segments: Callable[[], Sequence[SealedSegment]],
        persistence_ns: int,
        delete: Callable[[SegmentId], None],
        wake: Callable[[], None],
    ) -> None:
        self._segments, self._persistence_ns = segments, persistence_ns
        self._delete, self._wake = delete, wake
        self._deletable = self._told = NO_LEVEL
        self._due = inf
        """When to check next for segments to delete."""

    def on_progress(self, record: ProgressRecord) -> None:
        """Wake `run` if more may be deleted."""
        if record.deletable != self._told:
            self._deletable = record.deletable
            if self._trimmable() != NOTHING_TRIMMABLE:
                self._due = 0.0
                self._wake()
            self._told = record.deletable  # Set last: the caller's thread may be interrupted, and call again.

    def run(self, now: float) -> float | None:
        """Delete merged segments. Return the seconds until more may be deleted; None if not before new
        progress.
        """
        left = self._due - now
        if left > 0:
            return None if left == inf else left
        self._due = inf
        before, wait_ns = self._trimmable()
        if wait_ns is not None:
            self._due = now + wait_ns / 1e9
        if before is not None:
            try:
                self._delete(before)
            except DiskFull:
                self._due = now + TRIM_AGAIN_SECONDS
        return None if self._due == inf else max(0.0, self._due - now)

    def _trimmable(self) -> TrimmableLog:
        return trimmable(
            self._segments(), self._deletable, now_ns=time_ns(), persistence_ns=self._persistence_ns
        )


class TrimmableLog(NamedTuple):
    """Trim all before `before` (None: nothing). Check again in `wait_ns` (None: when more is merged)."""

    before: SegmentId | None
    wait_ns: int | None


NOTHING_TRIMMABLE: Final = TrimmableLog(None, None)


def trimmable(
    segments: Sequence[SealedSegment], merged: Level, *, now_ns: int, persistence_ns: int
) -> TrimmableLog:
    """Which of the sealed `segments`, in log order, may be deleted now: a prefix, so the log has no hole.

    A segment may be deleted when all its messages are merged and it has been sealed for `persistence_ns`. An
    earlier run is merged completely before a later one. A clock that was set back only delays deletion.
    """
    before: SegmentId | None = None
    for segment in segments[bisect_left(segments, True, key=_is_kept) :]:
        if not (
            merged.run > segment.id.run or (merged.run == segment.id.run and merged.number >= segment.end)
        ):
            break
        left_ns = segment.sealed_ns + persistence_ns - now_ns
        if persistence_ns and left_ns > 0:
            return TrimmableLog(before, min(left_ns, persistence_ns))
        before = SegmentId(segment.id.run, segment.id.roll + 1)
    return TrimmableLog(before, None)


def _is_kept(segment: SealedSegment) -> bool:
    return not segment.is_trimmed

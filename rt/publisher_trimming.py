"""When a publisher deletes what is merged of its own files. `rt.merged_segments` decides which may go.

Two threads: `note_progress` is called by the one that looks for all publishers of the process, `run` by the
one that may wait for disks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import time_ns
from typing import Final

from rt.errors import DiskFull
from rt.log.segment import SegmentId
from rt.log.table import SealedSegment
from rt.merged_segments import NOTHING_TRIMMABLE, Trimmable, trimmable
from rt.progress import NO_LEVEL, ProgressRecord

TRIM_AGAIN_SECONDS: Final = 1.0
"""When to try again to delete segments, where the disk was too full for the table that says so."""


class LocalTrimming:
    """Deletes sealed segments `persistence_ns` after they were sealed, once they are merged.

    `segments` gives the sealed ones. `delete` deletes what precedes one; `rt.DiskFull`: it is tried again.
    `wake` has `run` called.
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
        self._deletable = NO_LEVEL
        self._due = inf
        """When to look next for segments that may be deleted."""

    def note_progress(self, record: ProgressRecord) -> None:
        """More may be deletable: have it deleted."""
        if record.deletable != self._deletable:
            self._deletable = record.deletable
            if self._trimmable() != NOTHING_TRIMMABLE:
                self._due = 0.0
                self._wake()

    def run(self, now: float) -> float | None:
        """Delete what is merged; the seconds until there may be more, None if only progress can tell."""
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

    def _trimmable(self) -> Trimmable:
        return trimmable(
            self._segments(), self._deletable, now_ns=time_ns(), persistence_ns=self._persistence_ns
        )

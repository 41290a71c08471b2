"""Session ranges that are missing in this node's replicas. They are fetched from peers, and stay in memory
until they are merged.

The event loop adds them; the merger's thread finds and removes them.
"""

from __future__ import annotations

import threading

from rt.log.format.segment import SegmentId
from sequencer.sessions.input_planner import FetchedRange
from sequencer.state.write_plan import BlockWrite, WritePlan


class FetchedRanges:
    """Any thread may call this. Without ranges, the usual case, no lock is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[tuple[int, SegmentId], list[FetchedRange]] = {}

    def add(self, fetched: FetchedRange) -> None:
        key = fetched.range.session_id, fetched.range.segment
        with self._lock:
            self._ranges.setdefault(key, []).append(fetched)

    def find(self, block: BlockWrite) -> FetchedRange | None:
        """The range that holds the session bytes which `block` copies; None if there is none."""
        if not self._ranges:
            return None
        with self._lock:
            found = self._ranges.get((block.session_id, SegmentId(block.run, block.roll)), ())
            return next((fetched for fetched in found if fetched.range_info(block) is not None), None)

    def forget(self, plan: WritePlan) -> None:
        """Drop the ranges that no plan after `plan` needs; plans are executed in order."""
        if not self._ranges:
            return
        with self._lock:
            for block in plan.blocks:
                key = block.session_id, SegmentId(block.run, block.roll)
                if key in self._ranges:
                    later = [fetched for fetched in self._ranges[key] if fetched.range.end > block.end]
                    self._ranges[key] = later
                    if not later:
                        del self._ranges[key]

    def clear(self) -> None:
        with self._lock:
            self._ranges.clear()

    @property
    def total_bytes(self) -> int:
        """The memory that the ranges use."""
        with self._lock:
            return sum(len(fetched.data) for found in self._ranges.values() for fetched in found)

"""Session ranges that were fetched from peers for the merger, in memory until they are merged.

The event loop adds them; the merger's thread finds and removes them.
"""

from __future__ import annotations

import threading

from rt.log.format.segment import SegmentId
from sequencer.sessions.input_planner import FetchedRange
from sequencer.state.write_plan import BlockWrite, WritePlan


class FetchedRanges:
    """The ranges, by segment. Any thread may call this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[tuple[int, SegmentId], list[FetchedRange]] = {}

    def add(self, fetched: FetchedRange) -> None:
        key = fetched.range.session_id, fetched.range.segment
        with self._lock:
            self._ranges.setdefault(key, []).append(fetched)

    def find(self, block: BlockWrite) -> FetchedRange | None:
        """A range that contains a block's input."""
        if not self._ranges:
            return None
        with self._lock:
            known = self._ranges.get((block.session_id, SegmentId(block.run, block.roll)), ())
            return next((one for one in known if one.range_info(block) is not None), None)

    def forget(self, order: WritePlan) -> None:
        """Drop the input of a plan that was executed; plans are executed in order."""
        if not self._ranges:
            return
        with self._lock:
            for block in order.blocks:
                key = block.session_id, SegmentId(block.run, block.roll)
                if key in self._ranges:
                    self._ranges[key] = [one for one in self._ranges[key] if one.range.end > block.end]
                    if not self._ranges[key]:
                        del self._ranges[key]

    def clear(self) -> None:
        with self._lock:
            self._ranges.clear()

    @property
    def total_bytes(self) -> int:
        """The memory that the ranges use."""
        with self._lock:
            return sum(len(one.data) for known in self._ranges.values() for one in known)

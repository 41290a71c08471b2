"""Whether trimming has overtaken a receiver of the merged log: what it wanted next was gone. Pure.

The items that a sender hands out are contiguous but for that: a segment is left before it was handed out
whole, or those between two are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from replicator.protocol.handshake import PullMerged
from replicator.protocol.messages import Chunk, Item, LogOffset, LogTrimmed, SegmentSealed


class TrimOvertake:
    """Follows one stream, which begins at `place`: at position `first`, unless it is within a segment."""

    def __init__(self, wanted: PullMerged, place: LogOffset, first: int) -> None:
        at = wanted.end if wanted.place is not None else wanted.position
        self.is_overtaken = isinstance(at, int) and first > at
        """Set once something is missing; whoever notes it sets it back."""
        self._segment = place.segment if place.offset else None
        """Of which some is to come; None between two segments."""
        self._end = first
        """Between two segments: the position that comes next."""
        self._log_start = 0

    def follow(self, items: Iterable[Item]) -> None:
        """These come next."""
        for item in items:
            match item:
                case LogTrimmed():
                    self._log_start = item.log_start
                case SegmentSealed():
                    self._segment, self._end = None, item.end
                case Chunk():
                    is_gap = self._segment not in {None, item.place.segment}
                    is_late = self._segment is None and self._end < self._log_start
                    self.is_overtaken |= is_gap or is_late
                    self._segment = item.place.segment

"""Whether trimming has overtaken a receiver of the merged log: what it needed next was trimmed. Pure.

The items of a sender are contiguous otherwise: a gap is a segment that was left before it was returned whole,
or segments that were passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from replicator.protocol.handshake import PullMerged
from replicator.protocol.messages import Chunk, Item, LogOffset, LogTrimmed, SegmentSealed


class TrimOvertake:
    """Follows one stream, which begins at `place`: at position `first`, unless that is within a segment."""

    def __init__(self, wanted: PullMerged, place: LogOffset, first: int) -> None:
        at = wanted.end if wanted.offset is not None else wanted.position
        self.is_overtaken = isinstance(at, int) and first > at
        """Set once something is missing; whoever records it resets it."""
        self._segment = place.segment if place.offset else None
        """The unfinished segment; None between two segments."""
        self._end = first  # Between two segments: the position that comes next.
        self._log_start = 0

    def follow(self, items: Iterable[Item]) -> None:
        for item in items:
            match item:
                case LogTrimmed():
                    self._log_start = item.log_start
                case SegmentSealed():
                    self._segment, self._end = None, item.end
                case Chunk():
                    is_gap = self._segment not in {None, item.start.segment}
                    is_late = self._segment is None and self._end < self._log_start
                    self.is_overtaken |= is_gap or is_late
                    self._segment = item.start.segment

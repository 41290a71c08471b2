"""Which sealed segments of a session its publisher may delete.

Pure: the caller reads the clock, and trims.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

from rt.log.segment import SegmentId
from rt.log.table import SealedSegment
from rt.progress import Level


class Trimmable(NamedTuple):
    """Trim what precedes `before` (None: nothing); look again in `wait_ns` (None: when more is merged)."""

    before: SegmentId | None
    wait_ns: int | None


NOTHING_TRIMMABLE: Final = Trimmable(None, None)


def trimmable(
    segments: Sequence[SealedSegment], merged: Level, *, now_ns: int, persistence_ns: int
) -> Trimmable:
    """What of the sealed `segments`, in log order, may go now: a prefix, so that the log has no hole.

    A segment may go when all its messages are merged and it has been sealed for `persistence_ns`. An earlier
    X is merged whole before anything of a later one is. A clock that was set back delays it, no more.
    """
    before: SegmentId | None = None
    for segment in segments[bisect_left(segments, True, key=_is_kept) :]:
        if not (merged.x > segment.id.x or (merged.x == segment.id.x and merged.number >= segment.end)):
            break
        left_ns = segment.sealed_ns + persistence_ns - now_ns
        if persistence_ns and left_ns > 0:
            return Trimmable(before, min(left_ns, persistence_ns))
        before = SegmentId(segment.id.x, segment.id.y + 1)
    return Trimmable(before, None)


def _is_kept(segment: SealedSegment) -> bool:
    return not segment.is_trimmed

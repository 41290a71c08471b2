"""Which batch boundaries of a session are kept while it is not merged: the newest, and a few of older bytes.

Pure. The leader, and the control and data process of each node, thin out by the same rule. So they keep the
same boundaries of older bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

FINE_BOUNDARIES_MAX: Final = 1 << 16
"""At most this many of a session's newest boundaries are all kept. The leader needs 270 bytes for each."""
FINE_BOUNDARIES_TOTAL: Final = 1 << 20
"""If more than this many boundaries are kept of all sessions, each long session gets a part of it."""
FINE_BOUNDARIES_MIN: Final = 1 << 10
"""The least part of a session. A session is long if more of its boundaries are kept."""
COARSE_BYTES: Final = 1 << 20
"""Distance of the boundaries that are kept of older bytes."""


def coarse_indices(offsets: Sequence[int], stop: int) -> list[int]:
    """The indices of the boundaries to keep of the first `stop`: the first one, and the last one before each
    multiple of `COARSE_BYTES`. `stop` is less than the number of offsets.
    """
    windows = [offset // COARSE_BYTES for offset in offsets[: stop + 1]]
    return [0, *(at for at in range(1, stop) if windows[at] != windows[at + 1])]


class SegmentBoundaryList(Protocol):
    """The boundaries that are kept of one segment, ascending."""

    @property
    def count(self) -> int: ...

    def thin_out(self, stop: int) -> int:
        """Keep only `coarse_indices` of the first `stop` boundaries. Returns how many were removed.

        `stop` is 0, or less than `count`. Does nothing if an earlier call has thinned them out.
        """


def thin_out_session(segments: Mapping[Any, SegmentBoundaryList], fine_max: int) -> int:
    """Thin out the boundaries of a session, but for its newest ones. Returns how many were removed.

    The order of the keys is that of the segments. About 3/4 of `fine_max` stay, so that there is room until
    the next thinning. The last boundary of each segment stays too.
    """
    removed, fine = 0, fine_max - fine_max // 4
    for key in sorted(segments, reverse=True):
        count = segments[key].count
        removed += segments[key].thin_out(max(0, min(count - fine, count - 1)))
        fine = max(0, fine - count)
    return removed


class BoundaryBudget:
    """Counts the boundaries that are kept of each session, and decides when to thin one out."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = self._long = 0
        self._left: dict[int, int] = {}
        """By session id: how many boundaries its last thinning kept."""

    def add(self, session_id: int, count: int) -> None:
        """Count boundaries that were added, or were removed if `count` is negative."""
        before = self._counts.get(session_id, 0)
        known = self._counts[session_id] = before + count
        self._total += count
        self._long += (known > FINE_BOUNDARIES_MIN) - (before > FINE_BOUNDARIES_MIN)
        if session_id in self._left:
            self._left[session_id] = min(self._left[session_id], known)

    def forget(self, session_id: int) -> None:
        self.add(session_id, -self._counts.get(session_id, 0))
        del self._counts[session_id]
        self._left.pop(session_id, None)

    def thin_out(self, session_id: int, segments: Mapping[Any, SegmentBoundaryList]) -> None:
        """Thin out a session if too many of its boundaries are kept."""
        if fine_max := self._fine_max(session_id, len(segments)):
            self.add(session_id, -thin_out_session(segments, fine_max))
            self._left[session_id] = self._counts[session_id]

    def _fine_max(self, session_id: int, segments: int) -> int:
        """How many of the session's newest boundaries to keep. 0: nothing must be thinned out now.

        The cost of a thinning grows with the number of segments, so that many must be new.
        """
        count = self._counts.get(session_id, 0)
        new = count - self._left.get(session_id, 0)
        if new <= max(FINE_BOUNDARIES_MIN // 4, segments):
            return 0
        limit = FINE_BOUNDARIES_MAX
        if self._total > FINE_BOUNDARIES_TOTAL:
            limit = max(FINE_BOUNDARIES_MIN, min(limit, FINE_BOUNDARIES_TOTAL // max(1, self._long)))
        return limit if count > limit and new > limit // 4 else 0

"""The durable batch boundaries of a session replica. Reports and merging are based on them.

Pure. Boundaries are kept in arrays. The owner thins them out if a session has very many. The merger reads a
missing boundary from the file. The caller must guard the index against other threads.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, field

from rt.log.format.running_checksum import ChecksummedBoundary, Checksums
from sequencer.leader.boundary_thinning import coarse_indices


class RangeInfo(NamedTuple):
    """A range of whole batches: the segment's running checksum at its end, the times of its messages, and the
    content checksums at its start and end.
    """

    chain_end: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    content: Checksums


def _array(code: str) -> array[int]:
    return array(code)


class BatchIndex(Struct):
    """Boundaries of one segment, ascending. A boundary's times cover the batches since the one before it."""

    offsets: array[int] = field(default_factory=lambda: _array("Q"))
    numbers: array[int] = field(default_factory=lambda: _array("Q"))
    chains: array[int] = field(default_factory=lambda: _array("I"))
    lows_ns: array[int] = field(default_factory=lambda: _array("q"))
    highs_ns: array[int] = field(default_factory=lambda: _array("q"))
    contents: array[int] = field(default_factory=lambda: _array("I"))
    thinned: int = 0
    """How many of the first boundaries an earlier thinning kept."""

    def add(self, marks: Iterable[ChecksummedBoundary]) -> None:
        """Add the boundaries after the last known boundary."""
        last = self.offsets[-1] if self.offsets else -1
        for mark in marks:
            if mark.offset > last:
                self.offsets.append(mark.offset)
                self.numbers.append(mark.number)
                self.chains.append(mark.chain)
                self.lows_ns.append(mark.timestamp_low_ns)
                self.highs_ns.append(mark.timestamp_high_ns)
                self.contents.append(mark.content)

    def range_info(self, start: int, end: int) -> RangeInfo | None:
        """The range between two boundaries; None unless both are known."""
        low, high = bisect_left(self.offsets, start), bisect_left(self.offsets, end)
        if high == len(self.offsets) or self.offsets[high] != end or self.offsets[low] != start:
            return None
        times = slice(low + 1, high + 1)
        content = Checksums(self.contents[low], self.contents[high])
        return RangeInfo(self.chains[high], min(self.lows_ns[times]), max(self.highs_ns[times]), content)

    @property
    def end(self) -> int:
        """The last boundary; 0 if there is none."""
        return self.offsets[-1] if self.offsets else 0

    def before(self, offset: int) -> ChecksummedBoundary | None:
        """The last boundary at or before `offset`."""
        at = bisect_right(self.offsets, offset) - 1
        return self._mark(at) if at >= 0 else None

    @property
    def count(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[ChecksummedBoundary]:
        return map(self._mark, range(len(self.offsets)))

    def prune_before(self, offset: int) -> None:
        """Drop the boundaries before `offset`, but keep the last one at or before it: if the boundary at
        `offset` was thinned out, a range that starts there is read from the file from that one.
        """
        below = max(0, bisect_right(self.offsets, offset) - 1)
        for values in self._columns():
            del values[:below]
        self.thinned = max(0, self.thinned - below)

    def _mark(self, at: int) -> ChecksummedBoundary:
        return ChecksummedBoundary(*(values[at] for values in self._columns()))

    def _columns(self) -> tuple[array[int], ...]:
        return self.offsets, self.numbers, self.chains, self.lows_ns, self.highs_ns, self.contents

    def thin_out(self, stop: int) -> int:
        """See `SegmentBoundaryList`. A node that restarts reports the boundaries that it kept, and the other
        nodes must have the same.
        """
        if stop <= self.thinned:
            return 0
        kept = coarse_indices(self.offsets, stop)
        lows = [self.lows_ns[0], *(min(self.lows_ns[a + 1 : b + 1]) for a, b in pairwise([*kept, stop]))]
        highs = [self.highs_ns[0], *(max(self.highs_ns[a + 1 : b + 1]) for a, b in pairwise([*kept, stop]))]
        self.lows_ns[: stop + 1] = array("q", lows)
        self.highs_ns[: stop + 1] = array("q", highs)
        for values in (self.offsets, self.numbers, self.chains, self.contents):
            values[: stop + 1] = array(values.typecode, [values[at] for at in [*kept, stop]])
        self.thinned = len(kept)
        return stop - len(kept)

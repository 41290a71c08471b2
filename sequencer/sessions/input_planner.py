"""Plans which session ranges a merger's node fetches, and when it copies merged bytes instead.

Pure. Invariants:
- Session ranges are requested before merged bytes.
- Merged bytes are requested only from a peer whose merged log is longer than the one here.
- Every requested range has its running checksums, so that only the committed bytes match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from rt.log.format.block import chain_start_of
from rt.log.format.segment import SegmentId
from sequencer.sessions.batch_index import BatchIndex, RangeInfo
from sequencer.state.write_plan import BlockWrite, WritePlan

STUCK_S: Final = 1.0
"""How long a stream that brings the missing bytes may pause before they are fetched from a peer."""
SLOW_S: Final = 5.0
"""How long such a stream may take in total for one range."""
RANGES_BYTES_MAX: Final = 32 << 20
"""Limits the bytes of ranges that wait in memory because they are fetched in advance, for plans after the
first one.
"""
BLOCKS_MAX: Final = 4096
"""Maximum number of blocks examined, which takes a few milliseconds. More are examined only if the first plan
has more.
"""


class SessionRange(NamedTuple):
    """Whole batches of one segment of a session, with the segment's running checksum at both ends."""

    session_id: int
    segment: SegmentId
    start: int
    chain_start: int
    end: int
    chain_end: int


class FetchedRange(Struct, frozen=True):
    """The verified bytes of a range. `marks` are all batch boundaries in it, both ends included."""

    range: SessionRange
    data: memoryview
    marks: BatchIndex

    def range_info(self, block: BlockWrite) -> RangeInfo | None:
        """The checksums and times of a block's input; None if the range does not contain it, or if its
        boundaries or its running checksum differ.
        """
        one = self.range
        if not one.start <= block.start < block.end <= one.end:
            return None
        found = self.marks.range_info(block.start, block.end)
        return found if found is not None and found.chain_end == block.chain_end else None

    def bytes_of(self, block: BlockWrite) -> memoryview:
        """The input of a block, which must be in this range."""
        return self.data[block.start - self.range.start : block.end - self.range.start]


def plan_ranges(
    plans: Iterable[WritePlan],
    is_here: Callable[[BlockWrite], bool],
    *,
    bytes_max: int = RANGES_BYTES_MAX,
) -> list[SessionRange]:
    """The missing input of plans: all input of the first plan, and input of later plans up to `bytes_max`.

    Adjacent ranges of a segment are joined.
    """
    found: dict[tuple[int, SegmentId], list[SessionRange]] = {}
    size = looked = 0
    for at, plan in enumerate(plans):
        looked += len(plan.blocks)
        if at and (size >= bytes_max or looked > BLOCKS_MAX):
            break
        for block in plan.blocks:
            if block.is_declaration or is_here(block):
                continue
            segment = SegmentId(block.run, block.roll)
            one = SessionRange(
                block.session_id, segment, block.start, chain_start_of(block.head), block.end, block.chain_end
            )
            known = found.setdefault((block.session_id, segment), [])
            if known and known[-1].end == one.start and known[-1].chain_end == one.chain_start:
                known[-1] = known[-1]._replace(end=one.end, chain_end=one.chain_end)
            else:
                known.append(one)
            size += block.end - block.start
    return [one for ranges in found.values() for one in ranges]


def is_due(*, waited_s: float, still_s: float, is_coming: bool) -> bool:
    """Whether missing input must be fetched now.

    `waited_s`: how long the merger has waited for it. `is_coming`: whether a stream brings it. `still_s`: how
    long that stream has not advanced.
    """
    return not is_coming or still_s >= STUCK_S or waited_s >= SLOW_S


def peers_ahead(ends: Mapping[str, int], position: int, *, is_cut_off: bool) -> list[str]:
    """The peers from which merged bytes may be copied, the furthest first. `ends` are their merged ends.

    If the log here is cut off, it is missing bytes before the next plan. These bytes may be the header of a
    segment. A header has no position of its own, so a peer with the same end may have the missing bytes.
    """
    ahead = [peer for peer, end in ends.items() if end > position or (is_cut_off and end == position)]
    return sorted(ahead, key=lambda peer: -ends[peer])

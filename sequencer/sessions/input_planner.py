"""What a merger is missing: which session ranges to fetch, and when merged bytes are asked for instead.

Pure. Invariants:
- A session range is asked for before merged bytes are.
- Merged bytes are asked only of a peer whose merged log goes further than the one here.
- Every range that is asked for is named with its chains, so that only the committed bytes fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from rt.log.format.block import chain_start_of
from rt.log.format.segment import SegmentId
from sequencer.sessions.batch_index import BatchIndex, RangeInfo
from sequencer.state.write_plan import BlockWrite, WritePlan

STUCK_S: Final = 1.0
"""A stream that brings the missing bytes may stand still for so long before they are fetched from a peer."""
SLOW_S: Final = 5.0
"""And may take so long in all for one range."""
RANGES_BYTES_MAX: Final = 32 << 20
"""Most bytes of ranges that wait in memory, fetched ahead of what the first order needs."""
BLOCKS_MAX: Final = 4096
"""So many blocks are looked at, if the first order has no more: that takes some milliseconds."""


class SessionRange(NamedTuple):
    """Whole batches of one segment of a session, and the segment's chain at both ends."""

    session_id: int
    segment: SegmentId
    start: int
    chain_start: int
    end: int
    chain_end: int


@dataclass(frozen=True, slots=True)
class FetchedRange:
    """The verified bytes of a range. `marks` are all batch boundaries in it, both ends included."""

    range: SessionRange
    data: memoryview
    marks: BatchIndex

    def stretch(self, block: BlockWrite) -> RangeInfo | None:
        """What is known of a block's input; None if it is not in here, or has another chain."""
        one = self.range
        if not one.start <= block.start < block.end <= one.end:
            return None
        found = self.marks.stretch(block.start, block.end)
        return found if found is not None and found.chain_end == block.chain_end else None

    def bytes_of(self, block: BlockWrite) -> memoryview:
        """The input of a block that is in here."""
        return self.data[block.start - self.range.start : block.end - self.range.start]


def plan_ranges(
    orders: Iterable[WritePlan],
    is_here: Callable[[BlockWrite], bool],
    *,
    bytes_max: int = RANGES_BYTES_MAX,
) -> list[SessionRange]:
    """What is missing of the input of orders: all that the first one needs, later ones up to `bytes_max`.

    Ranges that follow each other in a segment are joined.
    """
    found: dict[tuple[int, SegmentId], list[SessionRange]] = {}
    size = looked = 0
    for at, order in enumerate(orders):
        looked += len(order.blocks)
        if at and (size >= bytes_max or looked > BLOCKS_MAX):
            break
        for block in order.blocks:
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
    """Whether missing input is to be fetched now.

    `waited_s` is how long the merger has waited for it. `still_s` is how long the stream that brings it has
    not moved. `is_coming`: there is such a stream.
    """
    return not is_coming or still_s >= STUCK_S or waited_s >= SLOW_S


def peers_ahead(ends: Mapping[str, int], position: int, *, is_cut_off: bool) -> list[str]:
    """The peers from which merged bytes may be copied, the furthest first. `ends` are their merged ends.

    A log that is cut off lacks bytes before the next order. These may be the header of a segment, which has
    no position of its own, so a peer with the same end may have them.
    """
    ahead = [peer for peer, end in ends.items() if end > position or (is_cut_off and end == position)]
    return sorted(ahead, key=lambda peer: -ends[peer])

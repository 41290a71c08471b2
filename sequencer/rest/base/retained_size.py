"""The size of the retained merged log, in all and from a position on. Pure."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from sequencer.state.state import SequencerState


class _Piece(NamedTuple):
    first: int
    end: int
    size: int


class RetainedSize:
    """Retained segments of a state, including the active one. Build once per state."""

    def __init__(self, state: SequencerState) -> None:
        pieces = [_Piece(one.first, one.end, one.size_bytes) for one in state.segments if not one.is_trimmed]
        merged = state.merged
        if merged.segment is not None:
            pieces.append(_Piece(merged.first, state.position, merged.offset))
        self._pieces = pieces
        self._ends = [piece.end for piece in pieces]
        self._bytes_up_to = [0, *accumulate(piece.size for piece in pieces)]

    @property
    def segments(self) -> int:
        return len(self._pieces)

    @property
    def total_bytes(self) -> int:
        return self._bytes_up_to[-1]

    def bytes_from(self, position: int) -> int:
        """Approximate bytes from `position` to the end; exact at segment boundaries."""
        at = bisect_right(self._ends, position)
        if at == len(self._pieces):
            return 0
        first, end, size = self._pieces[at]
        rest = size if position <= first else size * (end - position) // (end - first)
        return rest + self.total_bytes - self._bytes_up_to[at + 1]

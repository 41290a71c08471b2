"""How much of the merged log is kept, and how much of that lies behind a position. Pure."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from sequencer.state import State


class _Piece(NamedTuple):
    first: int
    end: int
    size: int


class Kept:
    """The segments that a state keeps, the growing one too. Made once, asked often."""

    def __init__(self, state: State) -> None:
        pieces = [_Piece(one.first, one.end, one.size_bytes) for one in state.segments if not one.is_trimmed]
        merged = state.merged
        if merged.segment is not None:
            pieces.append(_Piece(merged.first, state.position, merged.offset))
        self._pieces = pieces
        self._ends = [piece.end for piece in pieces]
        self._bytes_up_to = [0, *accumulate(piece.size for piece in pieces)]

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self._pieces)

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self._bytes_up_to[-1]

    def bytes_from(self, position: int) -> int:
        """About how many bytes begin at `position`; exact at the ends of segments."""
        at = bisect_right(self._ends, position)
        if at == len(self._pieces):
            return 0
        first, end, size = self._pieces[at]
        rest = size if position <= first else size * (end - position) // (end - first)
        return rest + self.total_bytes - self._bytes_up_to[at + 1]

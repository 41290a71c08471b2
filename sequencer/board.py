"""The leader's board: what the nodes reported of the session bytes they hold durably.

Pure. The law: an end counts only for nodes that reported this very boundary with this very chain, so a
majority for it holds the same bytes up to there. Where nodes disagree about a boundary the session stops.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final, NamedTuple

from rt.errors import FormatError
from rt.log.layout import NUMBER_MAX
from sequencer.orders import SessionEnd

MARK: Final = struct.Struct("<QQI")


class Mark(NamedTuple):
    """A batch boundary: the offset, the number behind it, the segment's chain there."""

    offset: int
    number: int
    chain: int


def pack_marks(marks: Iterable[Mark]) -> bytes:
    """Marks as reports carry them."""
    return b"".join(MARK.pack(*mark) for mark in marks)


def unpack_marks(data: bytes) -> list[Mark]:
    """Marks of a report, ascending; `rt.FormatError`."""
    if len(data) % MARK.size:
        raise FormatError("marks of a report are cut short", got=f"{len(data)} bytes")
    marks = [Mark(*fields) for fields in MARK.iter_unpack(data)]
    if any(earlier.offset >= later.offset for earlier, later in pairwise(marks)):
        raise FormatError("marks of a report do not ascend", got=[mark.offset for mark in marks[:4]])
    return marks


class SegmentKey(NamedTuple):
    """A segment of a session."""

    session_id: int
    x: int
    y: int


@dataclass(slots=True)
class _Boundary:
    mark: Mark
    nodes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Segment:
    boundaries: dict[int, _Boundary] = field(default_factory=dict)
    """By offset."""
    offsets: list[int] = field(default_factory=list)
    """Ascending."""
    tops: dict[str, int] = field(default_factory=dict)
    """The furthest offset that each node reported."""

    def reached_by(self, count: int) -> int:
        """An offset beyond which no boundary is held by so many nodes; -1 if so many reported nothing."""
        tops = sorted(self.tops.values(), reverse=True)
        return tops[count - 1] if len(tops) >= count else -1


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two nodes hold different bytes up to the same boundary."""

    key: SegmentKey
    offset: int
    node: str
    got: Mark
    others: tuple[str, ...]
    wanted: Mark


class Board:
    """What is known of every session, from all nodes' reports."""

    def __init__(self, members: int) -> None:
        self.majority = members // 2 + 1
        # By session id first: what is asked of one session costs nothing of the others.
        self._segments: dict[int, dict[tuple[int, int], _Segment]] = {}
        self._announced: dict[int, dict[int, SessionEnd]] = {}
        self._finals: dict[int, dict[int, dict[str, SessionEnd]]] = {}
        self.disagreements: dict[int, Disagreement] = {}
        """By session id: nothing more of these is planned."""

    # What nodes report

    def on_marks(self, node: str, key: SegmentKey, marks: Iterable[Mark]) -> None:
        """A node holds these boundaries durably."""
        segment = self._segments.setdefault(key.session_id, {}).setdefault(key[1:], _Segment())
        for mark in marks:
            known = segment.boundaries.get(mark.offset)
            if known is None:
                known = segment.boundaries[mark.offset] = _Boundary(mark)
                if not segment.offsets or mark.offset > segment.offsets[-1]:
                    segment.offsets.append(mark.offset)
                else:
                    insort(segment.offsets, mark.offset)
            elif known.mark != mark:
                others = tuple(sorted(known.nodes))
                found = Disagreement(key, mark.offset, node, mark, others, known.mark)
                self.disagreements.setdefault(key.session_id, found)
                continue
            known.nodes.add(node)
            segment.tops[node] = max(mark.offset, segment.tops.get(node, 0))

    def on_announced(self, end: SessionEnd) -> None:
        """The sender says that this X ends there, on the publisher's disk."""
        self._announced.setdefault(end.session_id, {})[end.x] = end

    def on_final(self, node: str, end: SessionEnd) -> None:
        """X is fenced on a node, and that is all the node has of it."""
        self._finals.setdefault(end.session_id, {}).setdefault(end.x, {})[node] = end

    def forget_node(self, node: str) -> None:
        """Whatever the node reported does not count any more: its data process began anew."""
        for segments in self._segments.values():
            for place, segment in list(segments.items()):
                for offset, boundary in list(segment.boundaries.items()):
                    boundary.nodes.discard(node)
                    if not boundary.nodes:
                        del segment.boundaries[offset]
                segment.offsets = [offset for offset in segment.offsets if offset in segment.boundaries]
                segment.tops.pop(node, None)
                if not segment.offsets:
                    del segments[place]
        for lives in self._finals.values():
            for finals in lives.values():
                finals.pop(node, None)

    def forget_below(self, session_id: int, x: int, y: int, offset: int) -> None:
        """What is below that place is merged, and never planned again."""
        segments = self._segments.get(session_id, {})
        for place in [place for place in segments if place < (x, y)]:
            del segments[place]
        segment = segments.get((x, y))
        if segment is not None:
            below = bisect_right(segment.offsets, offset - 1)
            for gone in segment.offsets[:below]:
                del segment.boundaries[gone]
            del segment.offsets[:below]
        for kind in (self._announced, self._finals):
            lives = kind.get(session_id, {})
            for earlier in [earlier for earlier in lives if earlier < x]:
                del lives[earlier]

    # What the planner asks

    def mark_at(self, key: SegmentKey, offset: int) -> Mark | None:
        """The boundary there, if a majority holds it."""
        segment = self._segment(key)
        boundary = segment.boundaries.get(offset) if segment is not None else None
        return boundary.mark if boundary is not None and len(boundary.nodes) >= self.majority else None

    def furthest(
        self, key: SegmentKey, start: int, bytes_max: int, number_max: int = NUMBER_MAX
    ) -> Mark | None:
        """The last boundary behind `start` that a majority holds, `bytes_max` ahead at most.

        If a majority holds none so near, the first one further on: a range holds at least one batch. The
        number there is at most `number_max`.
        """
        segment = self._segment(key)
        if segment is None:
            return None
        offsets = segment.offsets
        low = bisect_right(offsets, start)
        stop = max(bisect_right(offsets, segment.reached_by(self.majority)), low)
        high = min(bisect_right(offsets, start + bytes_max), stop)
        for at in chain(range(high - 1, low - 1, -1), range(high, stop)):
            boundary = segment.boundaries[offsets[at]]
            if len(boundary.nodes) >= self.majority and boundary.mark.number <= number_max:
                return boundary.mark
        return None

    def announced(self, session_id: int, x: int) -> SessionEnd | None:
        """Where the sender says that the X ends."""
        return self._announced.get(session_id, {}).get(x)

    def finals(self, session_id: int, x: int) -> list[SessionEnd]:
        """What nodes hold of a fenced X; one entry a node."""
        return list(self._finals.get(session_id, {}).get(x, {}).values())

    def _segment(self, key: SegmentKey) -> _Segment | None:
        return self._segments.get(key.session_id, {}).get(key[1:])

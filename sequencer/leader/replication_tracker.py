"""The leader's board: what the nodes reported of the session bytes they hold durably.

Pure. The law: an end counts only for nodes that reported this very boundary with this very chain, so a
majority for it holds the same bytes up to there. Where nodes disagree about a boundary the session stops.
A final end is such a boundary: nodes that agree on where an X ends, but not on its bytes, do not agree.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final, NamedTuple

from rt.errors import FormatError
from rt.log.format.constants import NUMBER_MAX
from sequencer.state.write_plan import SessionEnd

MARK: Final = struct.Struct("<QQI")


class BatchBoundary(NamedTuple):
    """A batch boundary: the offset, the number behind it, the segment's chain there."""

    offset: int
    number: int
    chain: int


def pack_marks(marks: Iterable[BatchBoundary]) -> bytes:
    """Marks as reports carry them."""
    return b"".join(MARK.pack(*mark) for mark in marks)


def unpack_marks(data: bytes) -> list[BatchBoundary]:
    """Marks of a report, ascending; `rt.FormatError`."""
    if len(data) == MARK.size:
        return [BatchBoundary._make(MARK.unpack(data))]
    if len(data) % MARK.size:
        raise FormatError("marks of a report are cut short", got=f"{len(data)} bytes")
    marks = list(map(BatchBoundary._make, MARK.iter_unpack(data)))
    if len(marks) > 1 and any(earlier.offset >= later.offset for earlier, later in pairwise(marks)):
        raise FormatError("marks of a report do not ascend", got=[mark.offset for mark in marks[:4]])
    return marks


class SegmentKey(NamedTuple):
    """A segment of a session."""

    session_id: int
    run: int
    roll: int


@dataclass(slots=True)
class _Boundary:
    mark: BatchBoundary
    nodes: int = 0
    """Those that hold it, a bit each."""


@dataclass(slots=True)
class _Segment:
    boundaries: dict[int, _Boundary] = field(default_factory=dict)
    """By offset."""
    offsets: list[int] = field(default_factory=list)
    """Ascending."""
    tops: dict[str, int] = field(default_factory=dict)
    """The furthest offset that each node reported."""
    held: int = -1
    """The furthest that a majority was ever found to hold; -1: none."""

    def reached_by(self, count: int) -> int:
        """An offset beyond which no boundary is held by so many nodes; -1 if so many reported nothing."""
        tops = sorted(self.tops.values(), reverse=True)
        return tops[count - 1] if len(tops) >= count else -1


@dataclass(frozen=True, slots=True)
class CopyDisagreement:
    """Two nodes hold different bytes up to the same boundary."""

    key: SegmentKey
    offset: int
    node: str
    got: BatchBoundary
    others: tuple[str, ...]
    wanted: BatchBoundary


class ReplicationTracker:
    """What is known of every session, from all nodes' reports."""

    def __init__(self, members: int) -> None:
        self.members, self.majority = members, members // 2 + 1
        # By session id first: what is asked of one session costs nothing of the others.
        self._segments: dict[int, dict[tuple[int, int], _Segment]] = {}
        self._announced: dict[int, dict[int, SessionEnd]] = {}
        self._finals: dict[int, dict[int, dict[str, SessionEnd]]] = {}
        self._bits: dict[str, int] = {}
        self.disagreements: dict[int, CopyDisagreement] = {}
        """By session id: nothing more of these is planned."""
        self.news: set[int] = set()
        """Sessions of which something is new that a plan may depend on: see `take_news`."""
        self.fresh_bytes = 0
        """So much a majority came to hold; whoever plans takes off what it planned."""

    def take_news(self) -> set[int]:
        """The sessions of which a majority holds more, or an end became known, since this was last asked."""
        news, self.news = self.news, set()
        return news

    # What nodes report

    def on_marks(self, node: str, key: SegmentKey, marks: Iterable[BatchBoundary]) -> None:
        """A node holds these boundaries durably."""
        segment = self._segments.setdefault(key.session_id, {}).setdefault(key[1:], _Segment())
        bit = self._bits.setdefault(node, 1 << len(self._bits))
        boundaries, top = segment.boundaries, segment.tops.get(node, -1)
        for mark in marks:
            offset = mark.offset
            known = boundaries.get(offset)
            if known is None:
                known = boundaries[offset] = _Boundary(mark)
                if not segment.offsets or offset > segment.offsets[-1]:
                    segment.offsets.append(offset)
                else:
                    insort(segment.offsets, offset)
            elif known.mark != mark:
                found = CopyDisagreement(key, offset, node, mark, self._names(known.nodes), known.mark)
                self.disagreements.setdefault(key.session_id, found)
                continue
            if not known.nodes & bit:
                known.nodes |= bit
                if known.nodes.bit_count() == self.majority:
                    self._on_held(key.session_id, segment, offset)
            top = max(top, offset)
        if top >= 0:
            segment.tops[node] = top

    def _on_held(self, session_id: int, segment: _Segment, offset: int) -> None:
        self.news.add(session_id)
        if offset > segment.held:
            if segment.held >= 0:
                self.fresh_bytes += offset - segment.held
            segment.held = offset

    def _names(self, nodes: int) -> tuple[str, ...]:
        return tuple(sorted(name for name, bit in self._bits.items() if nodes & bit))

    def on_announced(self, end: SessionEnd) -> None:
        """The sender says that this X ends there, on the publisher's disk."""
        known = self._announced.setdefault(end.session_id, {})
        if known.get(end.run) != end:
            known[end.run] = end
            self.news.add(end.session_id)

    def on_final(self, node: str, end: SessionEnd, chain: int | None) -> None:
        """X is fenced on a node, and that is all the node has of it, with that chain; None: it has nothing.

        Whoever asks for `finals` may go by it alone, before the node's marks have come.
        """
        if chain is not None:
            key = SegmentKey(end.session_id, end.run, end.roll)
            self.on_marks(node, key, [BatchBoundary(end.offset, end.number, chain)])
        known = self._finals.setdefault(end.session_id, {}).setdefault(end.run, {})
        if known.get(node) != end:
            known[node] = end
            self.news.add(end.session_id)

    def forget_node(self, node: str) -> None:
        """Whatever the node reported does not count any more: its data process began anew."""
        others = ~self._bits.get(node, 0)
        for segments in self._segments.values():
            for place, segment in list(segments.items()):
                for offset, boundary in list(segment.boundaries.items()):
                    boundary.nodes &= others
                    if not boundary.nodes:
                        del segment.boundaries[offset]
                segment.offsets = [offset for offset in segment.offsets if offset in segment.boundaries]
                segment.tops.pop(node, None)
                if not segment.offsets:
                    del segments[place]
        for lives in self._finals.values():
            for finals in lives.values():
                finals.pop(node, None)

    def forget_session(self, session_id: int) -> None:
        """Nothing more comes of it."""
        for kind in (self._segments, self._announced, self._finals, self.disagreements):
            kind.pop(session_id, None)
        self.news.discard(session_id)

    def forget_below(self, session_id: int, run: int, roll: int, offset: int) -> None:
        """What is below that place is merged, and never planned again."""
        segments = self._segments.get(session_id, {})
        for place in [place for place in segments if place < (run, roll)]:
            del segments[place]
        segment = segments.get((run, roll))
        if segment is not None:
            below = bisect_right(segment.offsets, offset - 1)
            for gone in segment.offsets[:below]:
                del segment.boundaries[gone]
            del segment.offsets[:below]
        for kind in (self._announced, self._finals):
            lives = kind.get(session_id, {})
            for earlier in [earlier for earlier in lives if earlier < run]:
                del lives[earlier]

    # What the planner asks

    def mark_at(self, key: SegmentKey, offset: int) -> BatchBoundary | None:
        """The boundary there, if a majority holds it."""
        segment = self._segment(key)
        boundary = segment.boundaries.get(offset) if segment is not None else None
        if boundary is None or boundary.nodes.bit_count() < self.majority:
            return None
        return boundary.mark

    def furthest(
        self, key: SegmentKey, start: int, bytes_max: int, number_max: int = NUMBER_MAX
    ) -> BatchBoundary | None:
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
            if boundary.nodes.bit_count() >= self.majority and boundary.mark.number <= number_max:
                return boundary.mark
        return None

    def announced(self, session_id: int, run: int) -> SessionEnd | None:
        """Where the sender says that the X ends."""
        return self._announced.get(session_id, {}).get(run)

    def finals(self, session_id: int, run: int) -> Mapping[str, SessionEnd]:
        """What nodes hold of a fenced X, by node."""
        return self._finals.get(session_id, {}).get(run, {})

    def number_at(self, key: SegmentKey, offset: int) -> int | None:
        """The number behind the boundary there, if any node holds it."""
        segment = self._segment(key)
        boundary = segment.boundaries.get(offset) if segment is not None else None
        return boundary.mark.number if boundary is not None else None

    def top(self, node: str, session_id: int, run: int) -> tuple[int, int] | None:
        """Segment and offset of the furthest boundary that a node reported of an X; None: of no one."""
        tops = (
            (roll, segment.tops[node])
            for (at, roll), segment in self._segments.get(session_id, {}).items()
            if at == run and node in segment.tops
        )
        return max(tops, default=None)

    def tops(self, session_id: int, run: int) -> list[tuple[int, int]]:
        """Segment and offset of what any node reported furthest of each segment of an X."""
        return [
            (roll, max(segment.tops.values()))
            for (at, roll), segment in self._segments.get(session_id, {}).items()
            if at == run and segment.tops
        ]

    def _segment(self, key: SegmentKey) -> _Segment | None:
        return self._segments.get(key.session_id, {}).get(key[1:])

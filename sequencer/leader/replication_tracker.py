"""Tracks for the leader which session bytes each node holds durably.

Pure. Invariants:
- A node counts for a boundary only if it reported this boundary with the same running checksum. So if a
  majority counts for a boundary, its nodes hold the same bytes up to it.
- If nodes disagree about a boundary, nothing more of the session is planned.
- A final end is also such a boundary: nodes that agree on the end of a run, but not on its bytes, disagree.
- A session that is not merged takes bounded memory: see `boundary_thinning`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import Final, NamedTuple

from msgspec import Struct, field

from rt.errors import FormatError
from rt.log.format.constants import NUMBER_MAX
from sequencer.leader.boundary_thinning import BoundaryBudget, coarse_indices
from sequencer.state.write_plan import SessionEnd

MARK: Final = struct.Struct("<QQI")


class BatchBoundary(NamedTuple):
    """A batch boundary: its offset, the number of the next message, and the segment's running checksum."""

    offset: int
    number: int
    chain: int


def pack_boundaries(boundaries: Iterable[BatchBoundary]) -> bytes:
    """Encode boundaries for a report."""
    return b"".join(MARK.pack(*one) for one in boundaries)


def unpack_boundaries(data: bytes) -> list[BatchBoundary]:
    """Decode the boundaries of a report, in ascending order. `rt.FormatError` if they are malformed."""
    if len(data) == MARK.size:
        return [BatchBoundary._make(MARK.unpack(data))]
    if len(data) % MARK.size:
        raise FormatError("the boundaries of a report are truncated", got=f"{len(data)} bytes")
    boundaries = list(map(BatchBoundary._make, MARK.iter_unpack(data)))
    if any(earlier.offset >= later.offset for earlier, later in pairwise(boundaries)):
        raise FormatError("boundaries of a report do not ascend", got=[one.offset for one in boundaries[:4]])
    return boundaries


class SegmentKey(NamedTuple):
    session_id: int
    run: int
    roll: int


class _HeldBoundary(Struct):
    boundary: BatchBoundary
    nodes: int = 0
    """The nodes that hold it, one bit each."""


class _Segment(Struct):
    boundaries: dict[int, _HeldBoundary] = field(default_factory=dict)
    """By offset."""
    offsets: list[int] = field(default_factory=list)
    """Ascending."""
    tops: dict[str, int] = field(default_factory=dict)
    """By node: the last offset that it reported."""
    held: int = -1
    """The last offset that a majority was found to hold; -1 if none."""
    thinned: int = 0
    """How many of the first boundaries an earlier thinning kept."""

    @property
    def count(self) -> int:
        return len(self.offsets)

    def add_offsets(self, new: list[int]) -> None:
        """Add the offsets of new boundaries. Many of them may be older than known ones: a slow node reports
        boundaries that were thinned out here.
        """
        is_unordered = any(earlier > later for earlier, later in pairwise([*self.offsets[-1:], *new]))
        if is_unordered and len(new) == 1:
            insort(self.offsets, new[0])
            return
        self.offsets += new
        if is_unordered:
            self.offsets.sort()  # Few ascending parts, so it takes about as long as copying them.

    def thin_out(self, stop: int) -> int:
        """See `SegmentBoundaryList`. The last boundary that each node reported stays too."""
        if stop <= self.thinned:
            return 0
        kept = {*map(self.offsets.__getitem__, coarse_indices(self.offsets, stop)), *self.tops.values()}
        self.offsets[:stop] = left = [offset for offset in self.offsets[:stop] if offset in kept]
        self.thinned = len(left)
        # A new dictionary, because deleting from one frees no memory.
        self.boundaries = {offset: self.boundaries[offset] for offset in self.offsets}
        return stop - len(left)

    def reached_by(self, count: int) -> int:
        """The last offset that `count` nodes may hold; -1 if fewer than `count` nodes reported an offset."""
        tops = sorted(self.tops.values(), reverse=True)
        return tops[count - 1] if len(tops) >= count else -1


class ReplicaDisagreement(Struct, frozen=True):
    """Two nodes hold different bytes up to the same boundary."""

    key: SegmentKey
    offset: int
    node: str
    got: BatchBoundary
    others: tuple[str, ...]
    wanted: BatchBoundary


class ReplicationTracker:
    """Everything that nodes reported of all sessions."""

    def __init__(self, members: int) -> None:
        self.members, self.majority = members, members // 2 + 1
        # By session id first, so that a query about one session does not scan the others.
        self._segments: dict[int, dict[tuple[int, int], _Segment]] = {}
        self._announced: dict[int, dict[int, SessionEnd]] = {}
        self._finals: dict[int, dict[int, dict[str, SessionEnd]]] = {}
        self._bits: dict[str, int] = {}
        self._budget = BoundaryBudget()
        self.disagreements: dict[int, ReplicaDisagreement] = {}
        """By session id. Nothing more of these sessions is planned."""
        self.news: set[int] = set()
        """Sessions with changes on which a plan may depend: see `take_news`."""
        self.fresh_bytes = 0
        """Number of bytes that a majority has newly come to hold. The planner subtracts the bytes that it
        planned.
        """

    def take_news(self) -> set[int]:
        """Return the sessions of which a majority holds more, or an end became known, since the last call."""
        news, self.news = self.news, set()
        return news

    def on_boundaries(self, node: str, key: SegmentKey, reported: Iterable[BatchBoundary]) -> None:
        """Record boundaries that a node holds durably."""
        segment = self._segments.setdefault(key.session_id, {}).setdefault(key[1:], _Segment())
        bit = self._bits.setdefault(node, 1 << len(self._bits))
        boundaries, top = segment.boundaries, segment.tops.get(node, -1)
        new: list[int] = []
        for one in reported:
            offset = one.offset
            known = boundaries.get(offset)
            if known is None:
                known = boundaries[offset] = _HeldBoundary(one)
                new.append(offset)
            elif known.boundary != one:
                found = ReplicaDisagreement(key, offset, node, one, self._names(known.nodes), known.boundary)
                self.disagreements.setdefault(key.session_id, found)
                continue
            if not known.nodes & bit:
                known.nodes |= bit
                if known.nodes.bit_count() == self.majority:
                    self._on_held(key.session_id, segment, offset)
            top = max(top, offset)
        segment.add_offsets(new)
        if top >= 0:
            segment.tops[node] = top
        self._budget.add(key.session_id, len(new))
        self._budget.thin_out(key.session_id, self._segments[key.session_id])

    def _on_held(self, session_id: int, segment: _Segment, offset: int) -> None:
        self.news.add(session_id)
        if offset > segment.held:
            if segment.held >= 0:
                self.fresh_bytes += offset - segment.held
            segment.held = offset

    def _names(self, nodes: int) -> tuple[str, ...]:
        return tuple(sorted(name for name, bit in self._bits.items() if nodes & bit))

    def on_announced(self, end: SessionEnd) -> None:
        """Record the end of a run that its publisher announced."""
        known = self._announced.setdefault(end.session_id, {})
        if known.get(end.run) != end:
            known[end.run] = end
            self.news.add(end.session_id)

    def on_final(self, node: str, end: SessionEnd, chain: int | None) -> None:
        """Record the end of a fenced run at a node, with the running checksum; None if the node has nothing
        of the run.

        The caller of `finals` may rely on this record alone, before the boundaries of the node have arrived.
        """
        if chain is not None:
            key = SegmentKey(end.session_id, end.run, end.roll)
            self.on_boundaries(node, key, [BatchBoundary(end.offset, end.number, chain)])
        known = self._finals.setdefault(end.session_id, {}).setdefault(end.run, {})
        if known.get(node) != end:
            known[node] = end
            self.news.add(end.session_id)

    def forget_node(self, node: str) -> None:
        """Drop everything that a node reported: its data process was restarted."""
        others = ~self._bits.get(node, 0)
        for session_id, segments in self._segments.items():
            for place, segment in list(segments.items()):
                for offset, boundary in list(segment.boundaries.items()):
                    boundary.nodes &= others
                    if not boundary.nodes:
                        del segment.boundaries[offset]
                self._budget.add(session_id, len(segment.boundaries) - len(segment.offsets))
                segment.offsets = [offset for offset in segment.offsets if offset in segment.boundaries]
                segment.tops.pop(node, None)
                if not segment.offsets:
                    del segments[place]
        for active_runs in self._finals.values():
            for finals in active_runs.values():
                finals.pop(node, None)

    def forget_session(self, session_id: int) -> None:
        """Drop a session of which nothing more can arrive."""
        for kind in (self._segments, self._announced, self._finals, self.disagreements):
            kind.pop(session_id, None)
        self._budget.forget(session_id)
        self.news.discard(session_id)

    def prune_before(self, session_id: int, run: int, roll: int, offset: int) -> None:
        """Drop everything known about the bytes before this offset. They are merged and never planned
        again.
        """
        segments = self._segments.get(session_id, {})
        for place in [place for place in segments if place < (run, roll)]:
            self._budget.add(session_id, -len(segments.pop(place).offsets))
        segment = segments.get((run, roll))
        if segment is not None:
            below = bisect_right(segment.offsets, offset - 1)
            for gone in segment.offsets[:below]:
                del segment.boundaries[gone]
            del segment.offsets[:below]
            segment.thinned = max(0, segment.thinned - below)
            self._budget.add(session_id, -below)
        for kind in (self._announced, self._finals):
            active_runs = kind.get(session_id, {})
            for earlier in [earlier for earlier in active_runs if earlier < run]:
                del active_runs[earlier]

    def boundary_at(self, key: SegmentKey, offset: int) -> BatchBoundary | None:
        """The boundary at `offset`, if a majority holds it."""
        segment = self._segment(key)
        held = segment.boundaries.get(offset) if segment is not None else None
        if held is None or held.nodes.bit_count() < self.majority:
            return None
        return held.boundary

    def furthest(
        self, key: SegmentKey, start: int, bytes_max: int, number_max: int = NUMBER_MAX
    ) -> BatchBoundary | None:
        """Return the last boundary that a majority holds and that is at most `bytes_max` after `start`.

        If there is none within that distance, return the first one after it, because a range has at least one
        batch. The number of the returned boundary is at most `number_max`.
        """
        segment = self._segment(key)
        if segment is None:
            return None
        offsets = segment.offsets
        low = bisect_right(offsets, start)
        stop = max(bisect_right(offsets, segment.reached_by(self.majority)), low)
        high = min(bisect_right(offsets, start + bytes_max), stop)
        for at in chain(range(high - 1, low - 1, -1), range(high, stop)):
            held = segment.boundaries[offsets[at]]
            if held.nodes.bit_count() >= self.majority and held.boundary.number <= number_max:
                return held.boundary
        return None

    def announced(self, session_id: int, run: int) -> SessionEnd | None:
        return self._announced.get(session_id, {}).get(run)

    def finals(self, session_id: int, run: int) -> Mapping[str, SessionEnd]:
        """For each node, the end of the part of a fenced run that it holds."""
        return self._finals.get(session_id, {}).get(run, {})

    def number_at(self, key: SegmentKey, offset: int) -> int | None:
        """The number of the message after the boundary, if any node holds the boundary."""
        segment = self._segment(key)
        held = segment.boundaries.get(offset) if segment is not None else None
        return held.boundary.number if held is not None else None

    def top(self, node: str, session_id: int, run: int) -> tuple[int, int] | None:
        """Roll and offset of the last boundary that a node reported of a run; None if there is none."""
        tops = (
            (roll, segment.tops[node])
            for (at, roll), segment in self._segments.get(session_id, {}).items()
            if at == run and node in segment.tops
        )
        return max(tops, default=None)

    def tops(self, session_id: int, run: int) -> list[tuple[int, int]]:
        """For each segment of a run, its roll and the last offset that any node reported."""
        return [
            (roll, max(segment.tops.values()))
            for (at, roll), segment in self._segments.get(session_id, {}).items()
            if at == run and segment.tops
        ]

    def _segment(self, key: SegmentKey) -> _Segment | None:
        return self._segments.get(key.session_id, {}).get(key[1:])

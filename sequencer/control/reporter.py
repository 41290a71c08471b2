"""What this node's data process holds durably, and the reports to the leader that are made of it.

Pure. The law: a leader that took every report since a full one knows every boundary from what is consumed on,
but for those thinned out: of a long backlog one each `COARSE_BYTES` is kept, the same on all nodes.

When the leader is told what this node holds: at once if there is news, and in a while if there is none.

The consensus thread alone uses it. Invariants:
- A report that was lost is followed by a full one. So is one that went to another leader.
- Nothing is reported of a disk that has not joined: the leader would take it for the disk before, which may
  have held more.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.leader.replication_tracker import BatchBoundary, SegmentKey, pack_marks, unpack_marks
from sequencer.state.write_plan import SessionEnd

FINE_MARKS_MAX: Final = 1 << 16
"""Boundaries of a segment that are kept all; of more, the oldest are thinned out."""
COARSE_BYTES: Final = 8 << 20
REPORT_MARKS_MAX: Final = 1 << 15
"""In one report: 640 KiB, below what the network carries at once."""


_NONE: Final[dict[int, pb.SessionEnd]] = {}


@dataclass(slots=True)
class _Held:
    marks: list[BatchBoundary] = field(default_factory=list)
    reported: int = 0
    """So many of `marks` the present leader was told."""

    def add(self, marks: list[BatchBoundary]) -> None:
        """These are durable. What became so while a data process begins to tell all may come before that."""
        if not self.marks or not marks or marks[0].offset > self.marks[-1].offset:
            self.marks.extend(marks)
            return
        known = {mark.offset for mark in self.marks}
        new = [mark for mark in marks if mark.offset not in known]
        if new and new[0].offset < self.marks[-1].offset:
            self.reported = 0
        self.marks = sorted([*self.marks, *new])


@dataclass(slots=True)
class ClusterStandings:
    """What else a report says."""

    merged: pb.MergedReport = field(default_factory=pb.MergedReport)
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    step: pb.DataStep = field(default_factory=pb.DataStep)


class DurableEnds:
    """Durable boundaries, announced and final ends of the sessions of one start of the data process."""

    def __init__(self, boot: bytes) -> None:
        self.boot = boot
        self.standings = ClusterStandings()
        # By session id first: what is merged of one session costs nothing of the others.
        self._held: dict[int, dict[SegmentKey, _Held]] = {}
        self._announced: dict[int, dict[int, pb.SessionEnd]] = {}
        self._finals: dict[int, dict[int, pb.SessionEnd]] = {}
        self._news: dict[SegmentKey, None] = {}
        self._connected: list[int] = []
        """Sessions whose publishers push to this node, as last said; empty once it was reported."""
        self._sequence = 0
        self._is_full = True
        self._joins = 0

    # From the data process

    def take(self, report: pb.DataReport) -> None:
        """What is new; `rt.FormatError`."""
        for one in report.segments:
            key = SegmentKey(one.session_id, one.x, one.y)
            held = self._held.setdefault(key.session_id, {}).setdefault(key, _Held())
            self._news[key] = None
            held.add(unpack_marks(one.marks))
            if one.HasField("announced"):
                self._announced.setdefault(key.session_id, {})[key.x] = one.announced
            if one.HasField("final"):
                self._finals.setdefault(key.session_id, {})[key.x] = one.final
            if len(held.marks) > FINE_MARKS_MAX:
                self._thin_out(held)
        self._joins = max(self._joins, report.joins)
        if report.connected:
            self._connected = list(report.connected)
        if report.HasField("merged"):
            self.standings.merged = report.merged
        if report.HasField("step"):
            self.standings.step = report.step
        if report.disk_bytes:
            self.standings.disk_bytes = report.disk_bytes
            self.standings.disk_free_bytes = report.disk_free_bytes

    def forget_disk(self) -> None:
        """What was said of the disk was long ago: nothing is known of it."""
        self.standings.disk_bytes = self.standings.disk_free_bytes = 0

    def forget_below(self, end: SessionEnd) -> None:
        """That is merged: nobody plans it again."""
        segments = self._held.get(end.session_id, {})
        for key in [key for key in segments if key[1:] < (end.x, end.y)]:
            del segments[key]
            self._news.pop(key, None)
        held = segments.get(SegmentKey(end.session_id, end.x, end.y))
        if held is not None:
            below = bisect_left(held.marks, (end.offset,))  # Offsets come first in a mark.
            del held.marks[:below]
            held.reported = max(0, held.reported - below)
        for kind in (self._announced, self._finals):
            ends = kind.get(end.session_id, {})
            for x in [x for x in ends if x < end.x]:
                del ends[x]

    def forget_session(self, session_id: int) -> None:
        """Its record is gone: the leader does not know it any more."""
        for key in self._held.pop(session_id, {}):
            self._news.pop(key, None)
        self._announced.pop(session_id, None)
        self._finals.pop(session_id, None)

    # To the leader

    def begin(self) -> None:
        """A leader that knows nothing of this node: the next report is a full one."""
        self._is_full = True  # Under the next number: was this report lost, the one behind it tells.
        for segments in self._held.values():
            for key, held in segments.items():
                held.reported = 0
                self._news[key] = None

    def report(self, clock_ns: int) -> pb.Report:
        """What the leader does not know yet, as much as one report holds; see `has_news`."""
        report = pb.Report(
            boot=self.boot,
            sequence=self._sequence,
            is_full=self._is_full,
            clock_ns=clock_ns,
            merged=self.standings.merged,
            disk_bytes=self.standings.disk_bytes,
            disk_free_bytes=self.standings.disk_free_bytes,
            connected=self._connected,
        )
        self._connected = []
        self._sequence, self._is_full = self._sequence + 1, False
        room = REPORT_MARKS_MAX
        for key in list(self._news):
            if room <= 0:
                break
            held = self._held[key.session_id][key]
            marks = held.marks[held.reported : held.reported + room]
            room -= len(marks) + 1
            held.reported += len(marks)
            report.segments.add(
                session_id=key.session_id,
                x=key.x,
                y=key.y,
                marks=pack_marks(marks),
                announced=self._announced.get(key.session_id, _NONE).get(key.x),
                final=self._finals.get(key.session_id, _NONE).get(key.x),
            )
            if held.reported >= len(held.marks):
                del self._news[key]
        if not self._news:
            report.joins = self._joins
        return report

    @property
    def has_news(self) -> bool:
        """Whether the leader lacks something."""
        return bool(self._news)

    def _thin_out(self, held: _Held) -> None:
        """Of the older half keep the last boundary in front of every multiple of `COARSE_BYTES`."""
        half = len(held.marks) // 2
        older, newer = held.marks[:half], held.marks[half:]
        following = [*older[1:], newer[0]]
        kept: list[BatchBoundary] = []
        reported = held.reported
        for at, (mark, behind) in enumerate(zip(older, following, strict=True)):
            if at == 0 or mark.offset // COARSE_BYTES != behind.offset // COARSE_BYTES:
                kept.append(mark)
            elif at < held.reported:
                reported -= 1
        held.marks, held.reported = kept + newer, reported


REPORT_NS: Final = 200 * 10**6
"""So soon behind a report with news another one follows at the latest: the leader finds out what was lost."""
DISK_NS: Final = 6 * 10**9
"""What the data process said of its disk counts for so long, several times what it takes to say it again."""
IDLE_REPORT_NS: Final = 10**9
"""And so soon behind one without: the leader needs the clock."""


class Reporter:
    """What this node's data process holds, and the reports of it.

    `on_due` hears when the next one is due. `has_joined` says whether the disk of the data process counts.
    """

    def __init__(
        self,
        telling: PeerMessenger,
        on_due: Callable[[int], None],
        has_joined: Callable[[], bool] = lambda: True,
    ) -> None:
        self._telling, self._on_due, self._has_joined = telling, on_due, has_joined
        self._holdings = DurableEnds(b"")
        self._disk_ns = 0
        """When the data process told of its disk."""
        self.due_ns = 0
        """On the monotonic clock, as what `on_due` hears."""

    @property
    def standings(self) -> ClusterStandings:
        """What the data process said last of merging and of its disk."""
        return self._holdings.standings

    def attach(self, boot: bytes) -> None:
        """A data process begins: nothing is known of what it holds. Nothing is reported before."""
        self._holdings = DurableEnds(boot)

    def take(self, report: pb.DataReport) -> None:
        """What is new with the data process; `rt.FormatError`."""
        self._holdings.take(report)
        if report.disk_bytes:
            self._disk_ns = time.monotonic_ns()

    def forget_below(self, end: SessionEnd) -> None:
        """That is merged."""
        self._holdings.forget_below(end)

    def forget_session(self, session_id: int) -> None:
        """Its record is gone."""
        self._holdings.forget_session(session_id)

    def begin(self) -> None:
        """The leader knows nothing of this node: tell it all."""
        self._holdings.begin()
        self.report()

    def report_news(self) -> None:
        """Tell the leader what it can plan with; the rest goes with that, or in a while."""
        if self._holdings.has_news:
            self.report()

    def report(self) -> None:
        """Tell the leader what it does not know yet."""
        holdings = self._holdings
        if time.monotonic_ns() - self._disk_ns > DISK_NS:
            holdings.forget_disk()
        self.due_ns = time.monotonic_ns() + (REPORT_NS if holdings.has_news else IDLE_REPORT_NS)
        self._on_due(self.due_ns)
        if self._telling.leader is None or not holdings.boot or not self._has_joined():
            return
        while True:
            if not self._telling.report(holdings.report(time.time_ns())):
                holdings.begin()
                return
            if not holdings.has_news:
                return

"""What this node's data process holds durably, and the reports to the leader that are made of it.

Pure. The law: a leader that took every report since a full one knows every boundary from what is consumed on,
but for those thinned out: of a long backlog one each `COARSE_BYTES` is kept, the same on all nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from rt.v1 import sequencer_pb2 as pb
from sequencer.board import Mark, SegmentKey, pack_marks, unpack_marks
from sequencer.orders import SessionEnd

FINE_MARKS_MAX: Final = 1 << 16
"""Boundaries of a segment that are kept all; of more, the oldest are thinned out."""
COARSE_BYTES: Final = 8 << 20
REPORT_MARKS_MAX: Final = 1 << 15
"""In one report: 640 KiB, below what the network carries at once."""


_NONE: Final[dict[int, pb.SessionEnd]] = {}


@dataclass(slots=True)
class _Held:
    marks: list[Mark] = field(default_factory=list)
    reported: int = 0
    """So many of `marks` the present leader was told."""

    def add(self, marks: list[Mark]) -> None:
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
class Standings:
    """What else a report says."""

    merged: pb.MergedReport = field(default_factory=pb.MergedReport)
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    step: pb.DataStep = field(default_factory=pb.DataStep)


class Holdings:
    """Durable boundaries, announced and final ends of the sessions of one start of the data process."""

    def __init__(self, boot: bytes) -> None:
        self.boot = boot
        self.standings = Standings()
        # By session id first: what is merged of one session costs nothing of the others.
        self._held: dict[int, dict[SegmentKey, _Held]] = {}
        self._announced: dict[int, dict[int, pb.SessionEnd]] = {}
        self._finals: dict[int, dict[int, pb.SessionEnd]] = {}
        self._news: dict[SegmentKey, None] = {}
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
        )
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
        kept: list[Mark] = []
        reported = held.reported
        for at, (mark, behind) in enumerate(zip(older, following, strict=True)):
            if at == 0 or mark.offset // COARSE_BYTES != behind.offset // COARSE_BYTES:
                kept.append(mark)
            elif at < held.reported:
                reported -= 1
        held.marks, held.reported = kept + newer, reported

"""The data that this node's data process holds durably, and the reports about it to the leader.

Used by the consensus thread only. Invariants:
- A leader that received every report since a full one knows every batch boundary after the merged end. Of the
  older bytes of a long backlog it knows one boundary for each `COARSE_BYTES`, the same one on all nodes.
- After a lost report the next one is full. So is the first report to another leader.
- Nothing is reported about a disk that has not joined. Otherwise the leader would confuse it with the
  previous disk, which may have held more.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from msgspec import Struct, field

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.leader.boundary_thinning import BoundaryBudget, coarse_indices
from sequencer.leader.replication_tracker import BatchBoundary, SegmentKey, pack_boundaries, unpack_boundaries
from sequencer.state.write_plan import SessionEnd

REPORT_BOUNDARIES_MAX: Final = 1 << 14
"""In one report: 320 KiB. The leader handles it in less than a heartbeat."""


_NONE: Final[dict[int, pb.SessionEnd]] = {}


class _Held(Struct):
    boundaries: list[BatchBoundary] = field(default_factory=list)
    reported: int = 0
    """How many of `boundaries` the current leader knows."""
    thinned: int = 0
    """How many of the first boundaries an earlier thinning kept."""

    @property
    def count(self) -> int:
        return len(self.boundaries)

    def add(self, boundaries: list[BatchBoundary]) -> int:
        """Add durable boundaries, and return how many are new. A starting data process may report older ones
        than are known.
        """
        if not self.boundaries or not boundaries or boundaries[0].offset > self.boundaries[-1].offset:
            self.boundaries.extend(boundaries)
            return len(boundaries)
        known = {boundary.offset for boundary in self.boundaries}
        new = [boundary for boundary in boundaries if boundary.offset not in known]
        if new and new[0].offset < self.boundaries[-1].offset:
            self.reported = 0
        self.boundaries = sorted([*self.boundaries, *new])
        return len(new)

    def thin_out(self, stop: int) -> int:
        """See `SegmentBoundaryList`."""
        if stop <= self.thinned:
            return 0
        kept = coarse_indices([boundary.offset for boundary in self.boundaries[: stop + 1]], stop)
        self.reported = sum(at < self.reported for at in kept) + max(0, self.reported - stop)
        self.boundaries[:stop] = [self.boundaries[at] for at in kept]
        self.thinned = len(kept)
        return stop - len(kept)


class DataStatus(Struct):
    """The other fields of a report."""

    merged: pb.MergedReport = field(default_factory=pb.MergedReport)
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    step: pb.DataStep = field(default_factory=pb.DataStep)
    clients: pb.ConnectedClients = field(default_factory=pb.ConnectedClients)
    members_version: int = 0


class DurableEnds:
    """Durable boundaries, announced ends and final ends that one run of the data process reported. Pure."""

    def __init__(self, boot: bytes) -> None:
        self.boot = boot
        self.data_status = DataStatus()
        # By session id first, so that a merge of one session costs nothing for the other sessions.
        self._held: dict[int, dict[SegmentKey, _Held]] = {}
        self._budget = BoundaryBudget()
        self._announced: dict[int, dict[int, pb.SessionEnd]] = {}
        self._finals: dict[int, dict[int, pb.SessionEnd]] = {}
        self._news: dict[SegmentKey, None] = {}
        self._connected: list[int] = []
        """Sessions whose publishers are connected; empty after it was reported."""
        # Random, so that a restarted control process does not continue the report sequence of the previous
        # one.
        self._sequence = secrets.randbits(62)
        self._is_full = True
        self._joins = 0

    # Reports of the data process

    def handle_report(self, report: pb.DataReport) -> None:
        """Raises `rt.FormatError`."""
        for one in report.segments:
            key = SegmentKey(one.session_id, one.run, one.roll)
            held = self._held.setdefault(key.session_id, {}).setdefault(key, _Held())
            self._news[key] = None
            self._budget.add(key.session_id, held.add(unpack_boundaries(one.boundaries)))
            if one.HasField("announced"):
                self._announced.setdefault(key.session_id, {})[key.run] = one.announced
            if one.HasField("final"):
                self._finals.setdefault(key.session_id, {})[key.run] = one.final
            self._budget.thin_out(key.session_id, self._held[key.session_id])
        self._joins = max(self._joins, report.joins)
        if report.connected:
            self._connected = list(report.connected)
        if report.HasField("merged"):
            self.data_status.merged = report.merged
        if report.members_version:
            self.data_status.members_version = report.members_version
        if report.HasField("clients"):
            self.data_status.clients = report.clients
        if report.HasField("step"):
            self.data_status.step = report.step
        if report.disk_bytes:
            self.data_status.disk_bytes = report.disk_bytes
            self.data_status.disk_free_bytes = report.disk_free_bytes

    def clear_disk(self) -> None:
        """Clear the disk usage, because the data process has not reported its disk for too long."""
        self.data_status.disk_bytes = self.data_status.disk_free_bytes = 0

    def prune_before(self, end: SessionEnd) -> None:
        segments = self._held.get(end.session_id, {})
        for key in [key for key in segments if key[1:] < (end.run, end.roll)]:
            self._budget.add(end.session_id, -len(segments.pop(key).boundaries))
            self._news.pop(key, None)
        held = segments.get(SegmentKey(end.session_id, end.run, end.roll))
        if held is not None:
            below = bisect_left(held.boundaries, (end.offset,))  # Offsets come first in a boundary.
            del held.boundaries[:below]
            held.reported = max(0, held.reported - below)
            held.thinned = max(0, held.thinned - below)
            self._budget.add(end.session_id, -below)
        for kind in (self._announced, self._finals):
            ends = kind.get(end.session_id, {})
            for run in [run for run in ends if run < end.run]:
                del ends[run]

    def remove_session(self, session_id: int) -> None:
        """The session's record was removed from the replicated state."""
        for key in self._held.pop(session_id, {}):
            self._news.pop(key, None)
        self._budget.forget(session_id)
        self._announced.pop(session_id, None)
        self._finals.pop(session_id, None)

    # Reports to the leader

    def require_full_report(self) -> None:
        """Make the next report a full one: the leader knows nothing about this node."""
        self._is_full = True  # The sequence goes on, so that the loss of this report is noticed, too.
        # The segments with which these ends were first reported may be merged by now.
        for kind in (self._announced, self._finals):
            for session_id, ends in kind.items():
                segments = self._held.setdefault(session_id, {})
                for run in ends.keys() - {key.run for key in segments}:
                    segments[SegmentKey(session_id, run, 0)] = _Held()
        for segments in self._held.values():
            for key, held in segments.items():
                held.reported = 0
                self._news[key] = None

    def report(self, clock_ns: int) -> pb.Report:
        """Return a report with the next part of the news for the leader. More remains while `has_news`."""
        report = pb.Report(
            boot=self.boot,
            sequence=self._sequence,
            is_full=self._is_full,
            clock_ns=clock_ns,
            merged=self.data_status.merged,
            disk_bytes=self.data_status.disk_bytes,
            disk_free_bytes=self.data_status.disk_free_bytes,
            connected=self._connected,
        )
        self._connected = []
        self._sequence, self._is_full = self._sequence + 1, False
        room = REPORT_BOUNDARIES_MAX
        for key in list(self._news):
            if room <= 0:
                break
            held = self._held[key.session_id][key]
            boundaries = held.boundaries[held.reported : held.reported + room]
            room -= len(boundaries) + 1
            held.reported += len(boundaries)
            report.segments.add(
                session_id=key.session_id,
                run=key.run,
                roll=key.roll,
                boundaries=pack_boundaries(boundaries),
                announced=self._announced.get(key.session_id, _NONE).get(key.run),
                final=self._finals.get(key.session_id, _NONE).get(key.run),
            )
            if held.reported >= len(held.boundaries):
                del self._news[key]
        if not self._news:
            report.joins, report.members_version = self._joins, self.data_status.members_version
        return report

    @property
    def has_news(self) -> bool:
        """Whether there is something that the leader does not know."""
        return bool(self._news)


REPORT_NS: Final = 200 * 10**6
"""Longest time between a report with news and the next report, so that a loss is noticed."""
PART_NS: Final = 50 * 10**6
"""Pause after a report that does not contain all news. Without it, a long backlog would keep the consensus
threads of this node and of the leader from heartbeats, or end the connection, because its outbox is full.
"""
DISK_NS: Final = 6 * 10**9
"""The reported disk usage is valid for this long, several times the interval at which it is reported."""
IDLE_REPORT_NS: Final = 10**9
"""Time between reports without news. They are sent because the leader needs the clock."""


class Reporter:
    """Sends the reports.

    `on_due` is called with the time of the next report. `has_joined`: whether the data process's disk counts.
    """

    def __init__(
        self,
        messenger: PeerMessenger,
        on_due: Callable[[int], None],
        has_joined: Callable[[], bool] = lambda: True,
    ) -> None:
        self._messenger, self._on_due, self._has_joined = messenger, on_due, has_joined
        self.holdings = DurableEnds(b"")
        """What the present data process has reported."""
        self._disk_ns = 0
        """When the data process last reported its disk."""
        self._part_ns = 0
        """The rest of the news is not reported before this time."""
        self.due_ns = 0
        """Monotonic time of the next report."""

    def attach(self, boot: bytes) -> None:
        """Handle the start of a data process. Nothing is reported before the first start."""
        self.holdings = DurableEnds(boot)

    def handle_report(self, report: pb.DataReport) -> None:
        """Raises `rt.FormatError`."""
        self.holdings.handle_report(report)
        if report.disk_bytes:
            self._disk_ns = time.monotonic_ns()

    def report_all(self) -> None:
        """Begin a full report, because the leader knows nothing about this node."""
        self.holdings.require_full_report()
        if self._may_report:
            self.report()

    def report_news(self) -> None:
        """Report at once if there is something that the leader can plan with."""
        if self.holdings.has_news and self._may_report:
            self.report()

    @property
    def _may_report(self) -> bool:
        """Whether no pause is due. After a pause, `report` is called anyway."""
        return time.monotonic_ns() >= self._part_ns

    def report(self) -> None:
        """Send what the leader does not know, or the next part of it. The rest follows after a pause."""
        holdings, now_ns = self.holdings, time.monotonic_ns()
        if now_ns - self._disk_ns > DISK_NS:
            holdings.clear_disk()
        self._report_by(now_ns + (REPORT_NS if holdings.has_news else IDLE_REPORT_NS))
        if self._messenger.leader is None or not holdings.boot or not self._has_joined():
            return
        if not self._messenger.send_report(holdings.report(time.time_ns())):
            holdings.require_full_report()
        if holdings.has_news:
            self._part_ns = now_ns + PART_NS
            self._report_by(self._part_ns)

    def _report_by(self, due_ns: int) -> None:
        self.due_ns = due_ns
        self._on_due(due_ns)

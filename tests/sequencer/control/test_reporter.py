"""What a node reports while its data process is silent, and before its disk has joined."""

from __future__ import annotations

from typing import Any

import pytest
from module_shadow import shadow

from rt.v1 import sequencer_pb2 as pb
from sequencer.control import reporter
from sequencer.control.reporter import DISK_NS, Reporter
from sequencer.leader.replication_tracker import BatchBoundary, pack_boundaries, unpack_boundaries


class Messenger:
    """A messenger whose leader accepts every report."""

    leader = "n1"

    def __init__(self) -> None:
        self.reports: list[pb.Report] = []

    def send_report(self, report: pb.Report) -> bool:
        self.reports.append(report)
        return True


def test_disk_usage_is_omitted_from_reports_after_data_process_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = [10**12]
    shadow(monkeypatch, reporter, "time", monotonic_ns=lambda: now_ns[0])
    messenger: Any = Messenger()
    reporter_ = Reporter(messenger, lambda _: None)
    reporter_.attach(b"boot")
    reporter_.handle_report(pb.DataReport(disk_bytes=100, disk_free_bytes=1))
    for passed_ns, known in ((DISK_NS, (100, 1)), (1, (0, 0)), (DISK_NS, (0, 0))):
        now_ns[0] += passed_ns
        reporter_.report()
        assert (messenger.reports[-1].disk_bytes, messenger.reports[-1].disk_free_bytes) == known
    reporter_.handle_report(pb.DataReport(disk_bytes=100, disk_free_bytes=2))
    reporter_.report()
    assert messenger.reports[-1].disk_free_bytes == 2


def test_reports_start_with_full_report_once_disk_has_joined() -> None:
    messenger: Any = Messenger()
    has_joined = [False]
    reporter_ = Reporter(messenger, lambda _: None, lambda: has_joined[0])
    reporter_.attach(b"boot")
    final = pb.SessionEnd(session_id=1, offset=64)
    reporter_.handle_report(pb.DataReport(segments=[pb.SegmentReport(session_id=1, final=final)]))
    reporter_.report()
    reporter_.report_all()
    assert messenger.reports == [], "the disk before may have held more than that"
    has_joined[0] = True
    reporter_.report_all()
    (report,) = messenger.reports
    assert report.is_full
    assert [one.final for one in report.segments] == [final]


class Outbox(Messenger):
    """A connection that ends, as the Raft mesh ends it, if more than `room` reports wait to be sent."""

    room = 2

    def __init__(self) -> None:
        super().__init__()
        self.unsent: list[pb.Report] = []

    def send_report(self, report: pb.Report) -> bool:
        if len(self.unsent) >= self.room:
            self.unsent.clear()
            return False
        self.unsent.append(report)
        return True

    def drain(self) -> None:
        self.reports += self.unsent
        self.unsent.clear()


def test_full_report_larger_than_outbox_reaches_leader_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [10**12]
    shadow(monkeypatch, reporter, "time", monotonic_ns=lambda: now_ns[0])
    monkeypatch.setattr(reporter, "REPORT_BOUNDARIES_MAX", 4)
    outbox: Any = Outbox()
    reporter_ = Reporter(outbox, lambda _: None)
    reporter_.attach(b"boot")
    marks = [BatchBoundary(offset, offset, offset) for offset in range(64, 164)]
    segment = pb.SegmentReport(session_id=1, boundaries=pack_boundaries(marks))
    reporter_.handle_report(pb.DataReport(segments=[segment]))
    reporter_.report_all()
    for _ in range(40):
        outbox.drain()
        now_ns[0] = max(now_ns[0], reporter_.due_ns)
        reporter_.report_news()  # The data process reports something else meanwhile.
        reporter_.report()
    outbox.drain()
    assert [one.is_full for one in outbox.reports[:2]] == [True, False]
    assert not any(one.is_full for one in outbox.reports[1:])
    found = [
        mark for one in outbox.reports for part in one.segments for mark in unpack_boundaries(part.boundaries)
    ]
    assert found == marks
    assert not reporter_.holdings.has_news

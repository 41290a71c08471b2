"""Reports of durable ends: a leader learns all batch boundaries of a node although reports are lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.v1 import sequencer_pb2 as pb
from sequencer.control import reporter as holdings_module
from sequencer.control.reporter import DurableEnds
from sequencer.leader import boundary_thinning
from sequencer.leader.replication_tracker import (
    BatchBoundary,
    ReplicationTracker,
    SegmentKey,
    pack_boundaries,
    unpack_boundaries,
)
from sequencer.state.write_plan import SessionEnd

KEYS = [SegmentKey(session, run, roll) for session in (1, 2) for run in (0, 1) for roll in (0, 1)]


def boundaries(rng: random.Random, count: int, size_max: int = 100) -> list[BatchBoundary]:
    """Of one segment."""
    marks = [BatchBoundary(64, 0, 7)]
    for _ in range(count):
        offset, number, chain = marks[-1]
        marks.append(BatchBoundary(offset + 8 * rng.randrange(1, size_max), number + 1, chain * 31 % 2**32))
    return marks


def said(key: SegmentKey, marks: list[BatchBoundary], **ends: pb.SessionEnd) -> pb.DataReport:
    one = pb.SegmentReport(
        session_id=key.session_id, run=key.run, roll=key.roll, boundaries=pack_boundaries(marks), **ends
    )
    return pb.DataReport(segments=[one])


class DumbLeader:
    """Stores the content of reports, and asks again after a lost report."""

    def __init__(self) -> None:
        self.tracker = ReplicationTracker(1)
        self.next: int | None = None
        self.finals: dict[tuple[int, int], pb.SessionEnd] = {}

    def hear(self, report: pb.Report) -> bool:
        """Process a report. Return False if a full report is needed."""
        if report.is_full:
            self.tracker.forget_node("n")
            self.finals.clear()
        elif report.sequence != self.next:
            return False
        self.next = report.sequence + 1
        for one in report.segments:
            key = SegmentKey(one.session_id, one.run, one.roll)
            self.tracker.on_boundaries("n", key, unpack_boundaries(one.boundaries))
            if one.HasField("final"):
                self.finals[key[:2]] = one.final
        return True


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_leader_learns_every_boundary_although_reports_are_lost(seed):
    rng = random.Random(seed)
    holdings, leader = DurableEnds(b"boot"), DumbLeader()
    written = {key: boundaries(rng, rng.randrange(0, 30)) for key in KEYS}
    taken = dict.fromkeys(KEYS, 0)
    consumed = dict[int, SessionEnd]()
    for _ in range(60):
        match rng.randrange(5):
            case 0 | 1:
                key = rng.choice(KEYS)
                more = rng.randrange(1, 8)
                # Data processes may report boundaries twice.
                start = max(0, taken[key] - rng.randrange(3))
                holdings.handle_report(said(key, written[key][start : taken[key] + more]))
                taken[key] = min(len(written[key]), taken[key] + more)
            case 2:
                report = holdings.report(1)
                if rng.random() < 0.7 and not leader.hear(report):
                    holdings.require_full_report()
            case 3 if rng.random() < 0.3:
                leader = DumbLeader()
                holdings.require_full_report()
            case _ if rng.random() < 0.3:
                key = rng.choice(KEYS)
                if taken[key] and key > SegmentKey(*consumed.get(key.session_id, (0, 0, 0))[:3]):
                    mark = written[key][rng.randrange(taken[key])]
                    end = SessionEnd(*key, mark.offset, mark.number)
                    consumed[key.session_id] = end
                    holdings.prune_before(end)
    while holdings.has_news or not leader.hear(holdings.report(1)):
        if not leader.hear(holdings.report(1)):
            holdings.require_full_report()
    for key in KEYS:
        end = consumed.get(key.session_id)
        if end is not None and key[1:] < (end.run, end.roll):
            continue
        least = end.offset if end is not None and key[1:] == (end.run, end.roll) else 0
        for mark in written[key][: taken[key]]:
            if mark.offset >= least:
                assert leader.tracker.boundary_at(key, mark.offset) == mark


def test_report_size_is_bounded_and_remaining_boundaries_follow_in_next_report(monkeypatch):
    monkeypatch.setattr(holdings_module, "REPORT_BOUNDARIES_MAX", 10)
    holdings, leader = DurableEnds(b"boot"), DumbLeader()
    marks = boundaries(random.Random(1), 95)
    holdings.handle_report(said(KEYS[0], marks))
    reports = 0
    while holdings.has_news:
        report = holdings.report(1)
        reports += 1
        assert sum(len(one.boundaries) for one in report.segments) <= 10 * 20
        assert leader.hear(report)
    assert reports >= 9
    assert all(leader.tracker.boundary_at(KEYS[0], mark.offset) for mark in marks)


def test_final_end_is_reported_until_next_run_is_merged():
    holdings, leader = DurableEnds(b"boot"), DumbLeader()
    final = pb.SessionEnd(session_id=1, run=0, roll=0, offset=64)
    holdings.handle_report(said(KEYS[0], [], final=final))
    assert leader.hear(holdings.report(1))
    assert leader.finals == {(1, 0): final}
    leader = DumbLeader()
    holdings.require_full_report()
    assert leader.hear(holdings.report(1))
    assert leader.finals == {(1, 0): final}
    holdings.prune_before(SessionEnd(1, 1, 0, 64, 0))
    leader = DumbLeader()
    holdings.require_full_report()
    assert leader.hear(holdings.report(1))
    assert leader.finals == {}


@pytest.mark.parametrize("kind", ["announced", "final"])
def test_run_end_is_reported_to_next_leader_after_earlier_boundaries_are_merged(kind):
    holdings = DurableEnds(b"boot")
    end = pb.SessionEnd(session_id=1, run=0, roll=2, offset=128, number=9)
    holdings.handle_report(said(KEYS[0], [], **{kind: end}))
    holdings.report(1)
    holdings.prune_before(SessionEnd(1, 0, 1, 64, 5))
    for _ in range(2):  # More may be merged before a third leader starts.
        holdings.require_full_report()
        (one,) = holdings.report(1).segments
        assert (one.session_id, one.run, getattr(one, kind)) == (1, 0, end)
        holdings.prune_before(SessionEnd(1, 0, 2, 96, 7))
    holdings.remove_session(1)
    holdings.require_full_report()
    assert not holdings.report(1).segments


def test_boundaries_merged_elsewhere_are_pruned_on_lagging_node():
    holdings = DurableEnds(b"boot")
    marks = boundaries(random.Random(1), 50)
    holdings.handle_report(said(KEYS[0], marks))
    holdings.prune_before(SessionEnd(1, 0, 0, marks[-1].offset + 8, 99))
    holdings.require_full_report()
    (one,) = holdings.report(1).segments
    assert not one.boundaries


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_thinned_boundaries_of_two_nodes_allow_planning_to_the_end_in_bounded_ranges(seed):
    coarse, cap = 2000, 4000
    rng = random.Random(seed)
    marks = boundaries(rng, 600, size_max=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary_thinning, "FINE_BOUNDARIES_MIN", 64)
        patch.setattr(boundary_thinning, "FINE_BOUNDARIES_MAX", 64)
        patch.setattr(boundary_thinning, "COARSE_BYTES", coarse)
        tracker = ReplicationTracker(3)
        for node in ("a", "b"):
            holdings, at = DurableEnds(node.encode()), 0
            while at < len(marks):
                grain = rng.randrange(1, 90)
                holdings.handle_report(said(KEYS[0], marks[at : at + grain]))
                at += grain
                if rng.random() < 0.1:
                    holdings.require_full_report()
            holdings.require_full_report()
            for one in holdings.report(1).segments:
                tracker.on_boundaries(node, KEYS[0], unpack_boundaries(one.boundaries))
    at = 64
    while at < marks[-1].offset:
        end = tracker.furthest(KEYS[0], at, cap)
        assert end is not None, at
        assert end.offset - at <= cap
        at = end.offset


def test_boundaries_of_session_that_is_not_merged_stay_few_over_many_segments(monkeypatch):
    """A leader that heard each report, and one that gets a full report, know the end of each segment."""
    monkeypatch.setattr(boundary_thinning, "FINE_BOUNDARIES_MIN", 40)
    monkeypatch.setattr(boundary_thinning, "FINE_BOUNDARIES_MAX", 40)
    monkeypatch.setattr(boundary_thinning, "COARSE_BYTES", 5000)
    rng = random.Random(3)
    holdings, leader, later = DurableEnds(b"boot"), DumbLeader(), DumbLeader()
    segments = {SegmentKey(1, run, roll): boundaries(rng, 200) for run in range(3) for roll in range(5)}
    for key, marks in segments.items():
        for at in range(0, len(marks), 9):
            holdings.handle_report(said(key, marks[at : at + 9]))
            assert leader.hear(holdings.report(1))
    holdings.require_full_report()
    full = holdings.report(1)
    coarse = sum(marks[-1].offset // 5000 + 2 for marks in segments.values())
    count = sum(len(one.boundaries) // 20 for one in full.segments)
    assert holdings._budget._counts == {1: count}
    assert count <= coarse + 60
    assert later.hear(full)
    for known in (leader, later):
        for key, marks in segments.items():
            assert known.tracker.boundary_at(key, marks[0].offset) == marks[0]
            assert known.tracker.boundary_at(key, marks[-1].offset) == marks[-1]
            at = marks[0].offset
            while at < marks[-1].offset:
                end = known.tracker.furthest(key, at, 10_000)
                assert end is not None
                assert end.offset - at <= 10_000
                at = end.offset


@pytest.mark.parametrize("is_reported", [False, True])
def test_boundaries_durable_during_first_full_report_hide_no_earlier_boundaries(is_reported):
    """A restarted control process may receive new boundaries before the existing ones."""
    holdings, leader = DurableEnds(b"boot"), DumbLeader()
    marks = boundaries(random.Random(1), 20)
    holdings.handle_report(said(KEYS[0], marks[15:18]))
    if is_reported:
        assert leader.hear(holdings.report(0))
    holdings.handle_report(said(KEYS[0], marks[:19]))
    holdings.handle_report(said(KEYS[0], marks[19:]))
    while holdings.has_news:
        assert leader.hear(holdings.report(0))
    assert all(leader.tracker.boundary_at(KEYS[0], mark.offset) for mark in marks)


def test_reports_of_restarted_process_do_not_continue_earlier_sequence() -> None:
    """The second control process's first report, a full one, is lost. The data process is the same."""
    leader = DumbLeader()
    assert leader.hear(DurableEnds(b"boot").report(1))
    again = DurableEnds(b"boot")
    assert again.report(2).is_full
    assert not leader.hear(again.report(3))

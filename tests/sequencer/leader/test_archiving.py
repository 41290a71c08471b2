"""What a leader trims: by what it hears of nodes, and not again before it can have heard of the last trim."""

from __future__ import annotations

import pytest
from sequencing import must, new_state

from archiver.policy import DiskUse
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.units import NS_PER_MINUTE
from sequencer.leader.retention_planner import DISK_AGAIN_NS, POLL_NS, NodeUsage, RetentionPlanner
from sequencer.state.apply import apply
from sequencer.state.apply_result import SegmentsTrimmed
from sequencer.state.commands import Configure, HoldPosition, TrimSegments
from sequencer.state.state import MergedEnd, MergedSegment, SequencerState

NOW_NS = 10**15
HOUR_NS = 60 * NS_PER_MINUTE
EMPTY, FULL = DiskUse(1000, 1000), DiskUse(1000, 70)


class Stage:
    """A leader's archiving, with four sealed segments of 20 bytes; time goes on with each look."""

    def __init__(self) -> None:
        self.state: SequencerState = new_state()
        self.state.segments.extend(
            MergedSegment(SegmentId(0, roll), 10 * roll, 10 * roll + 10, 20, 0, roll * HOUR_NS)
            for roll in range(4)
        )
        self.state.merged = MergedEnd(SegmentId(0, 4), offset=64, first=40)
        self.state.position = 45
        self.now_ns = NOW_NS
        self.archiving = RetentionPlanner(self.state, 3, {}, NOW_NS)

    def look(self, *heard: NodeUsage) -> TrimSegments | None:
        self.now_ns += POLL_NS
        return self.archiving.plan(heard, self.now_ns)

    def commit(self, trim: TrimSegments | None) -> None:
        assert trim is not None
        outcome = must(SegmentsTrimmed, apply(self.state, trim))
        self.archiving.on_applied(outcome, self.now_ns)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def heard(minutes: int = 0, disk: DiskUse = EMPTY, count: int = 3) -> list[NodeUsage]:
    return [NodeUsage(minutes * NS_PER_MINUTE, disk)] * count


def test_by_age_what_a_majority_of_clocks_says_is_old_goes(stage: Stage) -> None:
    apply(stage.state, Configure(retention_minutes=60))
    assert stage.look(*heard(59)) is None
    assert stage.look(*heard(60, count=1)) is None
    assert stage.look(*heard(60 + 60, count=2), *heard(0, count=1)) == TrimSegments(
        20, TrimReason.TIME, 2 * HOUR_NS
    )


def test_a_minority_of_nodes_trims_nothing_for_any_reason(stage: Stage) -> None:
    apply(stage.state, Configure(retention_minutes=1, retention_bytes=1, retention_disk_percent=1))
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(10**6, FULL, count=1)) is None
    assert stage.look() is None
    assert stage.look(*heard(10**6, FULL, count=2)) is not None


def test_by_size_what_grows_counts_and_what_is_trimmed_does_not(stage: Stage) -> None:
    apply(stage.state, Configure(retention_bytes=64 + 40))
    trim = stage.look(*heard())
    assert trim == TrimSegments(20, TrimReason.SIZE, 1)
    stage.commit(trim)
    assert stage.look(*heard()) is None
    apply(stage.state, Configure(retention_bytes=64))
    stage.commit(stage.look(*heard()))
    assert stage.state.log_start == 40
    apply(stage.state, Configure(retention_bytes=1))
    assert stage.look(*heard()) is None


def test_looking_again_too_soon_finds_nothing(stage: Stage) -> None:
    apply(stage.state, Configure(retention_bytes=1))
    assert stage.look(*heard()) is not None
    assert stage.archiving.plan(heard(), stage.now_ns + POLL_NS - 1) is None


def test_a_new_leader_and_one_that_made_space_wait_for_new_reports_of_disks(stage: Stage) -> None:
    assert stage.look(*heard(disk=FULL)) is None
    stage.now_ns += DISK_AGAIN_NS
    trim = stage.look(*heard(disk=FULL))
    assert trim == TrimSegments(20, TrimReason.DISK, 1)
    stage.commit(trim)
    assert stage.look(*heard(disk=DiskUse(1000, 0))) is None
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=FULL)) == TrimSegments(40, TrimReason.DISK, 1)


def test_disks_of_which_nothing_is_known_are_no_full_ones(stage: Stage) -> None:
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=FULL, count=1), *heard(disk=DiskUse(0, 0), count=2)) is None
    assert stage.look(*heard(disk=FULL, count=2), *heard(disk=DiskUse(0, 0), count=1)) is not None


def test_what_was_trimmed_for_another_reason_counts_as_free_at_once(stage: Stage) -> None:
    stage.now_ns += DISK_AGAIN_NS
    apply(stage.state, Configure(retention_minutes=1, retention_disk_percent=0))
    stage.commit(stage.look(*heard(61)))
    apply(stage.state, Configure(retention_disk_percent=90))
    assert stage.look(*heard(disk=DiskUse(1000, 60))) is None
    assert stage.look(*heard(disk=DiskUse(1000, 59))) == TrimSegments(30, TrimReason.DISK, 1)
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=DiskUse(1000, 60))) == TrimSegments(40, TrimReason.DISK, 1)


def test_a_hold_keeps_segments_and_one_that_moves_on_lets_them_go(stage: Stage) -> None:
    apply(stage.state, Configure(retention_minutes=1))
    apply(stage.state, HoldPosition("reader", 19, 1))
    assert stage.look(*heard(10**6)) == TrimSegments(10, TrimReason.TIME, 10**6 * NS_PER_MINUTE)
    apply(stage.state, HoldPosition("reader", 45, 1))
    assert stage.look(*heard(10**6)) == TrimSegments(40, TrimReason.TIME, 10**6 * NS_PER_MINUTE)
    apply(stage.state, Configure(hold_bytes_max=40))
    apply(stage.state, HoldPosition("other", 0, 1))
    assert stage.look(*heard(10**6)) == TrimSegments(20, TrimReason.TIME, 10**6 * NS_PER_MINUTE)


def test_only_what_a_node_is_told_otherwise_is_configured(stage: Stage) -> None:
    told = RetentionPlanner(stage.state, 3, {"retention_bytes": 5, "retention_disk_percent": 90}, 0)
    assert told.configure() == Configure(retention_bytes=5)
    apply(stage.state, Configure(retention_bytes=5))
    assert told.configure() is None
    assert stage.archiving.configure() is None

"""The leader's retention: trims by age, size and disk use, holds, and configured settings."""

from __future__ import annotations

import pytest
from sequencer_core import must, new_state

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
    """A leader's retention planner with four sealed segments of 20 bytes. Each call of `look` advances the
    time.
    """

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


def test_age_retention_trims_segments_old_by_clocks_of_majority(stage: Stage) -> None:
    apply(stage.state, Configure(retention_minutes=60))
    assert stage.look(*heard(59)) is None
    assert stage.look(*heard(60, count=1)) is None
    assert stage.look(*heard(60 + 60, count=2), *heard(0, count=1)) == TrimSegments(
        20, TrimReason.TIME, 2 * HOUR_NS
    )


def test_reports_of_minority_trim_no_segments(stage: Stage) -> None:
    apply(stage.state, Configure(retention_minutes=1, retention_bytes=1, retention_disk_percent=1))
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(10**6, FULL, count=1)) is None
    assert stage.look() is None
    assert stage.look(*heard(10**6, FULL, count=2)) is not None


def test_size_retention_counts_active_segment_but_no_trimmed_segments(stage: Stage) -> None:
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


def test_second_poll_before_poll_interval_plans_no_trim(stage: Stage) -> None:
    apply(stage.state, Configure(retention_bytes=1))
    assert stage.look(*heard()) is not None
    assert stage.archiving.plan(heard(), stage.now_ns + POLL_NS - 1) is None


def test_disk_retention_waits_for_new_disk_reports_after_election_and_after_trim(stage: Stage) -> None:
    assert stage.look(*heard(disk=FULL)) is None
    stage.now_ns += DISK_AGAIN_NS
    trim = stage.look(*heard(disk=FULL))
    assert trim == TrimSegments(20, TrimReason.DISK, 1)
    stage.commit(trim)
    assert stage.look(*heard(disk=DiskUse(1000, 0))) is None
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=FULL)) == TrimSegments(40, TrimReason.DISK, 1)


def test_unknown_disk_use_does_not_count_as_full_disk(stage: Stage) -> None:
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=FULL, count=1), *heard(disk=DiskUse(0, 0), count=2)) is None
    assert stage.look(*heard(disk=FULL, count=2), *heard(disk=DiskUse(0, 0), count=1)) is not None


def test_disk_retention_counts_bytes_of_other_trims_as_free_immediately(stage: Stage) -> None:
    stage.now_ns += DISK_AGAIN_NS
    apply(stage.state, Configure(retention_minutes=1, retention_disk_percent=0))
    stage.commit(stage.look(*heard(61)))
    apply(stage.state, Configure(retention_disk_percent=90))
    assert stage.look(*heard(disk=DiskUse(1000, 60))) is None
    assert stage.look(*heard(disk=DiskUse(1000, 59))) == TrimSegments(30, TrimReason.DISK, 1)
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=DiskUse(1000, 60))) == TrimSegments(40, TrimReason.DISK, 1)


def test_hold_keeps_segments_until_it_advances_or_exceeds_hold_bytes_max(stage: Stage) -> None:
    apply(stage.state, Configure(retention_minutes=1))
    apply(stage.state, HoldPosition("reader", 19, 1))
    assert stage.look(*heard(10**6)) == TrimSegments(10, TrimReason.TIME, 10**6 * NS_PER_MINUTE)
    apply(stage.state, HoldPosition("reader", 45, 1))
    assert stage.look(*heard(10**6)) == TrimSegments(40, TrimReason.TIME, 10**6 * NS_PER_MINUTE)
    apply(stage.state, Configure(hold_bytes_max=40))
    apply(stage.state, HoldPosition("other", 0, 1))
    assert stage.look(*heard(10**6)) == TrimSegments(20, TrimReason.TIME, 10**6 * NS_PER_MINUTE)


def test_configure_contains_only_node_settings_different_from_cluster(stage: Stage) -> None:
    told = RetentionPlanner(stage.state, 3, {"retention_bytes": 5, "retention_disk_percent": 90}, 0)
    assert told.configure() == Configure(retention_bytes=5)
    apply(stage.state, Configure(retention_bytes=5))
    assert told.configure() is None
    assert stage.archiving.configure() is None

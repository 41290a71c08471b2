"""What a leader trims: by what it hears of nodes, and not again before it can have heard of the last trim."""

from __future__ import annotations

import pytest
from sequencing import must, new_state

from archiver.policy import MINUTE_NS, DiskUse
from rt.log.segment import SegmentId
from rt.log.table import TrimReason
from sequencer.apply import apply
from sequencer.commands import Configure, Hold, Trim
from sequencer.control.archiving import DISK_AGAIN_NS, LOOK_NS, Archiving, Heard
from sequencer.outcomes import Trimmed
from sequencer.state import MergedEnd, MergedSegment, State

NOW_NS = 10**15
HOUR_NS = 60 * MINUTE_NS
EMPTY, FULL = DiskUse(1000, 1000), DiskUse(1000, 70)


class Stage:
    """A leader's archiving, with four sealed segments of 20 bytes; time goes on with each look."""

    def __init__(self) -> None:
        self.state: State = new_state()
        self.state.segments.extend(
            MergedSegment(SegmentId(0, y), 10 * y, 10 * y + 10, 20, 0, y * HOUR_NS) for y in range(4)
        )
        self.state.merged = MergedEnd(SegmentId(0, 4), offset=64, first=40)
        self.state.position = 45
        self.now_ns = NOW_NS
        self.archiving = Archiving(self.state, 3, {}, NOW_NS)

    def look(self, *heard: Heard) -> Trim | None:
        self.now_ns += LOOK_NS
        return self.archiving.plan(heard, self.now_ns)

    def commit(self, trim: Trim | None) -> None:
        assert trim is not None
        outcome = must(Trimmed, apply(self.state, trim))
        self.archiving.on_applied(outcome, self.now_ns)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def heard(minutes: int = 0, disk: DiskUse = EMPTY, count: int = 3) -> list[Heard]:
    return [Heard(minutes * MINUTE_NS, disk)] * count


def test_by_age_what_a_majority_of_clocks_says_is_old_goes(stage: Stage) -> None:
    apply(stage.state, Configure(time_minutes=60))
    assert stage.look(*heard(59)) is None
    assert stage.look(*heard(60, count=1)) is None
    assert stage.look(*heard(60 + 60, count=2), *heard(0, count=1)) == Trim(20, TrimReason.TIME, 2 * HOUR_NS)


def test_a_minority_of_nodes_trims_nothing_for_any_reason(stage: Stage) -> None:
    apply(stage.state, Configure(time_minutes=1, limit_bytes=1, disk_percent=1))
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(10**6, FULL, count=1)) is None
    assert stage.look() is None
    assert stage.look(*heard(10**6, FULL, count=2)) is not None


def test_by_size_what_grows_counts_and_what_is_trimmed_does_not(stage: Stage) -> None:
    apply(stage.state, Configure(limit_bytes=64 + 40))
    trim = stage.look(*heard())
    assert trim == Trim(20, TrimReason.SIZE, 1)
    stage.commit(trim)
    assert stage.look(*heard()) is None
    apply(stage.state, Configure(limit_bytes=64))
    stage.commit(stage.look(*heard()))
    assert stage.state.log_start == 40
    apply(stage.state, Configure(limit_bytes=1))
    assert stage.look(*heard()) is None


def test_looking_again_too_soon_finds_nothing(stage: Stage) -> None:
    apply(stage.state, Configure(limit_bytes=1))
    assert stage.look(*heard()) is not None
    assert stage.archiving.plan(heard(), stage.now_ns + LOOK_NS - 1) is None


def test_a_new_leader_and_one_that_made_space_wait_for_new_reports_of_disks(stage: Stage) -> None:
    assert stage.look(*heard(disk=FULL)) is None
    stage.now_ns += DISK_AGAIN_NS
    trim = stage.look(*heard(disk=FULL))
    assert trim == Trim(20, TrimReason.DISK, 1)
    stage.commit(trim)
    assert stage.look(*heard(disk=DiskUse(1000, 0))) is None
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=FULL)) == Trim(40, TrimReason.DISK, 1)


def test_disks_of_which_nothing_is_known_are_no_full_ones(stage: Stage) -> None:
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=FULL, count=1), *heard(disk=DiskUse(0, 0), count=2)) is None
    assert stage.look(*heard(disk=FULL, count=2), *heard(disk=DiskUse(0, 0), count=1)) is not None


def test_what_was_trimmed_for_another_reason_counts_as_free_at_once(stage: Stage) -> None:
    stage.now_ns += DISK_AGAIN_NS
    apply(stage.state, Configure(time_minutes=1, disk_percent=0))
    stage.commit(stage.look(*heard(61)))
    apply(stage.state, Configure(disk_percent=90))
    assert stage.look(*heard(disk=DiskUse(1000, 60))) is None
    assert stage.look(*heard(disk=DiskUse(1000, 59))) == Trim(30, TrimReason.DISK, 1)
    stage.now_ns += DISK_AGAIN_NS
    assert stage.look(*heard(disk=DiskUse(1000, 60))) == Trim(40, TrimReason.DISK, 1)


def test_a_hold_keeps_segments_and_one_that_moves_on_lets_them_go(stage: Stage) -> None:
    apply(stage.state, Configure(time_minutes=1))
    apply(stage.state, Hold("reader", 19, 1))
    assert stage.look(*heard(10**6)) == Trim(10, TrimReason.TIME, 10**6 * MINUTE_NS)
    apply(stage.state, Hold("reader", 45, 1))
    assert stage.look(*heard(10**6)) == Trim(40, TrimReason.TIME, 10**6 * MINUTE_NS)
    apply(stage.state, Configure(hold_limit_bytes=40))
    apply(stage.state, Hold("other", 0, 1))
    assert stage.look(*heard(10**6)) == Trim(20, TrimReason.TIME, 10**6 * MINUTE_NS)


def test_only_what_a_node_is_told_otherwise_is_configured(stage: Stage) -> None:
    told = Archiving(stage.state, 3, {"limit_bytes": 5, "disk_percent": 90}, 0)
    assert told.configure() == Configure(limit_bytes=5)
    apply(stage.state, Configure(limit_bytes=5))
    assert told.configure() is None
    assert stage.archiving.configure() is None

"""Phases of a starting node: how they follow from its Raft log, its merger and its lag."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import (
    PATIENCE_NS,
    PHASES,
    DataPhases,
    LagDetector,
    MergedLogView,
    NodePhases,
    Phase,
    RaftLogView,
)
from sequencer.control.cluster_view import data_phase
from sequencer.control.reporter import DurableEnds
from sequencer.data.phase_reporter import PhaseReporter

READY = Phase("ready")
AT_START = RaftLogView(is_led=False, applied=5, committed=5, is_caught_up=False)
BEHIND = RaftLogView(is_led=True, applied=5, committed=9, is_caught_up=False)
LEVEL = RaftLogView(is_led=True, applied=9, committed=9, is_caught_up=True)
RECEIVES = RaftLogView(is_led=True, applied=5, committed=5, is_caught_up=True, received=(100, 400))
COPYING = Phase("copying", 10, 50)


@pytest.mark.parametrize(
    ("log", "data", "expected"),
    [
        (AT_START, None, Phase("starting")),
        (AT_START, READY, Phase("starting")),
        (RECEIVES, READY, Phase("snapshot", 100, 400)),
        (RECEIVES._replace(is_led=False), None, Phase("snapshot", 100, 400)),
        (BEHIND, READY, Phase("commands", 5, 9)),
        (BEHIND._replace(is_caught_up=True), COPYING, Phase("commands", 5, 9)),
        # A node that has applied nothing of the current term may miss commands committed in earlier terms.
        (BEHIND._replace(committed=5), READY, Phase("commands", 5, 5)),
        (LEVEL, None, Phase("starting")),
        (LEVEL, COPYING, COPYING),
        (LEVEL, Phase("merging", 3, 4), Phase("merging", 3, 4)),
        (LEVEL, READY, READY),
    ],
)
def test_node_phase_is_first_unfinished_phase(log: RaftLogView, data: Phase | None, expected: Phase) -> None:
    found = NodePhases().update(log, data, 0)
    assert found == expected
    assert found.name in PHASES


def test_starting_node_passes_all_phases_in_order() -> None:
    steps = NodePhases()
    told = [
        steps.update(log, data, now_ns)
        for now_ns, (log, data) in enumerate(
            [
                (AT_START, None),
                (RECEIVES, None),
                (BEHIND, Phase("starting")),
                (LEVEL, Phase("starting")),
                (LEVEL, COPYING),
                (LEVEL, Phase("merging", 50, 60)),
                (LEVEL, READY),
            ]
        )
    ]
    assert [one.name for one in told] == [
        *("starting", "snapshot", "commands", "starting", "copying", "merging", "ready")
    ]


def test_node_phase_stays_ready_after_leader_loss() -> None:
    steps = NodePhases()
    assert steps.update(LEVEL, READY, 0) == READY
    assert steps.update(LEVEL._replace(is_led=False), READY, 10 * PATIENCE_NS) == READY


@pytest.mark.parametrize(
    ("merged", "expected"),
    [
        (None, Phase("starting")),
        (MergedLogView(3, 9), Phase("merging", 3, 9)),
        (MergedLogView(3, 9, is_cut_off=True), Phase("copying", 3, 9)),
        (MergedLogView(0, 9, COPYING, is_cut_off=True), COPYING),
        (MergedLogView(9, 9), READY),
        (MergedLogView(0, 0), READY),
    ],
)
def test_data_phase_follows_from_merged_log_state(merged: MergedLogView | None, expected: Phase) -> None:
    assert DataPhases().update(merged, 0) == expected


def test_lag_detector_clears_lag_of_close_follower_of_growing_log() -> None:
    pace = LagDetector()
    for second in range(100):
        now_ns = second * PATIENCE_NS // 4
        # The follower is behind at first, until it reaches the first observed end.
        assert pace.update(second * 10, second * 10 + 15, now_ns) == (second < 2)


def test_lag_detector_reports_stalled_follower_until_it_reaches_observed_end() -> None:
    pace = LagDetector()
    assert not pace.update(10, 10, 0)
    assert not pace.update(10, 12, 1)
    assert not pace.update(10, 30, PATIENCE_NS)
    assert pace.update(11, 90, PATIENCE_NS + 5)  # The follower has not reached the earlier end, 12.
    assert pace.update(11, 91, 9 * PATIENCE_NS)
    assert not pace.update(12, 92, 9 * PATIENCE_NS + 1)
    assert not pace.update(13, 93, 9 * PATIENCE_NS + 2)


def test_lag_detector_reports_lag_until_first_observed_end_is_reached() -> None:
    pace = LagDetector()
    for done in range(0, 1000, 10):
        assert pace.update(done, 1000 + done, done * PATIENCE_NS)
    assert not pace.update(1000, 2000, 1000 * PATIENCE_NS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Phase("merging", 10, 40)),
        ({"written": SimpleNamespace(position=40)}, READY),
        ({"gap": (0, 0, 64)}, Phase("copying", 10, 40)),
        ({"damage": OSError()}, Phase("copying", 10, 40)),
    ],
)
def test_phase_reporter_derives_phase_from_merger_and_copying(
    changes: dict[str, Any], expected: Phase
) -> None:
    fields = {"written": SimpleNamespace(position=10), "gap": None, "damage": None, **changes}
    follower: Any = SimpleNamespace(state=None)
    merging: Any = SimpleNamespace(merger=None)
    catching_up: Any = SimpleNamespace(copied=None)
    reports: Any = None
    stepping = PhaseReporter(follower, merging, catching_up, reports)
    assert stepping.poll(0) == Phase("starting")
    follower.state = SimpleNamespace(position=40)
    assert stepping.poll(0) == Phase("starting")
    merging.merger = SimpleNamespace(**fields)
    assert stepping.poll(0) == expected
    catching_up.copied = Phase("copying", 20, 40)
    assert stepping.poll(0) == Phase("copying", 20, 40)


def test_control_keeps_reported_data_phase_until_data_process_restarts() -> None:
    holdings = DurableEnds(b"boot")
    assert data_phase(holdings.data_status) is None
    holdings.handle_report(pb.DataReport(step=pb.DataStep(step="copying", done=1, total=2)))
    holdings.handle_report(pb.DataReport(disk_bytes=5))
    assert data_phase(holdings.data_status) == Phase("copying", 1, 2)
    assert data_phase(DurableEnds(b"next").data_status) is None

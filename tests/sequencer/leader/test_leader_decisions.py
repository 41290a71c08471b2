"""The leader's trims, rolls and settings, and its decisions about operators' requests."""

from __future__ import annotations

import pytest
from leader_bench import CLOCK_NS, HOUR_NS, SECOND_NS, Bench, marks_of, writing
from sequencer_core import do_open, do_roll

from rt.log.format.segment_table import TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.leader import MINUTE_NS
from sequencer.leader.proposals import REPEAT_NS
from sequencer.leader.retention_planner import POLL_NS
from sequencer.state import feature_level
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    CommandRejected,
    ConfigurationChanged,
    FeatureLevelRaised,
    RequestLapsed,
    SegmentsTrimmed,
)
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import (
    Command,
    Configure,
    DecideRequest,
    RaiseFeatureLevel,
    Roll,
    SubmitRequest,
    TrimSegments,
)
from sequencer.state.feature_level import MemberLevel

# Archiving


def grown_old(bench: Bench) -> None:
    """Create a sealed segment with positions up to 2, and an active segment."""
    do_open(bench.state)
    one = writing(4)
    for upto in (3, 5):
        for node in "ab":
            bench.report(node, {(1, 0, 0): one.segments[0][upto - 3 : upto]})
        bench.reconcile()
        if upto == 3:
            do_roll(bench.state)
    assert len(bench.state.segments) == 1


def test_old_segment_is_trimmed_once_by_node_clocks(bench):
    grown_old(bench)
    apply(bench.state, Configure(session_idle_minutes=0))
    week_ns = (bench.state.configuration.retention_minutes + 1) * MINUTE_NS
    bench.leader.tick()
    assert bench.pending == []
    bench.now_ns += week_ns
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + week_ns)
    bench.leader.tick()
    assert bench.pending == [TrimSegments(2, TrimReason.TIME, CLOCK_NS + week_ns)]
    bench.now_ns += POLL_NS
    bench.leader.tick()
    assert len(bench.proposals) == 1  # The proposal is in flight.
    bench.now_ns += REPEAT_NS
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + week_ns)
    bench.leader.tick()
    assert len(bench.proposals) == 2  # The first proposal may be lost.
    assert [type(bench.commit(*bench.proposals.popleft())) for _ in range(2)] == [
        SegmentsTrimmed,
        CommandRejected,
    ]
    bench.now_ns += POLL_NS
    bench.leader.tick()
    assert bench.pending == []


def test_leader_with_different_settings_configures_cluster_once(bench):
    bench.configured = {"retention_bytes": 7, "retention_minutes": 5, "roll_minutes": 0}
    bench.lead()
    bench.leader.tick()
    bench.leader.tick()
    assert bench.pending == [Configure(retention_minutes=5, retention_bytes=7)]
    bench.commit(*bench.proposals.popleft())
    bench.leader.tick()
    assert bench.pending == []
    apply(bench.state, Configure(retention_bytes=8, retention_disk_percent=50))
    bench.now_ns += REPEAT_NS
    bench.leader.tick()
    assert bench.pending == [Configure(retention_bytes=7)]


def test_settings_are_applied_before_trims_are_planned(bench):
    grown_old(bench)
    bench.configured = {"retention_minutes": 0}
    bench.lead()
    week_ns = (bench.state.configuration.retention_minutes + 1) * MINUTE_NS
    for _ in range(3):  # Too old by the current settings, but not by the new ones.
        bench.now_ns += POLL_NS
        for node in "ab":
            bench.report(node, clock_ns=CLOCK_NS + week_ns)
        bench.leader.tick()
        assert bench.pending == [Configure(retention_minutes=0)]
    bench.commit(*bench.proposals.popleft())
    bench.now_ns += POLL_NS
    bench.leader.tick()
    assert bench.pending == []
    assert bench.state.log_start == 0


def test_trim_in_flight_is_rejected_after_configuration_disables_retention(bench):
    grown_old(bench)
    week_ns = (bench.state.configuration.retention_minutes + 1) * MINUTE_NS
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + week_ns)
    bench.leader.tick()
    (trim,) = bench.pending
    assert isinstance(trim, TrimSegments)
    bench.commit(encode_command(Configure(retention_minutes=0)))
    assert isinstance(bench.commit(*bench.proposals.popleft()), CommandRejected)
    assert bench.state.log_start == 0


# What operators ask for


ASKED = SubmitRequest(b"q" * 16, CLOCK_NS + 10 * SECOND_NS, Configure(roll_minutes=7))


def ask(bench: Bench) -> None:
    bench.commit(encode_command(ASKED))
    assert bench.leader.has_plans
    bench.leader.plan()


def test_request_is_decided_once_at_time_reached_by_majority_of_clocks(bench):
    bench.report("a", clock_ns=CLOCK_NS + HOUR_NS)
    ask(bench)
    assert bench.pending == []  # The time is unknown without a majority of clocks.
    bench.report("b", clock_ns=CLOCK_NS + SECOND_NS)
    bench.leader.tick()
    assert bench.pending == [DecideRequest(ASKED.id, CLOCK_NS + SECOND_NS)]
    bench.leader.tick()
    assert len(bench.pending) == 1
    assert bench.commit(*bench.proposals.popleft()) == ConfigurationChanged()
    bench.leader.tick()
    assert bench.pending == []
    assert bench.state.configuration.roll_minutes == 7


def test_request_after_its_deadline_lapses_and_is_forgotten(bench):
    for node in "ab":
        bench.report(node, clock_ns=ASKED.until_ns + 1)
    ask(bench)
    assert bench.commit(*bench.proposals.popleft()) == RequestLapsed(may_be_done=False)
    assert bench.state.configuration.roll_minutes == 0
    assert not bench.state.asked


def test_lost_decision_is_proposed_again_by_next_leader_and_applied_once(bench):
    for node in "ab":
        bench.report(node)
    ask(bench)
    lost = bench.proposals.popleft()
    bench.lead()
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + SECOND_NS)
    bench.leader.tick()
    assert bench.commit(*bench.proposals.popleft()) == ConfigurationChanged()
    apply(bench.state, Configure(roll_minutes=8))
    assert isinstance(bench.commit(*lost), CommandRejected)
    assert bench.state.configuration.roll_minutes == 8


def test_decided_request_is_forgotten_after_its_deadline(bench):
    for node in "ab":
        bench.report(node)
    ask(bench)
    bench.commit(*bench.proposals.popleft())
    assert bench.state.asked
    for node in "ab":
        bench.report(node, clock_ns=ASKED.until_ns + 1)
    bench.leader.tick()
    assert bench.commit(*bench.proposals.popleft()) == RequestLapsed(may_be_done=True)
    assert not bench.state.asked


# Segments of the merged log


def _aged(bench: Bench, minutes: int) -> None:
    do_open(bench.state)
    apply(bench.state, leading_configure(roll_minutes=5))
    for node in "abc":
        bench.report(node, marks_of(writing(2)))
    bench.reconcile()
    for node in "abc":
        bench.report(node, clock_ns=CLOCK_NS + minutes * MINUTE_NS)


def leading_configure(**fields: int) -> Command:
    return decode_command(pb.Command(version=1, configure=pb.Configure(**fields)).SerializeToString())


def test_old_merged_segment_is_rolled_once(bench):
    _aged(bench, 5)
    bench.leader.tick()
    bench.leader.tick()
    clock_ns = CLOCK_NS + 5 * MINUTE_NS
    assert bench.pending == [Roll(2, 0, 0, clock_ns)]
    bench.reconcile()
    assert (bench.state.merged.segment, bench.state.merged.created_ns) == ((0, 1), clock_ns)
    assert bench.state.segments[0].sealed_ns == clock_ns
    bench.now_ns += REPEAT_NS
    bench.leader.tick()
    bench.reconcile()
    assert sum(isinstance(command, Roll) for command, _ in bench.outcomes) == 1


def test_single_clock_ahead_rolls_no_segment(bench):
    _aged(bench, 4)
    bench.report("a", clock_ns=CLOCK_NS + HOUR_NS)
    bench.leader.tick()
    bench.reconcile()
    assert not any(isinstance(command, Roll) for command, _ in bench.outcomes)


RAISED = SubmitRequest(b"r" * 16, CLOCK_NS + 10 * SECOND_NS, RaiseFeatureLevel(2))


@pytest.mark.parametrize("latest", [1, 2])
def test_feature_level_raise_is_rejected_with_member_name_unless_all_support_it(bench, monkeypatch, latest):
    monkeypatch.setattr(feature_level, "LATEST", 2)
    levels = [MemberLevel("a", 2, "2.0", True), MemberLevel("b", latest, "1.9", True)]
    monkeypatch.setattr(bench.leader, "_member_levels", lambda _now_ns: levels)
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS)
    bench.commit(encode_command(RAISED))
    bench.leader.plan()
    outcome = bench.commit(*bench.proposals.popleft())
    if latest == 2:
        assert outcome == FeatureLevelRaised(2)
    else:
        assert isinstance(outcome, CommandRejected)
        assert "(at member b): got rt 1.9 with level 1 at most" in outcome.why
    assert bench.state.feature_level == latest

"""The leader's planning: instructions, reports, clocks, restored disks, leases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leader_bench import CLOCK_NS, HOUR_NS, SECOND_NS, Bench, marks_of, writing
from sequencer_core import Writing, do_join, do_open, piece

from rt.errors import Closed, MessageTooLarge, Overloaded
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader import leader as leader_module
from sequencer.leader.leader import IN_FLIGHT_MAX
from sequencer.leader.lease_expiry import POLL_NS as LEASES_LOOK_NS
from sequencer.leader.node_reports import FRESH_NS
from sequencer.leader.proposals import REPEAT_NS
from sequencer.leader.replication_tracker import BatchBoundary
from sequencer.state.apply_result import CommandRejected
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import JoinDisk, MergeInstruction, RestoreDisk
from sequencer.state.leases.leases import AcquireLeases, ExpireLeases, HeldLease, IdleLease, RenewLeases


def test_leader_merges_only_messages_held_by_two_nodes(bench):
    do_open(bench.state)
    bench.report("a", marks_of(writing(5)))
    bench.reconcile()
    assert bench.outcomes == []
    bench.report("b", marks_of(writing(3)))
    bench.reconcile()
    bench.assert_merged(1, 3)


def test_instructions_in_flight_are_limited_to_in_flight_max(bench):
    do_open(bench.state)
    much = marks_of(writing(20, size=16 << 20))
    bench.report("a", much)
    bench.report("b", much)
    bench.leader.plan()
    assert [command.number for command in bench.pending] == [*range(1, IN_FLIGHT_MAX + 1)]
    bench.reconcile()
    bench.assert_merged(1, 20)


def test_report_with_sequence_gap_or_new_boot_triggers_full_report_request(bench):
    do_open(bench.state)
    bench.report("a")
    bench.report("b")
    bench.sequences["a"] += 1
    bench.report("a", marks_of(writing(3)))
    assert bench.asked == ["a"]
    bench.report("b", marks_of(writing(3)), boot=b"c")
    assert bench.asked == ["a", "b"]
    bench.reconcile()
    assert bench.outcomes == []


def test_missing_full_report_is_requested_again_each_second(bench):
    do_open(bench.state)
    bench.report("b")
    bad = pb.Report(boot=b"b", sequence=1)
    bad.segments.add(session_id=1, boundaries=b"short")
    bench.leader.on_report("b", bad)
    bench.sequences["b"] += 1
    bench.report("b")
    assert bench.asked == ["b"]
    for count in (2, 3):
        bench.now_ns += SECOND_NS
        bench.report("b")
        bench.report("b")
        assert bench.asked == ["b"] * count
    del bench.sequences["b"]
    bench.report("b")  # A full report.
    bench.now_ns += SECOND_NS
    bench.report("b")
    assert len(bench.asked) == 3


def test_unreadable_report_triggers_full_report_request_and_keeps_earlier_reports(bench):
    do_open(bench.state)
    bench.report("a", marks_of(writing(3)))
    bench.report("b", marks_of(writing(3)))
    bad = pb.Report(boot=b"b", sequence=1)
    bad.segments.add(session_id=1, boundaries=b"short")
    bench.leader.on_report("b", bad)
    assert bench.asked == ["b"]
    bench.reconcile()
    bench.assert_merged(1, 3)


def test_leader_plans_again_after_instruction_of_another_leader(bench):
    do_open(bench.state)
    one = writing(6)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][:3]})
    bench.leader.plan()
    (own, future) = bench.proposals.popleft()
    first, second = one.segments[0][:2]
    other = piece(start=64, end=second.offset, count=1, chains=(first.chain, second.chain))
    bench.commit(encode_command(MergeInstruction(1, 5, (other,))))
    assert isinstance(bench.commit(own, future), CommandRejected)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][3:]})
    bench.reconcile()
    bench.assert_merged(1, 6)


@pytest.mark.parametrize(
    "error",
    [Overloaded("full"), MessageTooLarge("large"), Closed("over")],
    ids=lambda error: type(error).__name__,
)
def test_ranges_are_planned_again_after_proposal_fails(bench, error):
    do_open(bench.state)
    for node in "ab":
        bench.report(node, marks_of(writing(4)))
    bench.error = error
    bench.leader.plan()
    bench.leader.plan()
    assert not bench.proposals
    bench.error = None
    bench.reconcile()
    bench.assert_merged(1, 4)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_messages_are_merged_once_despite_lost_proposals_and_leader_changes(seed):
    rng = random.Random(seed)
    bench = Bench()
    active_runs = {session_id: Writing(0, 0, session_id) for session_id in (1, 2, 3)}
    for session_id in active_runs:
        do_open(bench.state, f"s{session_id}", incarnation=session_id)
    for _ in range(60):
        one = rng.choice([*active_runs.values()])
        match rng.randrange(7):
            case 0 | 1:
                one.append(8 * rng.randrange(1, 1 << rng.randrange(1, 22)), rng.randrange(1, 5))
            case 2 if rng.random() < 0.3 and len(one.segments[-1]) > 1:
                one.roll()
            case 3:
                bench.sequences.pop(name := rng.choice("abc"), None)
                bench.report(name, _held(rng, active_runs))
            case 4:
                bench.leader.plan()
            case 5 if bench.proposals:
                content, future = bench.proposals.popleft()
                if rng.random() < 0.2:
                    future.set_exception(Closed("nobody knows"))
                    if rng.random() < 0.5:
                        bench.commit(content)
                else:
                    bench.commit(content, future)
            case 6 if rng.random() < 0.3:
                survivors = rng.randrange(len(bench.proposals) + 1)
                while len(bench.proposals) > survivors:
                    bench.proposals.pop()
                bench.lead()  # Proposals of the old leader may still commit.
                for content, _ in bench.proposals:
                    bench.commit(content)
                bench.proposals.clear()
    for name in "abc":
        bench.sequences.pop(name, None)
        bench.report(name, _all(active_runs))
    bench.reconcile()
    for session_id, one in active_runs.items():
        bench.assert_merged(session_id, one.end.number)


def _all(active_runs: dict[int, Writing]) -> dict[tuple[int, int, int], list[BatchBoundary]]:
    return {
        key: marks
        for session_id, one in active_runs.items()
        for key, marks in marks_of(one, session_id).items()
    }


def _held(
    rng: random.Random, active_runs: dict[int, Writing]
) -> dict[tuple[int, int, int], list[BatchBoundary]]:
    found: dict[tuple[int, int, int], list[BatchBoundary]] = {}
    for session_id, one in active_runs.items():
        for roll, marks in one.up_to(rng.choice(one.ends())):
            found[session_id, 0, roll] = marks
    return found


# Clocks


def test_sequencing_time_ignores_clock_one_hour_ahead(bench):
    do_open(bench.state)
    bench.report("a", marks_of(writing(3)), clock_ns=CLOCK_NS + HOUR_NS)
    bench.report("b", marks_of(writing(3)))
    bench.report("c", clock_ns=CLOCK_NS + 5)
    bench.reconcile()
    assert bench.state.sequenced_ns == CLOCK_NS + 5


@pytest.mark.parametrize("jump_ns", [-HOUR_NS, HOUR_NS])
def test_sequencing_time_advances_and_messages_are_merged_when_all_clocks_jump(bench, jump_ns):
    do_open(bench.state)
    one = writing(6)
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][:4]})
    bench.reconcile()
    before = bench.state.sequenced_ns
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][4:]}, clock_ns=CLOCK_NS + jump_ns)
    bench.reconcile()
    bench.assert_merged(1, 6)
    assert bench.state.sequenced_ns > before


def test_sequencing_time_advances_by_one_ns_without_fresh_clocks(bench):
    do_open(bench.state)
    one = writing(6)
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][:4]})
    bench.reconcile()
    before = bench.state.sequenced_ns
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][4:]})
    bench.now_ns += FRESH_NS
    bench.reconcile()
    bench.assert_merged(1, 6)
    assert bench.state.sequenced_ns == before + 1


# Backlog limits


@pytest.mark.parametrize(("limit", "most"), [("BACKLOG_BYTES_MAX", 10_000), ("BACKLOG_MAX", 1)])
def test_planning_waits_while_durable_merge_backlog_of_majority_exceeds_limit(
    bench, monkeypatch, limit, most
):
    monkeypatch.setattr(leader_module, limit, most)
    do_open(bench.state)
    one = writing(40, size=1000)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][:21]})
    bench.reconcile()
    total = bench.state.merged.total_bytes
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][21:]})
    bench.reconcile()
    bench.assert_merged(1, 20)
    bench.report("a", merged=pb.MergedReport(instruction=1, bytes=total))
    bench.reconcile()
    bench.assert_merged(1, 20)
    bench.report("c", merged=pb.MergedReport(instruction=1, bytes=total))
    bench.reconcile()
    bench.assert_merged(1, 40)


# Self-clocking


def test_new_messages_share_next_instruction_while_small_instruction_is_in_flight(bench):
    do_open(bench.state)
    one = writing(30)
    for at in range(2, 31):
        for node in "ab":
            bench.report(node, {(1, 0, 0): one.segments[0][at - 2 : at]})
        bench.leader.plan()
    assert len(bench.proposals) == 1
    assert not bench.leader.may_plan
    bench.reconcile()
    bench.assert_merged(1, 29)
    assert len(bench.outcomes) == 2


def test_large_instruction_is_proposed_while_another_is_in_flight(bench):
    do_open(bench.state)
    one = writing(6, size=1 << 19)
    for at in range(2, 8):
        for node in "ab":
            bench.report(node, {(1, 0, 0): one.segments[0][at - 2 : at]})
        bench.leader.plan()
    assert [len(command.ranges) for command in bench.pending] == [1, 1, 1]
    bench.reconcile()
    bench.assert_merged(1, 6)


def test_leader_has_no_plans_without_new_bytes_on_majority(bench):
    for n in range(40):
        do_open(bench.state, f"s{n}")
    bench.lead()
    for node in "abc":
        bench.report(node, {(n + 1, 0, 0): writing(2).segments[0] for n in range(20)})
    bench.reconcile()
    assert not bench.leader.has_plans
    for node in "abc":
        bench.report(node)
    assert not bench.leader.has_plans
    bench.report("a", {(30, 0, 0): writing(2).segments[0]})
    assert not bench.leader.has_plans
    bench.report("b", {(30, 0, 0): writing(2).segments[0]})
    assert bench.leader.may_plan


# Lost disks


def test_disk_is_restored_only_after_complete_reports_and_merge_of_its_node(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    one = writing(4)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][:2]}, joins=3)
    bench.reconcile()
    bench.report("a", {(1, 0, 0): one.segments[0][2:]}, joins=3)
    do_join(bench.state, "c", disk=1)
    bench.report("a", joins=4)
    bench.report("b", {(9, 0, 0): one.segments[0]}, joins=4)  # The session is not known here yet.
    bench.report("c", joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.sequences.pop("b")
    bench.report("b", {(1, 0, 0): one.segments[0][1:2]}, joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.report("c", {(1, 0, 0): one.segments[0]}, joins=4)
    bench.leader.tick()
    assert not any(isinstance(one, RestoreDisk) for one in bench.pending), "it has not merged what was merged"
    bench.report("c", joins=4, merged=pb.MergedReport(instruction=1))
    bench.leader.tick()
    assert RestoreDisk("c", bytes([1]) * 16) in bench.pending
    bench.reconcile()
    bench.assert_merged(1, 4)
    assert bench.state.disks["c"].is_whole


def test_new_disk_is_not_restored_by_reports_of_previous_disk(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    held = {(1, 0, 0): writing(4).segments[0]}
    bench.report("a", held, joins=3)
    bench.report("b", held, joins=3)
    bench.report("c", joins=3)
    bench.commit(encode_command(JoinDisk("b", b"D" * 16)))
    assert bench.asked == ["b"]
    bench.report("a", joins=4)
    bench.report("c", joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.sequences.pop("b")
    bench.report("b", joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.report("b", held)
    bench.leader.tick()
    assert RestoreDisk("b", b"D" * 16) in bench.pending


def test_unrenewed_lease_expires_by_leader_time_despite_wall_clock_jump(bench):
    bench.commit(encode_command(AcquireLeases(b"Q" * 16, "h1", 10_000, ("g/q1", "g/q2"))))
    bench.leader.tick()
    for node in "abc":
        bench.report(node, clock_ns=CLOCK_NS + HOUR_NS)
    bench.now_ns += 10 * SECOND_NS - 1
    bench.leader.tick()
    assert bench.pending == []
    bench.now_ns += LEASES_LOOK_NS
    bench.leader.tick()
    assert bench.pending == [ExpireLeases((IdleLease("g/q1", 1, 0), IdleLease("g/q2", 2, 0)))]
    bench.commit(encode_command(RenewLeases(b"R" * 16, "h1", (HeldLease("g/q1", 1),))))
    bench.reconcile()
    assert [*bench.state.leases] == ["g/q1"]


def test_lost_lease_expiry_is_proposed_again_but_not_while_in_flight(bench):
    bench.commit(encode_command(AcquireLeases(b"Q" * 16, "h1", 1_000, ("g/q1",))))
    bench.leader.tick()
    bench.now_ns += SECOND_NS
    for _ in range(3):
        bench.leader.tick()
        bench.now_ns += LEASES_LOOK_NS
    assert len(bench.pending) == 1
    bench.proposals.clear()
    bench.now_ns += REPEAT_NS
    bench.leader.tick()
    bench.reconcile()
    assert not bench.state.leases


def test_new_leader_restarts_full_duration_of_leases(bench):
    bench.commit(encode_command(AcquireLeases(b"Q" * 16, "h1", 10_000, ("g/q1",))))
    bench.leader.tick()
    bench.now_ns += 9 * SECOND_NS
    bench.lead()
    bench.leader.tick()
    bench.now_ns += 9 * SECOND_NS
    bench.leader.tick()
    assert bench.pending == []
    bench.now_ns += SECOND_NS
    bench.leader.tick()
    assert bench.pending == [ExpireLeases((IdleLease("g/q1", 1, 0),))]

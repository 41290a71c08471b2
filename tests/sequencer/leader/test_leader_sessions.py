"""Sessions that the leader fences, closes and forgets, and nodes whose bytes differ."""

from __future__ import annotations

import pytest
from leader_bench import CLOCK_NS, SECOND_NS, Bench, marks_of, writing
from sequencer_core import do_fence, do_join, do_open, must, opening

from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.proposals import REPEAT_NS
from sequencer.leader.replication_tracker import BatchBoundary
from sequencer.leader.session_close import AWAY_NS
from sequencer.state.apply import apply
from sequencer.state.apply_result import RunOpened
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Command, Configure, JoinDisk
from sequencer.state.session_commands import (
    LATER_MAX,
    SEALED_RUNS_MAX,
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import End
from sequencer.state.state_codec import decode_state, encode_state

# Ends of runs


def test_lost_fence_is_proposed_again_but_not_while_in_flight(bench):
    do_open(bench.state)
    do_open(bench.state, run=1)
    end = pb.SessionEnd(session_id=1, run=0, roll=0, offset=64)
    for node in "ab":
        report = pb.Report(boot=b"b", is_full=True, clock_ns=CLOCK_NS)
        report.segments.add(session_id=1, announced=end)
        bench.leader.on_report(node, report)
    bench.leader.plan()
    bench.leader.plan()
    assert bench.pending == [FenceRun(1, 0)]
    bench.proposals.clear()
    bench.now_ns += REPEAT_NS
    bench.leader.plan()
    assert bench.pending == [FenceRun(1, 0)]


def test_only_session_with_disagreeing_nodes_stops_and_is_logged_once(bench, caplog):
    do_open(bench.state)
    do_open(bench.state, "b", incarnation=1)
    good, bad = writing(3), writing(3, salt=2)
    bench.report("a", marks_of(good) | marks_of(good, 2))
    bench.report("b", marks_of(bad) | marks_of(good, 2))
    bench.report("c", marks_of(bad))
    bench.reconcile()
    assert bench.merged_numbers(1) == []
    bench.assert_merged(2, 3)
    assert caplog.text.count("session_stopped") == 1


def test_run_is_not_closed_if_final_checksums_differ_and_log_names_both_nodes(bench, caplog):
    do_open(bench.state)
    do_open(bench.state, run=1)
    do_fence(bench.state)
    for node, chain in (("a", 111), ("b", 222)):
        report = pb.Report(boot=b"b", is_full=True, clock_ns=CLOCK_NS)
        end = pb.SessionEnd(session_id=1, run=0, roll=0, offset=128, number=8, chain=chain)
        report.segments.add(session_id=1, final=end)
        bench.leader.on_report(node, report)
    bench.leader.plan()
    assert bench.pending == []
    (said,) = [line for line in caplog.messages if "session_stopped" in line]
    assert "node=b" in said
    assert "others=a" in said


def test_node_with_diverged_merged_log_is_reported(bench):
    do_open(bench.state)
    for node in "abc":
        bench.report(node, marks_of(writing(3)))
    bench.reconcile()
    good = pb.MergedReport(instruction=1, chain=bench.state.merged.chain)
    bench.report("a", merged=good)
    bench.report("b", merged=pb.MergedReport(instruction=1, chain=7))
    assert bench.differences == []
    bench.report("c", merged=good)
    assert [one.node for one in bench.differences] == ["b"]


# Sessions without a publisher


def closing(bench: Bench) -> list[Command]:
    return [one for one in bench.pending if isinstance(one, FenceRun | CloseRun)]


def end_report(bench: Bench, node: str, session_id: int, offset: int, number: int, *, run: int = 0) -> None:
    """Report the final end of one of the session's runs."""
    sequence = bench.sequences[node] = bench.sequences[node] + 1
    report = pb.Report(boot=b"b", clock_ns=CLOCK_NS, sequence=sequence)
    final = pb.SessionEnd(session_id=session_id, run=run, roll=0, offset=offset, number=number)
    report.segments.add(session_id=session_id, run=run, roll=0, final=final)
    bench.leader.on_report(node, report)


def test_idle_session_is_fenced_and_closed_while_connected_session_stays_open(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    do_open(bench.state, "fed", incarnation=1)
    apply(bench.state, Configure(session_idle_minutes=1))
    bench.lead()
    for second in range(0, 130, 10):
        for node in "ab":
            bench.report(node, connected=[2] if node == "b" else [])
        bench.leader.tick()
        assert bool(closing(bench)) == (second >= 60), second
        if closing(bench):
            break
        bench.now_ns += 10 * SECOND_NS
    assert closing(bench) == [FenceRun(1, 0)]
    bench.reconcile()
    for node in "ab":
        end_report(bench, node, 1, 64, 0)
    bench.reconcile()
    assert [*bench.state.closed] == [1]
    assert bench.state.sessions[2].active_runs


@pytest.mark.parametrize("runs", [1, 2])
def test_operator_close_ends_run_with_lost_end_after_wait_for_publisher(bench, runs: int):
    """Reports of held bytes say nothing about the publisher. A second run waits for the end of the first
    run.
    """
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    if runs == 2:
        do_open(bench.state, run=1)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3)
    bench.commit(encode_command(CloseSession("a")))
    end_report(bench, "a", 1, 640, 10)
    end_report(bench, "b", 1, 64, 0)
    bench.reconcile()
    active = bench.state.sessions[1].active
    assert active is not None
    assert active.end == (0, 640, 10)
    bench.commit(encode_command(JoinDisk("a", b"D" * 16)))
    bench.sequences.pop("a")
    for node in "abc":
        bench.report(node, joins=4)
    bench.leader.tick()
    assert closing(bench) == [], "its publisher may be connected to a node that has not said so yet"
    bench.now_ns += AWAY_NS
    bench.leader.tick()
    assert CloseRun(1, 0, 0, 64, 0) in bench.pending
    bench.reconcile()
    assert [active.run for active in bench.state.sessions[1].active_runs] == [1][: runs - 1]


def test_operator_close_ends_many_waiting_runs_without_bytes_in_few_commands(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    count = 2 * LATER_MAX
    for begin in range(1, count, SEALED_RUNS_MAX):
        whose = opening("a")
        runs = range(begin, min(begin + SEALED_RUNS_MAX, count))
        sealed = tuple(SealedRun(run, run.to_bytes(8), End(0, 128, 10)) for run in runs)
        opened = OpenSealedRuns(whose.session, whose.incarnation, None, sealed, 1)
        must(RunOpened, apply(bench.state, opened))
    assert len(bench.state.sessions[1].active_runs) == count
    snapshot = encode_state(bench.state)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3)
    bench.commit(encode_command(CloseSession("a")))
    bench.now_ns += AWAY_NS
    bench.leader.tick()
    bench.reconcile()
    for node in "ab":
        for run in range(count):
            end_report(bench, node, 1, 64, 0, run=run)
    bench.reconcile()
    assert [*bench.state.closed] == [1]
    assert bench.state.sessions[1].done == (count - 1, End(0, 64, 0))
    assert len(bench.outcomes) <= 5
    assert all(len(encode_command(command)) < 1024 for command, _ in bench.outcomes)
    replayed = decode_state(snapshot)
    for command, outcome in bench.outcomes:
        assert apply(replayed, decode_command(encode_command(command))) == outcome
        replayed = decode_state(encode_state(replayed))
    assert replayed == bench.state
    assert encode_state(replayed) == encode_state(bench.state)


def test_operator_close_ends_only_run_being_merged_while_publisher_is_connected(bench):
    do_join(bench.state, "a", "b", "c")
    for run in range(3):
        do_open(bench.state, run=run)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3, connected=[1] if node == "b" else [])
    bench.commit(encode_command(CloseSession("a")))
    for node in "ab":
        end_report(bench, node, 1, 64, 0)
    bench.reconcile()
    assert [one.is_fenced for one in bench.state.sessions[1].active_runs] == [False, False]
    bench.now_ns += AWAY_NS - 1
    bench.report("b", connected=[1])
    bench.now_ns += AWAY_NS
    bench.leader.tick()
    assert closing(bench) == [], "it is connected still"
    bench.commit(encode_command(CloseSession("a")))
    bench.leader.tick()
    assert closing(bench) == [FenceRun(1, 2)], "it has left"


def test_operator_close_keeps_run_with_lost_end_open_while_publisher_is_connected(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3)
    bench.commit(encode_command(CloseSession("a")))
    end_report(bench, "a", 1, 640, 10)
    end_report(bench, "b", 1, 64, 0)
    bench.reconcile()
    bench.commit(encode_command(JoinDisk("a", b"D" * 16)))
    bench.sequences.pop("a")
    for node in "abc":
        bench.report(node, joins=4, connected=[1])
    bench.leader.tick()
    assert closing(bench) == []


def test_leader_forgets_closed_session_and_its_tracked_state_after_durable_merge(bench, monkeypatch):
    monkeypatch.setattr("sequencer.leader.idle_sessions.FORGET_AT_ONCE", 1)
    monkeypatch.setattr("sequencer.leader.idle_sessions.OldSessions.__init__.__kwdefaults__", {"kept": 0})
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    bench.lead()
    for node in "ab":
        bench.report(node, {(1, 0, 0): [BatchBoundary(64, 0, 64), BatchBoundary(128, 10, 128)]})
    bench.reconcile()
    bench.assert_merged(1, 10)
    bench.commit(encode_command(CloseSession("a")))
    for node in "ab":
        end_report(bench, node, 1, 128, 10)
    bench.reconcile()
    assert [*bench.state.closed] == [1]
    bench.leader.tick()
    assert not any(isinstance(one, Forget) for one in bench.pending), "nobody has merged it durably"
    for node in "ab":
        bench.report(node, merged=pb.MergedReport(instruction=1))
    bench.leader.tick()
    assert bench.pending == [Forget((1,))]
    bench.reconcile()
    assert bench.state.sessions == {}
    assert bench.leader.tracker._segments == bench.leader.tracker._finals == {}
    # A node that has not heard of the removal still reports its bytes. It is not asked for a full report.
    bench.asked.clear()
    end_report(bench, "a", 1, 128, 10)
    assert bench.asked == []
    assert bench.leader.tracker._finals == {}

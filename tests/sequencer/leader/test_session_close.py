"""Fencing and closing of runs, restoration of replaced disks, and ends that were lost with a disk."""

from __future__ import annotations

import pytest
from sequencer_core import do_close, do_fence, do_join, do_merge, do_open, must, new_state, opening, piece

from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.leader.session_close import DiskRestoration, SessionCloser
from sequencer.state.apply import apply
from sequencer.state.apply_result import DiskRestored, RunClosed, RunFenced, RunOpened
from sequencer.state.commands import RestoreDisk
from sequencer.state.session_commands import CloseRun, FenceRun, OpenSealedRuns, SealedRun
from sequencer.state.state import End, SequencerState
from sequencer.state.write_plan import SessionEnd


def held(
    tracker: ReplicationTracker, session_id: int, *offsets: int, run: int = 0, roll: int = 0, nodes: int = 2
) -> None:
    """Let `nodes` nodes report these boundaries, with 10 messages a batch. Checksums match those of
    `piece`.
    """
    for node in range(nodes):
        holds(f"n{node}", tracker, *offsets, session_id=session_id, run=run, roll=roll)


def holds(
    node: str, tracker: ReplicationTracker, *offsets: int, session_id: int = 1, run: int = 0, roll: int = 0
) -> None:
    marks = [BatchBoundary(offset, 10 * index, offset) for index, offset in enumerate((64, *offsets))]
    tracker.on_boundaries(node, SegmentKey(session_id, run, roll), marks)


def stage() -> tuple[SequencerState, ReplicationTracker]:
    state = new_state()
    do_join(state, "n0", "n1", "n2")
    do_open(state, "s0")
    return state, ReplicationTracker(3)


def planned(state: SequencerState, tracker: ReplicationTracker) -> list[FenceRun | CloseRun]:
    return SessionCloser(state, tracker).plan()


def final(
    node: int, tracker: ReplicationTracker, offset: int, *, session_id: int = 1, run: int = 0, roll: int = 0
) -> None:
    tracker.on_final(f"n{node}", SessionEnd(session_id, run, roll, offset, (offset - 64) // 8), None)


def test_run_without_successor_is_not_fenced_or_closed() -> None:
    state, tracker = stage()
    tracker.on_announced(SessionEnd(1, 0, 0, 64, 0))
    assert planned(state, tracker) == []


def test_run_with_successor_is_fenced_when_majority_holds_announced_end() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 20))
    held(tracker, 1, 128, 256, nodes=1)
    held(tracker, 1, 128)
    assert planned(state, tracker) == []
    held(tracker, 1, 128, 256)
    assert planned(state, tracker) == [FenceRun(1, 0)]


@pytest.mark.parametrize(
    "end", [SessionEnd(1, 0, 0, 64, 0), SessionEnd(1, 0, 0, 128, 10)], ids=["empty", "merged"]
)
def test_run_with_empty_or_merged_announced_end_is_fenced_without_reports(end: SessionEnd) -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_merge(state, piece())
    tracker.on_announced(end)
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_run_without_announced_end_is_not_fenced() -> None:
    """Its sender may be cut off for hours, with messages that only its own disk has."""
    state, tracker = stage()
    do_open(state, "s0", run=1)
    held(tracker, 1, 128)
    assert planned(state, tracker) == []


def test_superseded_incarnation_is_fenced_immediately() -> None:
    state, tracker = stage()
    do_open(state, "s0", incarnation=1)
    assert planned(state, tracker) == [FenceRun(1, 0)]
    # No publisher sends the announced messages any more.
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 20))
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_run_is_closed_at_furthest_final_end_of_majority() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    final(0, tracker, 128)
    assert planned(state, tracker) == []
    final(1, tracker, 64)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]
    final(2, tracker, 64, roll=1)
    assert planned(state, tracker) == [CloseRun(1, 0, 1, 64, 0)]
    tracker.forget_node("n1")
    tracker.forget_node("n2")
    assert planned(state, tracker) == []


@pytest.mark.parametrize(("offset", "number"), [(0, 0), (129, 10), (1 << 63, 10), (128, 1 << 63)])
def test_run_is_closed_despite_invalid_announced_end(offset: int, number: int) -> None:
    """The announced end comes from a publisher, so it may be invalid."""
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    tracker.on_announced(SessionEnd(1, 0, 0, offset, number))
    for node in range(2):
        final(node, tracker, 128)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]


def test_run_is_not_closed_below_merged_end() -> None:
    """Rebuilt nodes have fewer bytes."""
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_merge(state, piece())
    do_fence(state)
    for node in range(3):
        final(node, tracker, 64)
    (close,) = planned(state, tracker)
    assert close == CloseRun(1, 0, 0, 128, 10)
    must(RunClosed, apply(state, close))


def test_run_is_not_fenced_or_closed_while_nodes_disagree() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    held(tracker, 1, 128)
    tracker.on_boundaries("n2", SegmentKey(1, 0, 0), [BatchBoundary(128, 10, 999)])
    assert planned(state, tracker) == []
    do_fence(state)
    for node in range(3):
        final(node, tracker, 128)
    assert planned(state, tracker) == []


def test_run_is_not_closed_if_final_ends_have_different_checksums() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    end = SessionEnd(1, 0, 0, 128, 8)
    tracker.on_final("n0", end, 111)
    tracker.on_final("n1", end, 222)
    assert planned(state, tracker) == [], "before any of their marks has come"
    found = tracker.disagreements[1]
    assert (found.key, found.offset, found.node, found.others) == (SegmentKey(1, 0, 0), 128, "n1", ("n0",))
    assert (found.got, found.wanted) == (BatchBoundary(128, 8, 222), BatchBoundary(128, 8, 111))


@pytest.mark.parametrize("is_final_first", [False, True])
def test_run_is_not_closed_if_nearer_final_end_disagrees_with_further_one(is_final_first: bool) -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    further = [BatchBoundary(128, 8, 111), BatchBoundary(256, 16, 112)]
    if not is_final_first:
        tracker.on_boundaries("n0", SegmentKey(1, 0, 0), further)
    tracker.on_final("n0", SessionEnd(1, 0, 0, 256, 16), 112)
    tracker.on_final("n1", SessionEnd(1, 0, 0, 128, 8), 222)
    if is_final_first:
        tracker.on_boundaries("n0", SegmentKey(1, 0, 0), further)
    assert planned(state, tracker) == []
    assert {tracker.disagreements[1].node, *tracker.disagreements[1].others} == {"n0", "n1"}


def test_run_is_closed_if_final_ends_agree_on_checksums() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    tracker.on_final("n0", SessionEnd(1, 0, 0, 256, 16), 112)
    tracker.on_boundaries(
        "n0", SegmentKey(1, 0, 0), [BatchBoundary(128, 8, 111), BatchBoundary(256, 16, 112)]
    )
    tracker.on_final("n1", SessionEnd(1, 0, 0, 128, 8), 111)
    tracker.on_final("n2", SessionEnd(1, 0, 0, 64, 0), None)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 256, 16)]
    assert not tracker.disagreements


def test_newer_incarnation_is_closed_after_older_one() -> None:
    state, tracker = stage()
    do_open(state, "s0", incarnation=1)
    do_open(state, "s0", incarnation=2)
    for session_id in (1, 2):
        do_fence(state, session_id)
        for node in range(3):
            final(node, tracker, 64, session_id=session_id)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 64, 0)]
    do_close(state, 1, 0, (0, 64, 0))
    assert planned(state, tracker) == [CloseRun(2, 0, 0, 64, 0)]


# Disks that count for a run's end


def test_replacement_disk_counts_for_end_of_open_run_only_after_restoration() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_join(state, "n2", disk=1)
    do_fence(state)
    final(2, tracker, 64)
    final(1, tracker, 128)
    assert planned(state, tracker) == []  # n0 and the lost disk may have acknowledged more.
    final(0, tracker, 256)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 256, 24)]
    must(DiskRestored, apply(state, RestoreDisk("n2", bytes([1]) * 16)))
    tracker.forget_node("n0")
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]


def test_run_is_closed_without_whole_disks_if_all_nodes_report_ends() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    for node in ("n0", "n1", "n2"):
        do_join(state, node, disk=1)
    do_fence(state)
    for node in range(3):
        assert planned(state, tracker) == []
        final(node, tracker, 64 * (node + 1))
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 192, 16)]


def test_session_is_checked_again_only_after_news() -> None:
    state, tracker = stage()
    for n in range(1, 50):
        do_open(state, f"s{n}")
    endings = SessionCloser(state, tracker)
    assert endings.plan() == []
    assert not endings.due
    endings.on_news(range(1, 50))
    assert not endings.due
    endings.on_applied(apply(state, opening("s0", 1, incarnation=1, newest=1)))
    assert endings.plan() == endings.plan() == [FenceRun(1, 0)]
    endings.on_applied(apply(state, FenceRun(1, 0)))
    assert endings.plan() == []
    assert not endings.due
    final(0, tracker, 64)
    final(1, tracker, 64)
    endings.on_news(tracker.take_news())
    assert endings.plan() == [CloseRun(1, 0, 0, 64, 0)]


# Disk restoration


def broken() -> tuple[SequencerState, ReplicationTracker, DiskRestoration]:
    """n2 has started with an empty disk, which joined as the fourth disk."""
    state, tracker = stage()
    do_join(state, "n2", disk=1)
    return state, tracker, DiskRestoration(state, tracker)


RESTORE = RestoreDisk("n2", bytes([1]) * 16)


def test_disk_is_restored_when_it_holds_bytes_held_by_majority_of_others_at_join() -> None:
    _, tracker, restoring = broken()
    holds("n0", tracker, 128, 256)
    holds("n1", tracker, 128)
    assert restoring.plan({"n0": 4, "n1": 3, "n2": 4}, {}) == []
    assert restoring.plan({"n0": 4, "n1": 4, "n2": 4}, {}) == []
    holds("n0", tracker, 128, 256, 512)  # These bytes arrived after the new disk had joined.
    holds("n2", tracker, 128)
    assert restoring.plan({"n0": 4, "n1": 4, "n2": 4}, {}) == []
    holds("n2", tracker, 128, 256)
    tracker.forget_node("n1")
    assert restoring.plan({}, {}) == [RESTORE]


def test_disk_is_restored_without_merged_bytes_and_bytes_after_run_end() -> None:
    state, tracker, restoring = broken()
    do_open(state, "s1")
    do_open(state, "s2")
    for session_id in (1, 2, 3):
        held(tracker, session_id, 128, 256)
    told = {"n0": 4, "n1": 4}
    assert restoring.plan(told, {}) == []
    do_merge(state, piece(1, end=256, count=20))
    do_fence(state, 2)
    do_close(state, 2, 0, (0, 128, 10))
    do_merge(state, piece(3, end=256, count=20))
    # The closed run is not merged yet. It would be lost with the disks that have it.
    assert restoring.plan(told, {}) == []
    holds("n2", tracker, 128, session_id=2)
    assert restoring.plan(told, {}) == [RESTORE]


def test_disk_is_restored_once_all_others_report_no_bytes() -> None:
    _, _, restoring = broken()
    assert restoring.plan({"n0": 4}, {}) == []
    assert restoring.plan({"n0": 4, "n1": 4}, {}) == [RESTORE]


def test_disk_is_restored_only_after_merge_of_instructions_committed_at_join() -> None:
    state, tracker = stage()
    do_open(state, "s1")
    do_merge(state, piece(1, end=128, count=10))
    do_join(state, "n2", disk=1)
    restoring = DiskRestoration(state, tracker)
    held(tracker, 1, 128)
    told = {"n0": 4, "n1": 4}
    assert restoring.plan(told, {"n2": 1}) == [], "the disk before may have said that"
    told["n2"] = 4
    assert restoring.plan(told, {"n2": 0}) == []
    do_merge(state, piece(1, start=128, end=256, first=10, count=10))
    assert restoring.plan(told, {"n2": 1}) == [RESTORE], "what came later it was there for"


def test_disk_is_restored_only_after_merge_of_instructions_planned_before_join() -> None:
    state, tracker = stage()
    do_join(state, "n2", disk=1)
    restoring, told = DiskRestoration(state, tracker), {"n0": 4, "n1": 4, "n2": 4}
    assert restoring.plan(told, {"n2": 0}, planned=2) == []
    assert restoring.plan(told, {"n2": 1}, planned=5) == []
    assert restoring.plan(told, {"n2": 2}, planned=5) == [RESTORE]


def test_replacement_disk_does_not_vouch_for_another_unless_all_others_report() -> None:
    state, _ = stage()
    tracker = ReplicationTracker(5)
    do_join(state, "n3", "n4")
    do_join(state, "n2", "n1", disk=1)
    restoring = DiskRestoration(state, tracker)
    assert restoring.plan({"n0": 9, "n1": 9, "n3": 9}, {}) == []
    assert restoring.plan({"n0": 9, "n3": 9, "n4": 9}, {}) == [
        RestoreDisk("n1", bytes([1]) * 16),
        RestoreDisk("n2", bytes([1]) * 16),
    ]
    do_join(state, "n3", disk=1)
    restoring = DiskRestoration(state, tracker)
    assert restoring.plan({"n0": 9, "n4": 9, "n1": 9}, {}) == []
    assert restoring.plan({"n0": 9, "n1": 9, "n2": 9, "n4": 9}, {}) == [RestoreDisk("n3", bytes([1]) * 16)]


# Lost ends


def closed_at_256(*, superseded: bool = True) -> tuple[SequencerState, ReplicationTracker, SessionCloser]:
    """Run 0 of session 1 was closed at an end that only n2 had reached. The disk of n2 was lost later."""
    state, tracker = stage()
    do_open(state, "s0", incarnation=1) if superseded else do_open(state, "s0", run=1)
    do_fence(state)
    do_close(state, 1, 0, (0, 256, 20))
    do_join(state, "n2", disk=1)
    holds("n0", tracker, 128)
    return state, tracker, SessionCloser(state, tracker)


TOLD = {"n0": 4, "n1": 4, "n2": 4}


def test_run_with_lost_end_is_closed_at_remaining_end_after_all_nodes_report() -> None:
    state, _, endings = closed_at_256()
    assert endings.plan_lost({"n0": 4, "n1": 4}) == []
    assert endings.plan_lost(TOLD | {"n1": 3}) == []
    (close,) = endings.plan_lost(TOLD)
    assert close == CloseRun(1, 0, 0, 128, 10)
    endings.on_applied(apply(state, close))
    assert endings.plan_lost(TOLD) == []
    do_merge(state, piece())
    assert state.sessions[1].active_runs == ()
    assert endings.plan_lost(TOLD) == []


def test_run_end_is_not_lost_while_node_holds_it_or_publisher_may_send_it() -> None:
    _, tracker, endings = closed_at_256()
    holds("n1", tracker, 128, 256)
    assert endings.plan_lost(TOLD) == []
    _, tracker, endings = closed_at_256(superseded=False)
    assert endings.plan_lost(TOLD) == []
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 20))
    assert endings.plan_lost(TOLD) == []
    tracker.on_announced(SessionEnd(1, 0, 0, 128, 10))
    assert endings.plan_lost(TOLD) == [CloseRun(1, 0, 0, 128, 10, announced=End(0, 128, 10))]


def test_run_with_lost_end_is_closed_at_merged_end() -> None:
    state, tracker, _ = closed_at_256()
    do_merge(state, piece())
    tracker.forget_node("n0")
    endings = SessionCloser(state, tracker)
    (close,) = endings.plan_lost(TOLD)
    assert close == CloseRun(1, 0, 0, 128, 10)
    must(RunClosed, apply(state, close))
    assert state.sessions[1].active_runs == ()


# Sealed runs


def sealed_stage(*, is_superseded: bool = False) -> tuple[SequencerState, ReplicationTracker]:
    state = new_state()
    do_join(state, "n0", "n1", "n2")
    whose = opening("s0")
    runs = tuple(SealedRun(x, opening("s0", x).run_id, End(0, 256, 24)) for x in (0, 1))
    must(RunOpened, apply(state, OpenSealedRuns(whose.session, whose.incarnation, None, runs)))
    if is_superseded:
        do_open(state, "s0", incarnation=1)
    return state, ReplicationTracker(3)


def test_sealed_run_is_not_fenced_or_closed_while_its_publisher_may_return() -> None:
    state, tracker = sealed_stage()
    assert planned(state, tracker) == []
    held(tracker, 1, 128)
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 24))
    assert planned(state, tracker) == []
    held(tracker, 1, 128, 256)
    assert planned(state, tracker) == []


def test_sealed_run_is_fenced_when_majority_holds_its_shorter_announced_end() -> None:
    state, tracker = sealed_stage()
    tracker.on_announced(SessionEnd(1, 0, 0, 128, 10))
    assert planned(state, tracker) == []
    held(tracker, 1, 128)
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_superseded_sealed_run_is_fenced_and_closed_at_furthest_final_end() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    held(tracker, 1, 128)
    assert planned(state, tracker) == [FenceRun(1, 0, (1,))]
    must(RunFenced, apply(state, FenceRun(1, 0, (1,))))
    final(0, tracker, 128)
    final(1, tracker, 64)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]


def test_later_runs_empty_on_majority_are_closed_with_first_run() -> None:
    state, tracker = stage()
    for run in (1, 2, 3):
        do_open(state, "s0", run=run)
    do_open(state, "s0", incarnation=1)
    assert planned(state, tracker) == [FenceRun(1, 0, (1, 2, 3))]
    must(RunFenced, apply(state, FenceRun(1, 0, (1, 2, 3))))
    for run, offsets in enumerate([(128, 128), (64, 64), (64, 128), (64,)]):
        for node, offset in enumerate(offsets):
            final(node, tracker, offset, run=run)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8, (1,))]
    final(1, tracker, 64, run=3)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8, (1, 3))]


def test_later_run_with_lost_announced_messages_counts_as_cut_short() -> None:
    """The only node with these messages is lost."""
    state, tracker = stage()
    for run in (1, 2):
        do_open(state, "s0", run=run)
    do_open(state, "s0", incarnation=1)
    must(RunFenced, apply(state, FenceRun(1, 0, (1, 2))))
    tracker.on_announced(SessionEnd(1, 1, 0, 256, 20))
    for run in range(3):
        for node in range(2):
            final(node, tracker, 64, run=run)
    for expected in (CloseRun(1, 0, 0, 64, 0, (2,)), CloseRun(1, 1, 0, 64, 0, announced=End(0, 256, 20))):
        (close,) = planned(state, tracker)
        assert close == expected
        must(RunClosed, apply(state, close))
    assert state.sessions[1].active_runs == ()
    assert state.runs_cut_short == 1


def test_run_is_fenced_alone_while_its_publisher_may_return() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_open(state, "s0", run=2)
    for run in (0, 1):
        tracker.on_announced(SessionEnd(1, run, 0, 64, 0))
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_sealed_run_held_by_majority_is_not_fenced_with_superseded_run_before_it() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    held(tracker, 1, 256, run=1)
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_superseded_sealed_run_complete_on_majority_is_not_fenced() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    held(tracker, 1, 256)
    assert planned(state, tracker) == []


def test_abandoned_session_fences_its_sealed_runs() -> None:
    state, tracker = sealed_stage()
    closer = SessionCloser(state, tracker)
    closer.give_up([1])
    assert closer.plan() == [FenceRun(1, 0, (1,))]


def test_sealed_run_is_not_closed_at_nearer_end() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    for node in range(3):
        holds(f"n{node}", tracker, 128)
    closer = SessionCloser(state, tracker)
    assert closer.plan_lost({"n0": 3, "n1": 3, "n2": 3}) == []

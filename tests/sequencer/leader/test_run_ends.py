"""The ends of lives: where they come, who has a say about them, and when a lost disk's successor has one."""

from __future__ import annotations

import pytest
from sequencing import do_close, do_fence, do_join, do_merge, do_open, must, new_state, opening, piece

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
    """So many nodes hold these boundaries, 10 messages a batch; chains as `piece` makes them."""
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


def test_a_life_without_successor_is_never_ended() -> None:
    state, tracker = stage()
    tracker.on_announced(SessionEnd(1, 0, 0, 64, 0))
    assert planned(state, tracker) == []


def test_a_life_with_a_successor_is_fenced_when_a_majority_has_what_was_announced() -> None:
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
def test_what_was_announced_needs_no_report_if_it_is_empty_or_merged(end: SessionEnd) -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_merge(state, piece())
    tracker.on_announced(end)
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_a_life_of_whose_end_nobody_has_word_is_not_fenced() -> None:
    """Its sender may be cut off for hours, with messages that only its own disk has."""
    state, tracker = stage()
    do_open(state, "s0", run=1)
    held(tracker, 1, 128)
    assert planned(state, tracker) == []


def test_an_incarnation_that_was_taken_over_is_fenced_at_once() -> None:
    state, tracker = stage()
    do_open(state, "s0", incarnation=1)
    assert planned(state, tracker) == [FenceRun(1, 0)]
    # No sender brings what was announced any more.
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 20))
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_a_life_is_closed_at_the_furthest_end_of_a_majority() -> None:
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
def test_an_announced_end_that_cannot_be_one_stops_no_leader(offset: int, number: int) -> None:
    """It comes from a publisher."""
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    tracker.on_announced(SessionEnd(1, 0, 0, offset, number))
    for node in range(2):
        final(node, tracker, 128)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]


def test_a_life_is_never_closed_below_what_is_merged() -> None:
    """Nodes that were built anew hold less."""
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_merge(state, piece())
    do_fence(state)
    for node in range(3):
        final(node, tracker, 64)
    (close,) = planned(state, tracker)
    assert close == CloseRun(1, 0, 0, 128, 10)
    must(RunClosed, apply(state, close))


def test_a_life_is_not_ended_where_nodes_disagree() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    held(tracker, 1, 128)
    tracker.on_boundaries("n2", SegmentKey(1, 0, 0), [BatchBoundary(128, 10, 999)])
    assert planned(state, tracker) == []
    do_fence(state)
    for node in range(3):
        final(node, tracker, 128)
    assert planned(state, tracker) == []


def test_nodes_whose_ends_are_at_one_place_with_other_bytes_before_it_end_no_life() -> None:
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
def test_a_nearer_end_with_other_bytes_than_a_further_one_has_ends_no_life(is_final_first: bool) -> None:
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


def test_ends_that_agree_to_the_last_byte_end_a_life() -> None:
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


def test_an_incarnation_is_closed_behind_the_older_one() -> None:
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


# Who has a say


def test_a_disk_that_took_the_place_of_another_has_no_say_about_the_end_of_a_life_that_was_open() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_join(state, "n2", disk=1)
    do_fence(state)
    final(2, tracker, 64)
    final(1, tracker, 128)
    assert planned(state, tracker) == []  # What n0 and the lost disk acknowledged may go further.
    final(0, tracker, 256)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 256, 24)]
    must(DiskRestored, apply(state, RestoreDisk("n2", bytes([1]) * 16)))
    tracker.forget_node("n0")
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]


def test_where_all_nodes_have_their_say_no_disk_need_be_whole() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    for node in ("n0", "n1", "n2"):
        do_join(state, node, disk=1)
    do_fence(state)
    for node in range(3):
        assert planned(state, tracker) == []
        final(node, tracker, 64 * (node + 1))
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 192, 16)]


def test_a_session_is_looked_at_again_when_something_is_new_of_it_and_only_then() -> None:
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


# When a disk is whole again


def broken() -> tuple[SequencerState, ReplicationTracker, DiskRestoration]:
    """n2 has begun with an empty disk; it is the fourth that joined."""
    state, tracker = stage()
    do_join(state, "n2", disk=1)
    return state, tracker, DiskRestoration(state, tracker)


RESTORE = RestoreDisk("n2", bytes([1]) * 16)


def test_a_disk_is_whole_when_it_holds_what_a_majority_of_the_others_held_once_it_had_joined() -> None:
    _, tracker, restoring = broken()
    holds("n0", tracker, 128, 256)
    holds("n1", tracker, 128)
    assert restoring.plan({"n0": 4, "n1": 3, "n2": 4}, {}) == []
    assert restoring.plan({"n0": 4, "n1": 4, "n2": 4}, {}) == []
    holds("n0", tracker, 128, 256, 512)  # The new disk was there for that.
    holds("n2", tracker, 128)
    assert restoring.plan({"n0": 4, "n1": 4, "n2": 4}, {}) == []
    holds("n2", tracker, 128, 256)
    tracker.forget_node("n1")
    assert restoring.plan({}, {}) == [RESTORE]


def test_what_is_merged_or_behind_an_end_need_not_be_held() -> None:
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
    # What is closed is not merged yet: it would be lost with the disks that hold it.
    assert restoring.plan(told, {}) == []
    holds("n2", tracker, 128, session_id=2)
    assert restoring.plan(told, {}) == [RESTORE]


def test_where_nothing_was_held_a_disk_is_whole_as_soon_as_that_is_known() -> None:
    _, _, restoring = broken()
    assert restoring.plan({"n0": 4}, {}) == []
    assert restoring.plan({"n0": 4, "n1": 4}, {}) == [RESTORE]


def test_a_disk_is_whole_only_once_its_node_has_merged_what_was_committed_when_it_had_joined() -> None:
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


def test_what_was_planned_before_a_disk_had_joined_may_count_on_the_disk_before() -> None:
    state, tracker = stage()
    do_join(state, "n2", disk=1)
    restoring, told = DiskRestoration(state, tracker), {"n0": 4, "n1": 4, "n2": 4}
    assert restoring.plan(told, {"n2": 0}, planned=2) == []
    assert restoring.plan(told, {"n2": 1}, planned=5) == []
    assert restoring.plan(told, {"n2": 2}, planned=5) == [RESTORE]


def test_a_disk_that_was_lost_too_does_not_vouch_for_another_unless_all_others_are_asked() -> None:
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


# Ends that are lost


def closed_at_256(*, superseded: bool = True) -> tuple[SequencerState, ReplicationTracker, SessionCloser]:
    """X 0 of session 1 was closed where n2 alone had come to; n2's disk was lost since."""
    state, tracker = stage()
    do_open(state, "s0", incarnation=1) if superseded else do_open(state, "s0", run=1)
    do_fence(state)
    do_close(state, 1, 0, (0, 256, 20))
    do_join(state, "n2", disk=1)
    holds("n0", tracker, 128)
    return state, tracker, SessionCloser(state, tracker)


TOLD = {"n0": 4, "n1": 4, "n2": 4}


def test_a_life_whose_end_is_lost_is_closed_at_what_is_left_once_all_nodes_were_heard() -> None:
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


def test_an_end_that_a_node_holds_or_a_sender_may_bring_is_not_lost() -> None:
    _, tracker, endings = closed_at_256()
    holds("n1", tracker, 128, 256)
    assert endings.plan_lost(TOLD) == []
    _, tracker, endings = closed_at_256(superseded=False)
    assert endings.plan_lost(TOLD) == []
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 20))
    assert endings.plan_lost(TOLD) == []
    tracker.on_announced(SessionEnd(1, 0, 0, 128, 10))
    assert endings.plan_lost(TOLD) == [CloseRun(1, 0, 0, 128, 10, announced=End(0, 128, 10))]


def test_what_is_merged_stays_merged_when_the_rest_is_lost() -> None:
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


def test_a_sealed_run_is_neither_fenced_nor_closed_while_its_sender_may_come() -> None:
    state, tracker = sealed_stage()
    assert planned(state, tracker) == []
    held(tracker, 1, 128)
    tracker.on_announced(SessionEnd(1, 0, 0, 256, 24))
    assert planned(state, tracker) == []
    held(tracker, 1, 128, 256)
    assert planned(state, tracker) == []


def test_a_sealed_run_whose_sender_has_less_than_it_said_is_fenced_when_a_majority_has_that() -> None:
    state, tracker = sealed_stage()
    tracker.on_announced(SessionEnd(1, 0, 0, 128, 10))
    assert planned(state, tracker) == []
    held(tracker, 1, 128)
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_a_sealed_run_that_nobody_brings_any_more_is_fenced_and_closed_where_it_ends() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    held(tracker, 1, 128)
    assert planned(state, tracker) == [FenceRun(1, 0, (1,))]
    must(RunFenced, apply(state, FenceRun(1, 0, (1,))))
    final(0, tracker, 128)
    final(1, tracker, 64)
    assert planned(state, tracker) == [CloseRun(1, 0, 0, 128, 8)]


def test_runs_after_the_one_that_ends_are_closed_with_it_if_enough_disks_have_nothing_of_them() -> None:
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


def test_a_later_run_whose_announced_messages_no_node_has_is_counted() -> None:
    """The only node that had them is lost."""
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


def test_a_run_whose_publisher_may_come_back_is_fenced_alone() -> None:
    state, tracker = stage()
    do_open(state, "s0", run=1)
    do_open(state, "s0", run=2)
    for run in (0, 1):
        tracker.on_announced(SessionEnd(1, run, 0, 64, 0))
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_a_sealed_run_that_a_majority_holds_is_merged_though_those_around_it_are_given_up() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    held(tracker, 1, 256, run=1)
    assert planned(state, tracker) == [FenceRun(1, 0)]


def test_a_sealed_run_that_is_whole_on_a_majority_needs_no_fence_though_nobody_comes() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    held(tracker, 1, 256)
    assert planned(state, tracker) == []


def test_a_session_that_is_given_up_ends_its_sealed_runs() -> None:
    state, tracker = sealed_stage()
    closer = SessionCloser(state, tracker)
    closer.give_up([1])
    assert closer.plan() == [FenceRun(1, 0, (1,))]


def test_no_nearer_end_is_looked_for_of_a_sealed_run() -> None:
    state, tracker = sealed_stage(is_superseded=True)
    for node in range(3):
        holds(f"n{node}", tracker, 128)
    closer = SessionCloser(state, tracker)
    assert closer.plan_lost({"n0": 3, "n1": 3, "n2": 3}) == []

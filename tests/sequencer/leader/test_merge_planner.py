"""The merge planner: single decisions, then a small simulated cluster with random failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sequencer_core import (
    Writing,
    do_close,
    do_fence,
    do_merge,
    do_open,
    must,
    new_state,
    piece,
)
from stream_model import Node, World

from sequencer.leader.merge_planner import INSTRUCTION_BYTES_MAX, Speculation, plan_merge
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.leader.session_close import DiskRestoration
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, RangesMerged, RunClosed, RunFenced, RunOpened
from sequencer.state.commands import COUNT_MAX, RANGES_MAX, Configure, MergeInstruction, RestoreDisk
from sequencer.state.session_commands import CloseRun
from sequencer.state.state import SequencerState

MIB = 1 << 20


def held(
    tracker: ReplicationTracker, session_id: int, *offsets: int, run: int = 0, roll: int = 0, nodes: int = 2
) -> None:
    """Let `nodes` nodes report these boundaries, with 10 messages a batch. Checksums match those of
    `piece`.
    """
    marks = [BatchBoundary(offset, 10 * index, offset) for index, offset in enumerate((64, *offsets))]
    for node in range(nodes):
        tracker.on_boundaries(f"n{node}", SegmentKey(session_id, run, roll), marks)


def stage(
    sessions: int = 1, *, dedup: str | None = None
) -> tuple[SequencerState, ReplicationTracker, Speculation]:
    state = new_state()
    for index in range(sessions):
        do_open(state, f"s{index}", dedup=dedup)
    return state, ReplicationTracker(3), Speculation(state)


def planned(speculation: Speculation, tracker: ReplicationTracker, now_ns: int = 1) -> MergeInstruction:
    merge = maybe_planned(speculation, tracker, now_ns)
    assert merge is not None
    return merge


def maybe_planned(
    speculation: Speculation, tracker: ReplicationTracker, now_ns: int = 1
) -> MergeInstruction | None:
    speculation.pending |= tracker.take_news()
    return plan_merge(speculation, tracker, now_ns)


# Instructions


def test_only_ranges_held_by_majority_are_planned() -> None:
    _, tracker, speculation = stage()
    held(tracker, 1, 128, nodes=1)
    assert maybe_planned(speculation, tracker) is None
    held(tracker, 1, 128)
    held(tracker, 1, 128, 256, nodes=1)
    assert planned(speculation, tracker).ranges == (piece(),)


def test_session_with_disagreeing_nodes_is_not_planned() -> None:
    _, tracker, speculation = stage(2)
    held(tracker, 1, 128)
    held(tracker, 2, 128)
    tracker.on_boundaries("n2", SegmentKey(1, 0, 0), [BatchBoundary(128, 10, 999)])
    assert [one.session_id for one in planned(speculation, tracker).ranges] == [2]


def test_instructions_planned_ahead_are_accepted_by_apply() -> None:
    state, tracker, speculation = stage(2)
    apply(state, Configure(session_bytes_max=64))
    held(tracker, 1, 128, 192, 256)
    held(tracker, 2, 128)
    merges = [planned(speculation, tracker) for _ in range(3)]
    assert maybe_planned(speculation, tracker) is None
    assert [len(merge.ranges) for merge in merges] == [2, 1, 1]
    for merge in merges:
        must(RangesMerged, apply(state, merge))


def test_ranges_of_lost_instruction_are_planned_again() -> None:
    _, tracker, speculation = stage()
    held(tracker, 1, 128)
    first = planned(speculation, tracker)
    speculation.reset()
    assert planned(speculation, tracker) == first


def test_next_run_is_planned_while_end_of_current_run_is_in_flight() -> None:
    state, tracker, speculation = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    do_close(state, 1, 0, (0, 128, 10))
    held(tracker, 1, 128)
    merges = [planned(speculation, tracker)]
    held(tracker, 1, 128, run=1)
    merges.append(planned(speculation, tracker))
    assert [merge.ranges for merge in merges] == [(piece(),), (piece(run=1),)]
    assert maybe_planned(speculation, tracker) is None
    do_open(state, "s0", run=5)
    held(tracker, 1, 128, 256, run=1)
    merges.append(planned(speculation, tracker))
    for merge in merges:
        must(RangesMerged, apply(state, merge))
    assert maybe_planned(speculation, tracker) is None


def test_next_run_is_planned_after_current_run_is_closed_at_merged_end() -> None:
    state, tracker, speculation = stage()
    do_open(state, "s0", run=1)
    held(tracker, 1, 128)
    held(tracker, 1, 128, run=1)
    must(RangesMerged, apply(state, planned(speculation, tracker)))
    do_fence(state)
    speculation.on_applied(apply(state, CloseRun(1, 0, 0, 128, 10)))
    assert planned(speculation, tracker).ranges == (piece(run=1),)


def test_next_segment_is_planned_after_current_segment_is_complete() -> None:
    state, tracker, speculation = stage()
    held(tracker, 1, 128)
    marks = [BatchBoundary(64, 10, 7), BatchBoundary(128, 20, 8)]
    for node in ("n0", "n1"):
        tracker.on_boundaries(node, SegmentKey(1, 0, 1), marks)
    for want in (piece(), piece(roll=1, first=10, chains=(7, 8))):
        merge = planned(speculation, tracker)
        assert merge.ranges == (want,)
        must(RangesMerged, apply(state, merge))


def test_next_segment_is_not_planned_before_first_segment_is_reported() -> None:
    _, tracker, speculation = stage()
    held(tracker, 1, 128, roll=1)
    assert maybe_planned(speculation, tracker) is None


def test_next_segment_is_not_planned_while_current_segment_is_missing_messages() -> None:
    _, tracker, speculation = stage()
    held(tracker, 1, 128)
    for node in ("n0", "n1"):
        tracker.on_boundaries(
            node, SegmentKey(1, 0, 1), [BatchBoundary(64, 20, 7), BatchBoundary(128, 30, 8)]
        )
    assert planned(speculation, tracker).ranges == (piece(),)
    assert maybe_planned(speculation, tracker) is None


def test_range_stays_below_byte_cap_but_holds_at_least_one_batch() -> None:
    state, tracker, speculation = stage()
    apply(state, Configure(session_bytes_max=200))
    held(tracker, 1, 128, 256, 1000, 1200)
    ends = [(one.start, one.end) for _ in range(3) for one in planned(speculation, tracker).ranges]
    assert ends == [(64, 256), (256, 1000), (1000, 1200)]


def test_batch_above_byte_cap_is_planned_despite_differing_boundaries_of_one_node() -> None:
    state, tracker, speculation = stage()
    apply(state, Configure(session_bytes_max=8))
    held(tracker, 1, 128, 256)
    tracker.on_boundaries("n2", SegmentKey(1, 0, 0), [BatchBoundary(72, 1, 1), BatchBoundary(120, 2, 1)])
    assert planned(speculation, tracker).ranges == (piece(),)


def test_range_message_count_stays_within_block_limit() -> None:
    state, tracker, speculation = stage()
    marks = [BatchBoundary(64, 0, 64), *(BatchBoundary(64 + 8 * n, n * 2**30, n) for n in range(1, 9))]
    for node in ("n0", "n1"):
        tracker.on_boundaries(node, SegmentKey(1, 0, 0), marks)
    counts = []
    while (merge := maybe_planned(speculation, tracker)) is not None:
        must(RangesMerged, apply(state, merge))
        counts.append(merge.ranges[0].count)
    assert counts == [3 * 2**30, 3 * 2**30, 2 * 2**30]
    assert max(counts) <= COUNT_MAX


def test_closed_run_is_planned_only_up_to_its_end() -> None:
    state, tracker, speculation = stage()
    do_open(state, "s0", run=1)
    do_fence(state)
    do_close(state, 1, 0, (0, 128, 10))
    held(tracker, 1, 128, 256)
    held(tracker, 1, 128, run=1)
    merge = planned(speculation, tracker)
    assert merge.ranges == (piece(), piece(run=1))
    must(RangesMerged, apply(state, merge))


def test_sequencing_times_increase_when_clock_jumps_back() -> None:
    state, tracker, speculation = stage()
    apply(state, Configure(session_bytes_max=1))
    held(tracker, 1, 128, 192, 256, 512)
    times = [planned(speculation, tracker, now_ns).sequenced_ns for now_ns in (1000, 10, 1001, 5000)]
    assert times == [1000, 1001, 1002, 5000]


@pytest.mark.parametrize("idle", [0, 50])
@pytest.mark.parametrize("cap", [MIB, 16 * MIB, 100 * MIB])
def test_busy_session_waits_at_most_one_turn_of_other_busy_sessions(idle: int, cap: int) -> None:
    """All busy sessions fill their caps. Idle sessions, and sessions that waste their turn, take no turn from
    them.
    """
    busy = 9
    state, tracker, speculation = stage(idle + busy + 1)
    apply(state, Configure(session_bytes_max=cap))
    last = idle + busy + 1
    held(tracker, last, 128)
    do_merge(state, piece(last))
    speculation.reset()
    ids = range(idle + 1, idle + busy + 1)
    for session_id in ids:
        held(tracker, session_id, *range(cap + 64, 40 * cap, cap))
    turns: dict[int, list[int]] = {session_id: [] for session_id in ids}
    for at in range(busy * 3):
        merge = planned(speculation, tracker)
        assert sum(one.end - one.start for one in merge.ranges[:-1]) < INSTRUCTION_BYTES_MAX
        for one in merge.ranges:
            turns[one.session_id].append(at)
        must(RangesMerged, apply(state, merge))
    longest = -(-busy // max(1, min(INSTRUCTION_BYTES_MAX // cap, busy)))
    for took in turns.values():
        assert took[0] < longest
        assert max(b - a for a, b in zip([0, *took], [*took, busy * 3], strict=True)) <= longest


def test_sessions_beyond_range_limit_are_planned_in_next_instruction() -> None:
    count = RANGES_MAX + 100
    state, tracker, speculation = stage(count)
    for session_id in range(1, count + 1):
        held(tracker, session_id, 128)
    merges = [planned(speculation, tracker) for _ in range(2)]
    assert [len(merge.ranges) for merge in merges] == [RANGES_MAX, 100]
    for merge in merges:
        must(RangesMerged, apply(state, merge))


# Dedup


def test_sessions_with_shared_dedup_id_are_planned_in_order_of_apply() -> None:
    """Session 1 must wait for the ids of session 2, whichever session has its turn first."""
    for turn in (0, 2):
        state, tracker, speculation = stage(2, dedup="d")
        state.wanted["d"] = 0
        speculation.turn = turn
        for node in ("n0", "n1"):
            tracker.on_boundaries(
                node, SegmentKey(1, 0, 0), [BatchBoundary(64, 10, 64), BatchBoundary(128, 20, 128)]
            )
        held(tracker, 2, 128)
        for want in (piece(2), piece(1, first=10)):
            merge = planned(speculation, tracker)
            assert merge.ranges == (want,)
            must(RangesMerged, apply(state, merge))


def test_new_dedup_id_starts_with_session_applied_first() -> None:
    for turn in (0, 2):
        state, tracker, speculation = stage(2, dedup="d")
        speculation.turn = turn
        for node in ("n0", "n1"):
            tracker.on_boundaries(
                node, SegmentKey(1, 0, 0), [BatchBoundary(64, 10, 64), BatchBoundary(128, 20, 128)]
            )
        held(tracker, 2, 128)
        must(RangesMerged, apply(state, planned(speculation, tracker)))
        assert speculation.wanted == state.wanted == {"d": 20}


def test_dedup_numbers_of_lost_instruction_are_expected_again() -> None:
    state, tracker, speculation = stage(2, dedup="d")
    state.wanted["d"] = 0
    held(tracker, 1, 128)
    for node in ("n0", "n1"):
        tracker.on_boundaries(
            node, SegmentKey(2, 0, 0), [BatchBoundary(64, 10, 64), BatchBoundary(128, 20, 128)]
        )
    assert [planned(speculation, tracker).ranges[0].session_id for _ in range(2)] == [1, 2]
    speculation.reset()
    tracker.prune_before(1, 0, 0, 1000)
    assert maybe_planned(speculation, tracker) is None


def test_sessions_waiting_for_dedup_number_yield_turn_to_others() -> None:
    state, tracker, speculation = stage(9, dedup="d")
    state.wanted["d"] = 0
    for session_id in range(1, 9):
        for node in ("n0", "n1"):
            end = BatchBoundary(64 + 16 * MIB, 20, 1)
            tracker.on_boundaries(node, SegmentKey(session_id, 0, 0), [BatchBoundary(64, 10, 64), end])
    held(tracker, 9, 128)
    assert planned(speculation, tracker).ranges == (piece(9),)


# Simulations of a small stream


def run(seed: int, steps: int, *, is_harsh: bool | None = None) -> World:
    """Run `steps` random steps, then heal all faults."""
    try:
        world = World(seed, is_harsh=is_harsh)
        for _ in range(steps):
            world.step()
        world.heal()
        world.check_whole()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {steps} steps: {error}") from error
    return world


@pytest.mark.parametrize("seed", range(8))
def test_acknowledged_messages_are_merged_once_and_in_order(seed: int) -> None:
    for part in range(20):
        run(seed * 1000 + part, 250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_acknowledged_messages_are_merged_once_and_in_order_in_long_simulations(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        run(rng.getrandbits(32), rng.choice([200, 600]))


def test_simulations_produce_every_kind_of_outcome() -> None:
    """The checks above would prove nothing if these outcomes did not occur."""
    worlds = [run(seed, 250) for seed in range(30)]
    outcomes = [outcome for world in worlds for outcome in world.log]
    for kind in (RangesMerged, RunOpened, RunFenced, RunClosed):
        assert sum(isinstance(outcome, kind) for outcome in outcomes) > 30, kind
    assert any(isinstance(outcome, CommandRejected) for outcome in outcomes)
    orders = [outcome.plan for outcome in outcomes if isinstance(outcome, RangesMerged)]
    assert sum(len(order.consumed) > 1 for order in orders) > 30
    assert sum(len(order.consumed) > sum(not b.is_declaration for b in order.blocks) for order in orders) > 10
    assert sum(len(world.state.sessions) > len(world.present) for world in worlds) > 10


def test_writing_model_returns_ends_of_its_batches_and_segments() -> None:
    written = Writing(3, 100, 1)
    written.append(8, 2)
    written.roll()
    written.append(16, 1)
    assert [tuple(end) for end in written.ends()] == [(0, 64, 100), (0, 72, 102), (1, 64, 102), (1, 80, 103)]
    assert written.end == written.ends()[-1]
    assert [roll for roll, _ in written.up_to(written.ends()[1])] == [0]


# Availability of committed ranges


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_committed_ranges_stay_on_some_disk_while_disks_are_lost_one_by_one(
    seed: int,
) -> None:
    """Every world in this module checks this whenever bytes are lost, dropped or committed. This simulation
    is the hardest.
    """
    for part in range(3):
        run(100 * seed + part, 2500, is_harsh=True)


def _release_all_committed(world: World, node: Node) -> None:
    for place, end in node.consumed.items():
        node.release(place, end)


def _call_whole_what_has_not_merged(restoring: DiskRestoration, *given: Any) -> list[RestoreDisk]:
    told, _, planned = given
    return PLAN_RESTORE(restoring, told, {f"n{at}": 1 << 40 for at in range(5)}, planned)


PLAN_RESTORE = DiskRestoration.plan


@pytest.mark.parametrize(
    ("place", "name", "fault", "first_seed"),
    [
        pytest.param(World, "_release", _release_all_committed, 0, id="let go of when it is committed"),
        pytest.param(
            DiskRestoration, "plan", _call_whole_what_has_not_merged, 5, id="whole before it has merged"
        ),
    ],
)
def test_simulations_detect_faults_losing_bytes_of_committed_range(
    place: type, name: str, fault: object, first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first_seed` is the lowest seed that finds the fault."""
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError, match="nobody has the input"):
        for seed in range(first_seed, 200):
            run(seed, 2500, is_harsh=True)

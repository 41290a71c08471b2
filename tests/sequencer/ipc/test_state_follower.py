"""The data process's copy of the sequencer state: snapshots, applied commands, plans, leadership."""

from __future__ import annotations

import pytest
from batches import CLUSTER
from sequencer_core import do_fence, do_merge, do_open, merging, new_state, opening, piece

from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.state_follower import StateFollower
from sequencer.state.apply_result import RangesMerged
from sequencer.state.command_codec import encode_command
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import encode_state
from sequencer.state.write_plan import encode_write_plan


class Bench(StateFollower):
    def __init__(self) -> None:
        self.heard: list[object] = []
        super().__init__(self.heard.append, lambda _, outcome: self.heard.append(outcome))

    def snapshot(self, index: int, state: SequencerState, *plans: bytes) -> None:
        snapshot = pb.ControlSnapshot(index=index, state=encode_state(state), plans=plans)
        self.on_message(pb.ToData(snapshot=snapshot))

    def applied(self, index: int, command: object) -> None:
        content = encode_command(command)  # type: ignore[arg-type]
        self.on_message(pb.ToData(applied=pb.Applied(index=index, command=content)))


def test_commands_after_snapshot_are_applied_once_and_without_gaps():
    follower, state = Bench(), new_state()
    follower.applied(1, opening("early"))
    assert follower.heard == []
    follower.snapshot(1, state)
    for index in (1, 2, 2, 4):
        follower.applied(index, opening(f"s{index}", incarnation=index))
    assert follower.index == 2
    assert [one.name for one in follower.state.sessions.values()] == ["s2"]


def test_write_plans_of_snapshot_are_forwarded():
    follower, state = Bench(), new_state()
    do_open(state)
    plan = do_merge(state, piece())
    follower.snapshot(2, state, encode_write_plan(plan))
    assert follower.heard == [[plan]]


def test_fence_survives_control_restart_from_older_snapshot():
    follower, state = Bench(), new_state()
    do_open(state)
    older = encode_state(state)
    do_open(state, run=1)
    do_fence(state)
    follower.snapshot(3, state)
    follower.on_message(pb.ToData(snapshot=pb.ControlSnapshot(index=1, state=older)))
    assert follower.heard[-1] is None
    assert follower.state.sessions[1].active_runs[0].is_fenced
    # Commands that control applies again are already known. Only later commands are new.
    follower.applied(2, opening(run=1))
    follower.applied(3, opening("wrong", incarnation=5))
    assert follower.index == 3
    follower.applied(4, opening("b", incarnation=1))
    assert [one.name for one in follower.state.sessions.values()] == ["a", "b"]


def test_snapshot_of_another_cluster_replaces_newer_state():
    follower, state = Bench(), new_state()
    do_open(state)
    follower.snapshot(5, state)
    other = SequencerState(bytes(reversed(CLUSTER)))
    follower.snapshot(1, other)
    assert (follower.index, follower.state.cluster) == (1, other.cluster)


def test_applied_merge_instruction_is_forwarded_as_ranges_merged():
    follower, state = Bench(), new_state()
    do_open(state)
    follower.snapshot(1, state)
    follower.applied(2, _merge(state))
    assert isinstance(follower.heard[-1], RangesMerged)


def _merge(state: SequencerState) -> object:
    return merging(state, piece())


@pytest.mark.parametrize(("leader", "is_leading"), [("", False), ("n1", True), ("n2", False)])
def test_node_leads_only_if_control_names_it_as_leader(leader: str, is_leading: bool):
    follower = Bench()
    assert not follower.is_leading
    follower.on_message(pb.ToData(standing=pb.Standing(node="n1", leader=leader)))
    assert follower.is_leading is is_leading

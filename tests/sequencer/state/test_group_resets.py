"""Resets and deletions of a group's positions: all at once, without members, only within the log."""

from __future__ import annotations

import pytest
from sequencer_core import do_merge, do_open, must, new_state, piece, refusal

from sequencer.state.apply import apply
from sequencer.state.apply_result import GroupReset, HoldMoved
from sequencer.state.commands import HoldPosition, ResetGroup
from sequencer.state.state import LeaseState, SequencerState

NAMES = ("workers~0123456789abcdef.p000", "workers~0123456789abcdef.p001")


def with_group() -> SequencerState:
    """Return a state with 10 messages, a group at 3 and 7, and a subscriber with a name that starts like the
    group's.
    """
    state = new_state()
    do_open(state)
    do_merge(state, piece())
    for name, position in zip((*NAMES, "workers", "workers2~x"), (3, 7, 5, 6), strict=True):
        must(HoldMoved, apply(state, HoldPosition(name, position, 100)))
    return state


def positions(state: SequencerState) -> dict[str, int]:
    return {name: hold.position for name, hold in state.holds.items()}


@pytest.mark.parametrize("position", [0, 5, 10])
def test_group_reset_moves_all_its_positions_and_no_others(position: int) -> None:
    state = with_group()
    assert must(GroupReset, apply(state, ResetGroup("workers", position, 50))) == GroupReset(NAMES, position)
    assert positions(state) == {**dict.fromkeys(NAMES, position), "workers": 5, "workers2~x": 6}
    assert {state.holds[name].at_ns for name in NAMES} == {100}, "time does not go back"


def test_group_deletion_removes_all_its_positions_and_no_others() -> None:
    state = with_group()
    must(GroupReset, apply(state, ResetGroup("workers", 0, 50, is_deletion=True)))
    assert positions(state) == {"workers": 5, "workers2~x": 6}
    assert "no positions" in refusal(state, ResetGroup("workers", 0, 50, is_deletion=True)).why


@pytest.mark.parametrize("is_deletion", [False, True])
@pytest.mark.parametrize("lease", ["start/m1", "host/m1", "queue/p000", "create"])
def test_group_reset_is_refused_while_member_holds_any_lease(lease: str, is_deletion: bool) -> None:
    state = with_group()
    before = positions(state)
    state.leases[f"workers/{lease}"] = LeaseState("m1", 1, 1000, bytes(16), 0)
    command = ResetGroup("workers", 0, 50, is_deletion=is_deletion)
    assert "has members: m1" in refusal(state, command).why
    assert positions(state) == before
    state.leases = {"workers2/host/m2": LeaseState("m2", 1, 1000, bytes(16), 0)}
    must(GroupReset, apply(state, command))


def test_group_reset_beyond_log_end_is_refused() -> None:
    state = with_group()
    assert "beyond" in refusal(state, ResetGroup("workers", 11, 50)).why

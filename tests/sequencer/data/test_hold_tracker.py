"""Holds of named subscribers: when a node proposes, repeats, confirms or drops them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from batches import CLUSTER
from module_shadow import shadow

from sequencer.data import hold_tracker
from sequencer.data.hold_tracker import AGAIN_S, REFUSED_S, HoldTracker, RequestedHolds
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected
from sequencer.state.commands import Command, HoldPosition, ReleaseHold
from sequencer.state.state import SequencerState
from sequencer.state.state import SubscriberHold as Held


def held(position: int) -> dict[str, Held]:
    return {"sub": Held(position, 0)}


@pytest.fixture
def wishes() -> RequestedHolds:
    wishes = RequestedHolds()
    wishes.record("sub", 10)
    return wishes


def test_only_new_or_advanced_holds_are_proposed(wishes: RequestedHolds) -> None:
    assert wishes.due({}, 100, 1.0) == [("sub", 10)]
    assert len(wishes) == 1
    assert wishes.due(held(10), 100, 50.0) == []
    assert len(wishes) == 0
    wishes.record("sub", 10)
    assert wishes.due(held(10), 100, 51.0) == []
    wishes.record("sub", 11)
    assert wishes.due(held(10), 100, 52.0) == [("sub", 11)]


def test_lower_hold_position_is_not_proposed(wishes: RequestedHolds) -> None:
    wishes.record("sub", 5)
    assert wishes.due({}, 100, 1.0) == [("sub", 10)]
    assert wishes.due(held(10), 100, 50.0) == []
    wishes.record("sub", 5)
    assert wishes.due(held(10), 100, 51.0) == []
    assert len(wishes) == 0


def test_hold_proposals_per_name_are_rate_limited(wishes: RequestedHolds) -> None:
    proposed = []
    for tenths in range(200):
        wishes.record("sub", 10 + tenths)
        state = held(proposed[-1][1][0][1]) if proposed else {}
        if found := wishes.due(state, 1000, 1 + tenths / 10):
            proposed.append((tenths, found))
    assert [tenths for tenths, _ in proposed] == [0, 50, 100, 150]
    assert [found for _, found in proposed] == [[("sub", 10 + tenths)] for tenths in (0, 50, 100, 150)]


def test_lost_hold_proposal_is_repeated(wishes: RequestedHolds) -> None:
    found = [wishes.due({}, 100, second) for second in range(1, 12)]
    assert found == [[("sub", 10)], *[[]] * 4, [("sub", 10)], *[[]] * 4, [("sub", 10)]]


def test_proposed_hold_is_limited_to_known_log_end(wishes: RequestedHolds) -> None:
    assert wishes.due({}, 4, 1.0) == [("sub", 4)]
    assert wishes.due(held(4), 4, 10.0) == []
    assert wishes.due(held(4), 8, 20.0) == [("sub", 8)]
    assert wishes.due(held(8), 90, 30.0) == [("sub", 10)]


def test_empty_log_can_be_held_from_position_0() -> None:
    wishes = RequestedHolds()
    wishes.record("sub", 0)
    assert wishes.due({}, 0, 1.0) == [("sub", 0)]


def test_record_returns_false_for_name_over_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_tracker, "NAMES_MAX", 2)
    wishes = RequestedHolds()
    assert [wishes.record(name, 1) for name in ("a", "b", "c", "b")] == [True, True, False, True]


class Node:
    """The hold tracker of a node. The test applies commands to its state."""

    def __init__(self, position: int = 100) -> None:
        self.state: SequencerState | None = SequencerState(CLUSTER, position=position)
        self.proposed: list[Command] = []
        self.follower: Any = SimpleNamespace(state=self.state, standing=SimpleNamespace(leader="n1"))
        self.told: list[tuple[str, str]] = []
        self.holding = HoldTracker(
            self.follower, self.proposed.append, lambda name, why: self.told.append((name, why))
        )

    def propose(self, now_s: float) -> list[tuple[str, int]]:
        self.proposed.clear()
        self.holding.propose_due(now_s)
        return [(one.name, one.position) for one in self.proposed if isinstance(one, HoldPosition)]

    def apply(self, command: Command) -> None:
        assert self.state is not None
        self.holding.on_applied(command, apply(self.state, command))


def test_released_hold_is_proposed_again_only_after_next_acknowledgment() -> None:
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    assert node.propose(1.0) == [("sub", 10)]
    for command in node.proposed[:]:
        node.apply(command)
    node.apply(ReleaseHold("sub"))
    assert node.propose(50.0) == []
    node.holding.on_acknowledged("sub", 10)
    assert node.propose(51.0) == [("sub", 10)]


def test_rejected_hold_is_logged_and_proposed_again_after_delay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    shadow(monkeypatch, hold_tracker, "time", monotonic=lambda: 2.0)
    for name in ("sub", "other"):
        node.holding.on_acknowledged(name, 10)
    node.propose(1.0)
    node.apply(HoldPosition("other", 20, 1))
    for name in ("sub", "other", "stranger"):
        node.holding.on_applied(HoldPosition(name, 10, 1), CommandRejected("there are too many"))
    assert caplog.text.count("hold_refused") == 1
    assert node.told == [("sub", "there are too many")]
    assert node.holding.refused == {"sub": "there are too many"}
    assert node.propose(1.0 + AGAIN_S) == []
    assert node.propose(1.9 + REFUSED_S) == []
    assert node.propose(2.0 + REFUSED_S) == [("sub", 10)]


@pytest.mark.parametrize("how", ["held", "released", "asked for no more"])
def test_hold_rejection_is_cleared_if_hold_was_applied_or_is_no_longer_requested(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, now_s = Node(), 2.0
    shadow(monkeypatch, hold_tracker, "time", monotonic=lambda: now_s)
    node.holding.on_acknowledged("sub", 10)
    node.holding.on_applied(HoldPosition("sub", 10, 1), CommandRejected("there are too many"))
    assert node.holding.refused
    match how:
        case "held":
            node.apply(HoldPosition("sub", 10, 1))
        case "released":
            node.apply(HoldPosition("sub", 10, 1))
            node.apply(ReleaseHold("sub"))
        case _:
            now_s += 2 * REFUSED_S
    assert node.holding.refused == {}


def test_hold_of_name_over_limit_is_reported_as_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_tracker, "NAMES_MAX", 1)
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    node.holding.on_acknowledged("another", 10)
    assert [name for name, _ in node.told] == [*node.holding.refused] == ["another"]


def test_first_hold_is_confirmed_after_it_is_applied() -> None:
    async def run() -> None:
        node = Node()
        node.holding.on_acknowledged("sub", 10)
        confirmed = [asyncio.ensure_future(node.holding.confirm("sub")) for _ in range(2)]
        while not node.proposed:
            await asyncio.sleep(0)
        assert not any(one.done() for one in confirmed)
        node.apply(HoldPosition("other", 10, 1))
        await asyncio.sleep(0)
        assert not any(one.done() for one in confirmed)
        node.apply(HoldPosition("sub", 10, 1))
        await asyncio.gather(*confirmed)
        await node.holding.confirm("sub")
        assert len(node.proposed) == 1, "it was there already"

    asyncio.run(run())


def test_confirmation_of_first_hold_ends_if_hold_is_rejected() -> None:
    async def run() -> None:
        node = Node()
        node.holding.on_acknowledged("sub", 10)
        confirmed = asyncio.ensure_future(node.holding.confirm("sub"))
        while not node.proposed:
            await asyncio.sleep(0)
        node.holding.on_applied(HoldPosition("sub", 10, 1), CommandRejected("there are too many"))
        await confirmed
        assert node.told == [("sub", "there are too many")]

    asyncio.run(run())


def test_confirmation_of_first_hold_ends_with_warning_without_leader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hold_tracker, "CONFIRM_S", 0.01)
    node = Node()
    node.follower.standing.leader = ""
    node.holding.on_acknowledged("sub", 10)
    asyncio.run(node.holding.confirm("sub"))
    assert "hold_not_confirmed name=sub" in caplog.text
    assert node.proposed == []


def test_hold_is_not_proposed_without_leader() -> None:
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    node.follower.standing.leader = ""
    assert node.propose(1.0) == []
    node.follower.standing.leader = "n2"
    assert node.propose(1.1) == [("sub", 10)]


def test_hold_is_not_proposed_before_node_joins_cluster() -> None:
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    for state in (None, SequencerState(bytes(16))):
        node.follower.state = state
        assert node.propose(1.0) == []
    node.follower.state = node.state
    assert node.propose(1.0) == [("sub", 10)]

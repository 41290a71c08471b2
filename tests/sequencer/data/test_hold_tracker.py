"""Holds of named subscribers: what is proposed, how often, and when no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from batches import CLUSTER
from shadowing import shadow

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


def test_what_is_new_or_has_advanced_is_proposed_and_nothing_else(wishes: RequestedHolds) -> None:
    assert wishes.due({}, 100, 1.0) == [("sub", 10)]
    assert len(wishes) == 1
    assert wishes.due(held(10), 100, 50.0) == []
    assert len(wishes) == 0
    wishes.record("sub", 10)
    assert wishes.due(held(10), 100, 51.0) == []
    wishes.record("sub", 11)
    assert wishes.due(held(10), 100, 52.0) == [("sub", 11)]


def test_what_goes_back_is_not_proposed(wishes: RequestedHolds) -> None:
    wishes.record("sub", 5)
    assert wishes.due({}, 100, 1.0) == [("sub", 10)]
    assert wishes.due(held(10), 100, 50.0) == []
    wishes.record("sub", 5)
    assert wishes.due(held(10), 100, 51.0) == []
    assert len(wishes) == 0


def test_a_name_is_proposed_at_most_so_often_however_often_it_acknowledges(wishes: RequestedHolds) -> None:
    proposed = []
    for tenths in range(200):
        wishes.record("sub", 10 + tenths)
        state = held(proposed[-1][1][0][1]) if proposed else {}
        if found := wishes.due(state, 1000, 1 + tenths / 10):
            proposed.append((tenths, found))
    assert [tenths for tenths, _ in proposed] == [0, 50, 100, 150]
    assert [found for _, found in proposed] == [[("sub", 10 + tenths)] for tenths in (0, 50, 100, 150)]


def test_what_was_lost_on_the_way_is_proposed_again(wishes: RequestedHolds) -> None:
    found = [wishes.due({}, 100, second) for second in range(1, 12)]
    assert found == [[("sub", 10)], *[[]] * 4, [("sub", 10)], *[[]] * 4, [("sub", 10)]]


def test_nothing_is_held_beyond_the_end_of_the_log_as_it_is_known(wishes: RequestedHolds) -> None:
    assert wishes.due({}, 4, 1.0) == [("sub", 4)]
    assert wishes.due(held(4), 4, 10.0) == []
    assert wishes.due(held(4), 8, 20.0) == [("sub", 8)]
    assert wishes.due(held(8), 90, 30.0) == [("sub", 10)]


def test_a_log_without_messages_can_be_held_from_its_start() -> None:
    wishes = RequestedHolds()
    wishes.record("sub", 0)
    assert wishes.due({}, 0, 1.0) == [("sub", 0)]


def test_of_more_names_than_there_can_be_some_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_tracker, "NAMES_MAX", 2)
    wishes = RequestedHolds()
    assert [wishes.record(name, 1) for name in ("a", "b", "c", "b")] == [True, True, False, True]


class Node:
    """A node's holding, over a state that a test applies to."""

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


def test_a_hold_that_was_released_comes_back_only_when_the_subscriber_says_something() -> None:
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    assert node.propose(1.0) == [("sub", 10)]
    for command in node.proposed[:]:
        node.apply(command)
    node.apply(ReleaseHold("sub"))
    assert node.propose(50.0) == []
    node.holding.on_acknowledged("sub", 10)
    assert node.propose(51.0) == [("sub", 10)]


def test_a_hold_that_is_refused_is_logged_and_waits(
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
def test_a_refusal_is_over_when_the_hold_is_there_or_wanted_no_more(
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


def test_one_more_than_can_be_noted_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_tracker, "NAMES_MAX", 1)
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    node.holding.on_acknowledged("another", 10)
    assert [name for name, _ in node.told] == [*node.holding.refused] == ["another"]


def test_a_first_hold_is_confirmed_once_it_is_in_the_state() -> None:
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


def test_a_first_hold_that_is_refused_ends_the_wait_for_it() -> None:
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


def test_without_a_leader_the_wait_for_a_first_hold_ends_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hold_tracker, "CONFIRM_S", 0.01)
    node = Node()
    node.follower.standing.leader = ""
    node.holding.on_acknowledged("sub", 10)
    asyncio.run(node.holding.confirm("sub"))
    assert "hold_not_confirmed name=sub" in caplog.text
    assert node.proposed == []


def test_nothing_is_proposed_to_nobody() -> None:
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    node.follower.standing.leader = ""
    assert node.propose(1.0) == []
    node.follower.standing.leader = "n2"
    assert node.propose(1.1) == [("sub", 10)]


def test_nothing_is_proposed_before_the_node_belongs_to_a_cluster() -> None:
    node = Node()
    node.holding.on_acknowledged("sub", 10)
    for state in (None, SequencerState(bytes(16))):
        node.follower.state = state
        assert node.propose(1.0) == []
    node.follower.state = node.state
    assert node.propose(1.0) == [("sub", 10)]

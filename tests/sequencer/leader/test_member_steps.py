"""Member changes: each step, and a model check that no order of events loses acknowledged bytes.

`Voter` models the knowledge about bytes that were acknowledged and are not merged: which voters have them on
their disks, and which voters have whole disks. The product's code makes the decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, combinations_with_replacement
from typing import NamedTuple

import pytest
from member_model import MemberWorld
from sequencer_core import do_open, must, new_state

from sequencer.leader.member_steps import (
    CommittedMembers,
    MemberStep,
    MemberSteps,
    TransferLeadership,
    _Spread,
)
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.leader.session_close import DiskRestoration
from sequencer.raft.model.members import AddLearner, Members, PromoteLearner, RaftMember, RemoveMember
from sequencer.state.apply import apply
from sequencer.state.apply_result import DiskJoined, MembersRequested, MembersSettled
from sequencer.state.commands import JoinDisk
from sequencer.state.feature_level import MEMBER_CHANGES
from sequencer.state.operations.membership import CancelMembers, RequestMembers, SettleMembers
from sequencer.state.state import NodeDisk, SequencerState

KEY = SegmentKey(1, 0, 0)
HELD = (BatchBoundary(64, 0, 64), BatchBoundary(128, 10, 128))
NS = 10**9


def stage(*names: str, **disks: NodeDisk) -> SequencerState:
    """A state with these voters and their whole disks, an open session, and one instruction that all voters
    have merged.
    """
    state = new_state()
    state.feature_level, state.instruction = MEMBER_CHANGES, 1
    do_open(state, "s0")
    for at, name in enumerate(names):
        state.joins += 1
        state.disks[name] = disks.get(name, NodeDisk(name.encode().ljust(16), at + 1, is_whole=True))
    return state


def tracking(voters: int, *holders: str) -> ReplicationTracker:
    tracker = ReplicationTracker(voters)
    for name in holders:
        tracker.on_boundaries(name, KEY, HELD)
    return tracker


def members(*voters: str, learners: tuple[str, ...] = ()) -> dict[str, RaftMember]:
    return {name: RaftMember(f"{name}:1", name not in learners) for name in (*voters, *learners)}


def steps_of(
    state: SequencerState, listed: Members, own: str, tracker: ReplicationTracker, version: int = 0
) -> MemberSteps:
    return MemberSteps(state, CommittedMembers(own, listed, version), tracker)


def next_step(steps: MemberSteps, state: SequencerState, *heard: str, now_ns: int = 1) -> MemberStep | None:
    for name in heard:
        steps.on_merged(name, state.instruction)
    return steps.next_step(dict.fromkeys(heard, state.joins), now_ns)


# Single steps


def test_node_is_added_as_learner_then_promoted_then_request_is_settled() -> None:
    state = stage("a", "b", "c")
    assert must(MembersRequested, apply(state, RequestMembers("d", "d:1"))).number == 1
    steps = steps_of(state, members("a", "b", "c"), "a", tracking(3))
    assert next_step(steps, state, "a", "b", "c") == AddLearner("d", "d:1")
    steps = steps_of(state, members("a", "b", "c", learners=("d",)), "a", tracking(3))
    assert next_step(steps, state, "a", "b", "c") is None
    assert steps.waits_for == "d is not connected: start it with its configuration"
    assert next_step(steps, state, "a", "b", "c", "d") == PromoteLearner("d")
    steps = steps_of(state, members("a", "b", "c", "d"), "a", tracking(4))
    assert next_step(steps, state, "a", "b", "c") is None, "its disk has not joined"
    must(DiskJoined, apply(state, JoinDisk("d", b"d" * 16)))
    assert next_step(steps, state, "a", "b", "c", "d") == SettleMembers(1)
    assert must(MembersSettled, apply(state, SettleMembers(1))).why == ""
    assert (state.member_request, state.settled_members) == (None, (1, ""))


def test_learner_is_promoted_only_after_it_catches_up() -> None:
    state = stage("a")
    apply(state, RequestMembers("b", "b:1"))
    steps = steps_of(state, members("a", learners=("b",)), "a", tracking(1))
    steps.on_merged("b", 0)
    assert steps.next_step({"a": 1}, NS) is None
    assert steps.waits_for == "b copies the merged log: instruction 0 of 1"
    steps.on_merged("b", 1)
    assert steps.next_step({"a": 1}, 60 * NS) is None, "it took a minute: there is a minute's worth more now"
    assert steps.next_step({"a": 1}, 61 * NS) == PromoteLearner("b")


def test_leader_to_be_removed_transfers_leadership_first() -> None:
    state = stage("a", "b", "c")
    apply(state, RequestMembers(removes="a"))
    for own, step in (("a", TransferLeadership()), ("b", RemoveMember("a"))):
        assert next_step(steps_of(state, members("a", "b", "c"), own, tracking(3)), state, "a", "b") == step
    steps = steps_of(state, members("b", "c"), "b", tracking(2))
    assert next_step(steps, state, "b", "c") == SettleMembers(1)
    apply(state, SettleMembers(1))
    assert sorted(state.disks) == ["b", "c"], "if it is added again, its disk must join again"


def test_removal_of_only_voter_is_rejected() -> None:
    state = stage("a")
    apply(state, RequestMembers(removes="a"))
    found = next_step(steps_of(state, members("a", learners=("b",)), "a", tracking(1)), state, "a")
    assert found == SettleMembers(1, "a is the only voter: add another node first")
    apply(state, found)
    assert sorted(state.disks) == ["a"], "it was not removed"


def test_dead_voter_is_removed_only_after_other_voters_hold_its_session_bytes() -> None:
    state = stage("a", "b", "c")
    apply(state, RequestMembers("d", "d:1", removes="c"))
    steps = steps_of(state, members("a", "b", "c", learners=("d",)), "a", tracking(3))
    assert next_step(steps, state, "a", "b", "d") == PromoteLearner("d")
    must(DiskJoined, apply(state, JoinDisk("d", b"d" * 16)))
    steps = steps_of(state, members("a", "b", "c", "d"), "a", tracking(4, "a"))
    assert next_step(steps, state, "a", "b", "d") is None, "c and a may be those who hold it"
    assert steps.waits_for == "b, c, d must report, and get what other voters have of the sessions"
    steps = steps_of(state, members("a", "b", "c", "d"), "a", tracking(4, "a", "b", "d"))
    assert next_step(steps, state, "a", "b", "d") == RemoveMember("c")


@pytest.mark.parametrize("is_consumed", [False, True])
def test_removal_waits_until_merged_bytes_are_durable_on_majority(is_consumed: bool) -> None:
    state = stage("a", "b", "c", "d")
    apply(state, RequestMembers(removes="d"))
    steps = steps_of(state, members("a", "b", "c", "d"), "a", tracking(4, "a", "b"))
    assert next_step(steps, state, *"abcd") is None
    if is_consumed:
        state.sessions.clear()  # The session is merged completely and forgotten.
        state.instruction = 2
        assert steps.next_step(dict.fromkeys("abcd", state.joins), 1) is None
        assert next_step(steps, state, *"abc") == RemoveMember("d")


def test_member_changes_need_feature_level_and_run_one_at_a_time() -> None:
    state = stage("a", "b", "c")
    state.feature_level = MEMBER_CHANGES - 1
    assert "feature level" in apply(state, RequestMembers(removes="c")).why  # type: ignore[union-attr]
    state.feature_level = MEMBER_CHANGES
    apply(state, RequestMembers("d", "d:1", "c"))
    found = apply(state, RequestMembers(removes="a"))
    assert found.why == "another change of members is being carried out: replace c by d"  # type: ignore[union-attr]
    assert must(MembersSettled, apply(state, CancelMembers())).why == "an operator cancelled it"
    assert "is not being carried out" in apply(state, SettleMembers(1)).why  # type: ignore[union-attr]
    assert sorted(state.disks) == ["a", "b", "c"]
    assert "no change" in apply(state, CancelMembers()).why  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong", [("", "", ""), ("a", "a:1", "a"), ("a", "", ""), ("", "a:1", "b"), ("A B", "a:1", "")]
)
def test_invalid_member_request_raises_value_error(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match=r"a change of members|not a valid name"):
        RequestMembers(*wrong)


@pytest.mark.parametrize(
    ("voters", "knowing", "is_late"),
    [
        ("abc", "a", True),
        ("abc", "ab", False),
        ("abcd", "ab", True),
        ("abcd", "abd", False),
        ("ab", "a", True),
    ],
)
def test_member_change_waits_until_majority_uses_latest_member_list(
    voters: str, knowing: str, is_late: bool
) -> None:
    state = stage(*voters)
    apply(state, RequestMembers("x", "x:1"))
    steps = steps_of(state, members(*voters, learners=("x",)), "a", tracking(len(voters)), version=9)
    for name in voters:
        steps.on_reported(name, 1, 9 if name in knowing else 8)
    found = next_step(steps, state, *voters, "x")
    assert (found is None) == is_late
    late = ", ".join(name for name in voters if name not in knowing)
    assert steps.waits_for == (f"{late} must learn the last change of the members" if is_late else "")


def test_removal_waits_if_voter_with_older_list_may_hold_unreported_bytes() -> None:
    """Before, the voters were b, c and d, so c and d were a majority. The last report of d is from that
    time.
    """
    state = stage(*"abcd")
    apply(state, RequestMembers(removes="c"))
    steps = steps_of(state, members(*"abcd"), "a", tracking(4, "c"), version=9)
    for name in "abcd":
        steps.on_reported(name, 1, 8 if name == "d" else 9)
    assert next_step(steps, state, *"abcd") is None
    assert steps.waits_for == "a, b, d must report, and get what other voters have of the sessions"


# All orders of steps


class Voter(NamedTuple):
    holds: bool
    """Whether its disk has the bytes."""
    has_joined: bool = True
    is_whole: bool = True


State = tuple[Voter, ...]


def majority(voters: State) -> int:
    return len(voters) // 2 + 1


def is_known(voters: State) -> bool:
    """Whether each majority of voters with whole disks includes a voter that has the bytes."""
    return sum(one.is_whole and not one.holds for one in voters) < majority(voters)


def beginnings(voters_max: int) -> Iterator[State]:
    """The states just after the bytes were acknowledged."""
    disks = Voter(True), Voter(False), Voter(True, is_whole=False), Voter(False, is_whole=False)
    for count in range(1, voters_max + 1):
        for voters in combinations_with_replacement(disks, count):
            broken = sum(not one.is_whole for one in voters)
            if sum(one.holds for one in voters) >= majority(voters) and broken <= count - majority(voters):
                yield voters


def followers(voters: State, voters_max: int) -> Iterator[State]:
    """Each state to which one event leads."""
    for at, one in enumerate(voters):
        without = voters[:at] + voters[at + 1 :]
        if one.has_joined and not one.holds and any(other.holds for other in without):
            yield (*without, one._replace(holds=True))
        if not one.has_joined:
            yield (*without, joined(voters))
        broken = sum(not other.is_whole for other in without) + 1
        if one.has_joined and broken <= len(voters) - majority(voters):
            yield (*without, Voter(False, is_whole=False))
        heard_sets = [heard for heard in subsets(voters) if len(heard) >= majority(voters)]
        if (
            one.has_joined
            and not one.is_whole
            and any(at in heard and is_restored(voters, at, heard) for heard in heard_sets)
        ):
            yield (*without, one._replace(is_whole=True))
        if len(voters) > 1 and any(may_remove(voters, at, heard) for heard in heard_sets):
            yield without
    if len(voters) < voters_max and any(
        may_add(voters, heard) for heard in subsets(voters) if len(heard) >= majority(voters)
    ):
        yield (*voters, Voter(False, has_joined=False, is_whole=False))


def subsets(voters: State) -> list[frozenset[int]]:
    indices = [at for at, one in enumerate(voters) if one.has_joined]
    return [
        frozenset(one)
        for one in chain.from_iterable(combinations(indices, n) for n in range(len(voters) + 1))
    ]


def made(voters: State) -> tuple[SequencerState, list[str]]:
    names = [f"n{at}" for at in range(len(voters))]
    state = stage(*names)
    for name, one in zip(names, voters, strict=True):
        if one.has_joined:
            state.disks[name] = state.disks[name]._replace(is_whole=one.is_whole)
        else:
            del state.disks[name]
    return state, names


def joined(voters: State) -> Voter:
    state, _ = made(voters)
    apply(state, JoinDisk("new", bytes(16)))
    disk = state.disks["new"]
    return Voter(False, is_whole=disk.is_whole)


def is_restored(voters: State, at: int, heard: frozenset[int]) -> bool:
    state, names = made(voters)
    tracker = tracking(len(voters), *(names[one] for one in heard if voters[one].holds))
    told = {names[one]: state.joins for one in heard}
    found = DiskRestoration(state, tracker).plan(told, dict.fromkeys(told, state.instruction))
    return any(one.node == names[at] for one in found)


def decided(
    voters: State, heard: frozenset[int], request: RequestMembers, learners: tuple[str, ...] = ()
) -> MemberStep | None:
    state, names = made(voters)
    apply(state, request)
    tracker = tracking(len(voters), *(names[one] for one in heard if voters[one].holds))
    own = next((names[one] for one in sorted(heard) if names[one] != request.removes), "")
    steps = steps_of(state, members(*names, learners=learners), own, tracker)
    return next_step(steps, state, *(names[one] for one in heard), *learners)


def may_add(voters: State, heard: frozenset[int]) -> bool:
    return decided(voters, heard, RequestMembers("new", "new:1"), ("new",)) == PromoteLearner("new")


def may_remove(voters: State, at: int, heard: frozenset[int]) -> bool:
    left = len(voters) - 1
    return len(heard - {at}) > left // 2 and decided(
        voters, heard, RequestMembers(removes=f"n{at}")
    ) == RemoveMember(f"n{at}")


def forgotten(voters_max: int) -> tuple[list[State], int]:
    """Return the states on a path to one in which acknowledged bytes may be forgotten, and the number of
    visited states.
    """
    before: dict[State, State | None] = {tuple(sorted(one)): None for one in beginnings(voters_max)}
    left = list(before)
    while left:
        state = left.pop()
        if not is_known(state):
            path = [state]
            while (earlier := before[path[-1]]) is not None:
                path.append(earlier)
            return path[::-1], len(before)
        for follower in map(tuple, map(sorted, followers(state, voters_max))):
            if follower not in before:
                before[follower] = state
                left.append(follower)
    return [], len(before)


@pytest.mark.parametrize(("voters_max", "at_least"), [(5, 45), pytest.param(7, 130, marks=pytest.mark.slow)])
def test_acknowledged_bytes_survive_every_order_of_changes_lost_disks_and_copies(
    voters_max: int, at_least: int
) -> None:
    path, states = forgotten(voters_max)
    assert not path
    assert states >= at_least


def _always_whole(_self: MemberSteps, _name: str) -> bool:
    return True


def _all_heard(
    self: _Spread, state: object, tracker: object, voters: frozenset[str], heard: object, last: int
) -> None:
    self.heard = heard  # type: ignore[assignment]
    self._state, self._tracker, self._voters, self._last = state, tracker, voters, last  # type: ignore[assignment]
    self._holders = len(voters) // 2
    self._ends = dict(self._held_by(self._holders))


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (_Spread, "missing", lambda _self, _merged: []),
        (_Spread, "__init__", _all_heard),
        (MemberSteps, "_is_whole", _always_whole),
    ],
    ids=[
        "nothing is spread",
        "who did not report holds nothing",
        "no disk must be whole",
    ],
)
def test_model_check_finds_loss_for_each_omitted_rule(
    where: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, wrong)
    path, _ = forgotten(5)
    assert path


# Simulations of a small stream with member changes and failures


def lived(seed: int, steps: int) -> MemberWorld:
    world = MemberWorld(seed)
    try:
        for _ in range(steps):
            world.step()
        world.heal()
        world.check_whole()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {steps} steps: {error}") from error
    return world


@pytest.mark.slow
def test_acknowledged_messages_are_merged_once_while_members_change_and_nodes_fail() -> None:
    """Each number of voters from one to seven must also occur. Otherwise the simulation would cover too
    little.
    """
    worlds = [lived(seed, 1500) for seed in range(12)]
    assert {count for world in worlds for count in world.voters_seen} == {*range(1, 8)}
    assert all(world.state.member_requests > 1 for world in worlds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_acknowledged_messages_are_merged_once_in_long_simulations_of_member_changes(seed: int) -> None:
    for part in range(5):
        lived(1000 + 100 * seed + part, 3000)

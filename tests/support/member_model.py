"""A small model of a stream under faults, in which an operator adds, removes and replaces nodes.

Raft is reduced to one line here: its member list changes at once, by one member a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stream_model import NOTHING, InFlight, Node, World

from sequencer.leader.member_steps import CommittedMembers, MemberStep, MemberSteps, TransferLeadership
from sequencer.merged.session_retention import SessionRetention
from sequencer.raft.model.members import AddLearner, PromoteLearner, RaftMember, RemoveMember
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Command, JoinDisk
from sequencer.state.feature_level import MEMBER_CHANGES
from sequencer.state.operations.membership import CancelMembers, RequestMembers, SettleMembers

VOTERS_MAX: Final = 7


class MemberWorld(World):
    """A world whose members change. `voters_seen`: the numbers of voters so far, in order."""

    def __init__(self, seed: int, *, is_harsh: bool | None = None) -> None:
        self.learners: dict[str, Node] = {}
        self.leader = "n0"
        self.next_name = 7
        super().__init__(seed, is_harsh=is_harsh)
        self.is_slow = self.rng.random() < 0.7
        self.voters_seen = [len(self.nodes)]
        for node in self.nodes:
            node.retention = SessionRetention(node.name, self._names())

    def _names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def _lead(self) -> None:
        super()._lead()
        members = {node.name: RaftMember(f"{node.name}:1", votes=True) for node in self.nodes}
        members |= {name: RaftMember(f"{name}:1", votes=False) for name in self.learners}
        self.steps = MemberSteps(self.state, CommittedMembers(self.leader, members), self.tracker)

    def change_leader(self) -> None:
        self.leader = self.rng.choice(self._names())
        super().change_leader()

    def change_members(self) -> None:
        if self.state.feature_level < MEMBER_CHANGES:
            if len(self.state.disks) == len(self.nodes):
                self.state.feature_level = MEMBER_CHANGES
            return
        if self.state.member_request is None:
            self._request()
        elif self.rng.random() < 0.02:
            self._submit(CancelMembers())
        else:
            self._step()

    def _request(self) -> None:
        removes = self.rng.choice([*self._names(), *self.learners])
        kind = self.rng.choice(["add", "remove", "replace"])
        if len(self.nodes) >= VOTERS_MAX:
            kind = "remove"
        if kind == "remove":
            self._submit(RequestMembers(removes=removes))
            return
        adds = f"n{self.next_name}"
        self.next_name += 1
        self._submit(RequestMembers(adds, f"{adds}:1", removes if kind == "replace" else ""))

    def _submit(self, command: Command) -> None:
        data = encode_command(command)
        if not any(isinstance(decode_command(one.data), type(command)) for one in self.queue):
            self.queue.append(InFlight(data, is_planned=False))

    def _step(self) -> None:
        for name, learner in self.learners.items():
            if self.rng.random() < 0.5:
                learner.merged = learner.durable = self.state.instruction
            if self.rng.random() < 0.8:
                self.steps.on_merged(name, learner.durable)
        for node in self.nodes:
            if node.is_up and node.name in self.merged:
                self.steps.on_merged(node.name, self.merged[node.name])
        if self.is_dirty:
            return
        step = self.steps.next_step(self.told, self.now_ns, self.speculation.instruction)
        if step is not None:
            self._carry_out(step)

    def _carry_out(self, step: MemberStep) -> None:
        match step:
            case SettleMembers():
                self._submit(step)
            case TransferLeadership():
                self.leader = self.rng.choice([name for name in self._names() if name != self.leader])
                self.change_leader_to()
            case AddLearner(name):
                self.learners[name] = Node(name)
                self._relist()
            case PromoteLearner(name):
                node = self.learners.pop(name)
                node.retention = SessionRetention(name, self._names())
                node.applied = 0
                self.nodes.append(node)
                self._relist()
                self._ask_to_join(node)
            case RemoveMember(name):
                left = [node for node in self.nodes if node.name != name]
                if sum(node.is_up for node in left) <= len(left) // 2:
                    return  # Raft refuses it: no majority would be left.
                self.learners.pop(name, None)
                self.nodes[:] = left
                self._relist()

    def change_leader_to(self) -> None:
        leader = self.leader
        super().change_leader()
        self.leader = leader
        self.steps = MemberSteps(self.state, CommittedMembers(leader, self.steps._members), self.tracker)

    def _relist(self) -> None:
        """Commit another member list. The leader plans again, and its earlier plans may still commit."""
        if self.leader not in self._names():
            self.leader = self.nodes[0].name
        self.is_dirty = bool(self.queue)
        self._lead()
        for directory in self.directories:
            directory.reach = frozenset(
                self.rng.sample(self._names(), self.rng.randint(self.majority, len(self.nodes)))
            )
        if self.voters_seen[-1] != len(self.nodes):
            self.voters_seen.append(len(self.nodes))
        self._check_remembered()

    def _check_remembered(self) -> None:
        """Assert that each majority of whole disks has a holder of the acknowledged, not yet merged data."""
        whole = [node for node in self.nodes if node.name not in self._broken()]
        for place, end in self.acknowledged.items():
            if end > NOTHING and not self._is_closed(place) and not self._is_merged(place, end):
                without = sum(node.holds.get(place, NOTHING) < end for node in whole)
                assert without < self.majority, f"{end} of {place} would be forgotten by {self._names()}"

    def tell_merged(self) -> None:
        for node in self.nodes:
            if node.is_up and self.rng.random() < 0.3:
                node.retention.on_voters(self._names())
        super().tell_merged()

    def _commit(self, command: Command, *, is_planned: bool) -> None:
        if isinstance(command, JoinDisk) and command.node not in self._names():
            return  # Raft drops a proposal if its node is not a member.
        super()._commit(command, is_planned=is_planned)

    def heal(self) -> None:
        """Heal, and also carry out the last request."""
        for _ in range(200):
            super().heal()
            if self.state.member_request is None:
                return
            self._step()
        raise AssertionError(f"{self.state.member_request} is never carried out: {self.steps.waits_for}")

    def actions(self) -> list[tuple[Callable[[], None], int]]:
        actions = super().actions()
        if self.is_slow:
            # Acknowledged data moves rarely, and stays unmerged for a long time.
            rare = {"push": 8, "append": 4, "plan": 2, "catch_up": 8, "merge": 2, "delete_published": 1}
            actions = [(action, rare.get(action.__name__, weight)) for action, weight in actions]
        return [*actions, (self.change_members, 80 if self.is_slow else 30)]

"""Passes the events of the consensus thread's loop to a `Leader` while this node leads.

Each term, each restored state and each list of members gets a new `Leader`. Only the consensus thread calls
this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.leader.leader import Leader
from sequencer.leader.member_steps import CommittedMembers, MemberStep
from sequencer.leader.proposals import LeaderProposals, ProposalPort
from sequencer.raft.model.api import Leadership
from sequencer.raft.model.members import Members
from sequencer.state.apply_result import Outcome
from sequencer.state.commands import Command
from sequencer.state.feature_level import MemberLevel
from sequencer.state.operations.membership import SettleMembers


class LeaderLoop:
    """`members`: the first list of members. `members_version` returns the version of the committed list.
    `configured`: the replicated settings in this node's configuration. `member_levels` returns what each
    member reported about its program, at a time of the monotonic clock.
    """

    def __init__(
        self,
        name: str,
        members: Members,
        members_version: Callable[[], int],
        machine: SequencerStateMachine,
        messenger: PeerMessenger,
        call_soon: Callable[[Callable[[], None]], None],
        configured: Mapping[str, int],
        member_levels: Callable[[int], Sequence[MemberLevel]],
    ) -> None:
        self._name, self._members, self._members_version = name, members, members_version
        self._machine, self._messenger = machine, messenger
        self._call_soon, self._configured = call_soon, configured
        self._member_levels = member_levels
        self._leader: Leader | None = None
        self._proposals: LeaderProposals | None = None
        """The proposals of this term."""
        self._term = 0
        self._is_due = False

    def on_leadership(self, leadership: Leadership, proposer: ProposalPort) -> None:
        if not leadership.is_here:
            self._leader = self._proposals = None
        elif self._leader is None or leadership.term != self._term:
            self._proposals = LeaderProposals(proposer, time.monotonic_ns)
            self._leader = self._make(self._proposals)
        self._term = leadership.term

    def on_members(self, members: Members) -> None:
        """Handle a newly committed list of members. Majorities are different now, so planning starts
        again.
        """
        self._members = members
        if self._leader is None or self._proposals is None:
            return
        self._leader = self._make(self._proposals)
        for name in self._leader.member_steps.voters:
            self._messenger.request_full_report(name)

    def _make(self, proposals: LeaderProposals) -> Leader:
        return Leader(
            self._machine.state,
            CommittedMembers(self._name, self._members, self._members_version()),
            proposals,
            ask_again=self._messenger.request_full_report,
            now_ns=time.monotonic_ns,
            send_fetch=self._messenger.request_fetch,
            on_divergence=self._messenger.report_divergence,
            configured=self._configured,
            member_levels=self._member_levels,
        )

    def on_restored(self) -> None:
        """Stop planning with the current `Leader`, because its state was replaced. The next leadership makes
        another one.
        """
        self._leader = None

    def on_report(self, node: str, report: pb.Report) -> None:
        if self._leader is not None:
            self._leader.on_report(node, report)
            if self._leader.may_plan:
                self._leader.plan()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """Plan once, after all commands that were committed together are applied."""
        if self._leader is not None:
            self._leader.on_applied(command, outcome)
            if self._leader.has_plans and not self._is_due:
                self._is_due = True
                self._call_soon(self._plan)

    def on_merged(self, node: str, instruction: int) -> None:
        """Record that a node has merged durably up to an instruction. The node may be a learner."""
        if self._leader is not None:
            self._leader.member_steps.on_merged(node, instruction)

    def tick(self) -> MemberStep | None:
        """Returns the next step of a change of the members, if this node leads and there is one."""
        if self._leader is None:
            return None
        self._leader.tick()
        return self._leader.next_member_step()

    def settle_members(self, settled: SettleMembers) -> None:
        if self._leader is not None:
            self._leader.settle_members(settled)

    @property
    def waits_for(self) -> str:
        """What a change of the members waits for, if this node leads; empty: nothing."""
        return "" if self._leader is None else self._leader.member_steps.waits_for

    def _plan(self) -> None:
        self._is_due = False
        if self._leader is not None:
            self._leader.plan()

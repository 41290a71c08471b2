"""Passes the events of the consensus thread's loop to a `Leader` while this node leads.

Each term, and each restored state, gets a new `Leader`. Only the consensus thread calls this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.leader.leader import Leader
from sequencer.leader.proposals import ProposalPort
from sequencer.raft.model.api import Leadership
from sequencer.state.apply_result import Outcome
from sequencer.state.commands import Command
from sequencer.state.feature_level import MemberLevel


class LeaderLoop:
    """`members` is the number of nodes, `configured` the replicated settings in this node's configuration.

    `member_levels` returns what each member reported of its program, at a time of the monotonic clock.
    """

    def __init__(
        self,
        members: int,
        machine: SequencerStateMachine,
        messenger: PeerMessenger,
        call_soon: Callable[[Callable[[], None]], None],
        configured: Mapping[str, int],
        member_levels: Callable[[int], Sequence[MemberLevel]],
    ) -> None:
        self._members, self._machine, self._messenger = members, machine, messenger
        self._call_soon, self._configured = call_soon, configured
        self._member_levels = member_levels
        self._leader: Leader | None = None
        self._term = 0
        self._is_due = False

    def on_leadership(self, leadership: Leadership, proposer: ProposalPort) -> None:
        if not leadership.is_here:
            self._leader = None
        elif self._leader is None or leadership.term != self._term:
            self._leader = Leader(
                self._machine.state,
                self._members,
                proposer,
                ask_again=self._messenger.request_full_report,
                now_ns=time.monotonic_ns,
                send_fetch=self._messenger.request_fetch,
                on_divergence=self._messenger.report_divergence,
                configured=self._configured,
                member_levels=self._member_levels,
            )
        self._term = leadership.term

    def on_restored(self) -> None:
        """The state was replaced: its `Leader` must not plan. The next leadership makes another one."""
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

    def tick(self) -> None:
        if self._leader is not None:
            self._leader.tick()

    def _plan(self) -> None:
        self._is_due = False
        if self._leader is not None:
            self._leader.plan()

"""Runs a `Leader` while this node leads: one for each term and each restored state.

Used by the consensus thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.leader.leader import Leader
from sequencer.leader.proposals import ProposalPort
from sequencer.raft.model.api import Leadership
from sequencer.state.apply_result import Outcome
from sequencer.state.commands import Command


class LeaderLoop:
    """`members`: how many nodes the cluster has. `configured`: the replicated settings of this node."""

    def __init__(
        self,
        members: int,
        machine: SequencerStateMachine,
        messenger: PeerMessenger,
        call_soon: Callable[[Callable[[], None]], None],
        configured: Mapping[str, int],
    ) -> None:
        self._members, self._machine, self._messenger = members, machine, messenger
        self._call_soon, self._configured = call_soon, configured
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
                self._messenger.request_full_report,
                time.monotonic_ns,
                self._messenger.request_fetch,
                self._messenger.report_divergence,
                self._configured,
            )
        self._term = leadership.term

    def on_restored(self) -> None:
        """The state machine has a new state: the leader of the old one must not plan."""
        self._leader = None

    def on_report(self, node: str, report: pb.Report) -> None:
        if self._leader is not None:
            self._leader.on_report(node, report)
            if self._leader.may_plan:
                self._leader.plan()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """Plans after everything that was committed together is applied."""
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

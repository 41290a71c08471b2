"""Planning while this node leads: a leader for each term, asked whenever there may be something to plan.

The consensus thread alone uses it. The law: a leader lives for one term, on one state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.leader.leader import Leader, ProposalPort
from sequencer.raft.model.api import Leadership
from sequencer.state.apply_result import Outcome
from sequencer.state.commands import Command


class LeaderLoop:
    """Has a leader while this node, one of `members`, is to plan. `call_soon` is consensus's.

    `wanted` is what this node is told of the replicated configuration.
    """

    def __init__(
        self,
        members: int,
        machine: SequencerStateMachine,
        telling: PeerMessenger,
        call_soon: Callable[[Callable[[], None]], None],
        wanted: Mapping[str, int],
    ) -> None:
        self._members, self._machine, self._telling, self._call_soon = members, machine, telling, call_soon
        self._wanted = wanted
        self._leader: Leader | None = None
        self._term = 0
        self._is_due = False

    def on_leadership(self, leadership: Leadership, proposer: ProposalPort) -> None:
        """Who leads, or in which term, may have changed."""
        if not leadership.is_here:
            self._leader = None
        elif self._leader is None or leadership.term != self._term:
            self._leader = Leader(
                self._machine.state,
                self._members,
                proposer,
                self._telling.ask_again,
                time.monotonic_ns,
                self._telling.lack,
                self._telling.difference,
                self._wanted,
            )
        self._term = leadership.term

    def on_restored(self) -> None:
        """The machine has another state."""
        self._leader = None

    def on_report(self, node: str, report: pb.Report) -> None:
        """A node reports; what it brings is planned at once."""
        if self._leader is not None:
            self._leader.on_report(node, report)
            if self._leader.may_plan:
                self._leader.plan()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """The machine applied a command. It is planned once what was committed with it is applied, too."""
        if self._leader is not None:
            self._leader.on_applied(command, outcome)
            if self._leader.has_plans and not self._is_due:
                self._is_due = True
                self._call_soon(self._plan)

    def tick(self) -> None:
        """Now and then."""
        if self._leader is not None:
            self._leader.tick()

    def _plan(self) -> None:
        self._is_due = False
        if self._leader is not None:
            self._leader.plan()

"""The commands that one leader proposes: how many are in flight, and when a lost one may be repeated.

Only the consensus thread calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final, Protocol

from rt.errors import Overloaded, RtError
from sequencer.state.apply_result import CommandRejected, Forgotten, Outcome
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import (
    Command,
    Configure,
    DecideRequest,
    MergeInstruction,
    RestoreDisk,
    Roll,
    TrimSegments,
)
from sequencer.state.leases.leases import ExpireLeases
from sequencer.state.operations.membership import SettleMembers
from sequencer.state.session_commands import CloseRun, FenceRun, Forget

REPEAT_NS: Final = 3 * 10**9
"""A command that may have been lost is not proposed again before this time."""

RepeatedCommand = (
    FenceRun
    | CloseRun
    | RestoreDisk
    | TrimSegments
    | Configure
    | DecideRequest
    | ExpireLeases
    | Forget
    | SettleMembers
)

logger = logging.getLogger("sequencer")


class ProposalPort(Protocol):
    """The part of the consensus that the leader needs."""

    def propose(self, command: bytes) -> Future[int]:
        """See `sequencer.raft.raft.Raft.propose`."""


class LeaderProposals:
    def __init__(self, port: ProposalPort, now_ns: Callable[[], int]) -> None:
        self._port, self._now_ns = port, now_ns
        self.in_flight = 0
        """Merge instructions and rolls whose result is not known yet."""
        self.must_replan = False
        """Whether a result was not as planned. If so, nothing is planned until no instruction or roll is in
        flight.
        """
        self._again_ns: dict[Hashable, int] = {}
        """When each command may be repeated."""

    @property
    def may_replan(self) -> bool:
        return self.must_replan and not self.in_flight

    def propose(self, command: Command) -> bool:
        """Propose a command once. Returns whether the consensus accepted it."""
        try:
            future = self._port.propose(encode_command(command))
        except RtError as error:
            if not isinstance(error, Overloaded):
                logger.error("proposal_failed error=%r", str(error))
            self.must_replan = True
            return False
        if isinstance(command, MergeInstruction | Roll):
            self.in_flight += 1
            future.add_done_callback(self._on_done)
        return True

    def repeat(self, command: RepeatedCommand) -> None:
        """Propose a command that may have been lost, unless it was proposed a short time ago."""
        now_ns, key = self._now_ns(), _key_of(command)
        if now_ns >= self._again_ns.get(key, 0):
            self._again_ns[key] = now_ns + REPEAT_NS
            logger.info(
                "proposal_submitted %s",
                command.brief if isinstance(command, ExpireLeases | Forget) else command,
            )
            self.propose(command)

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        match command:
            case MergeInstruction() | Roll():
                self.must_replan |= isinstance(outcome, CommandRejected)
            case Forget():
                if isinstance(outcome, Forgotten):
                    self._again_ns.pop(_key_of(command), None)
            case FenceRun() | CloseRun() | TrimSegments() | Configure() | ExpireLeases() | DecideRequest():
                self._again_ns.pop(_key_of(command), None)

    def _on_done(self, future: Future[int]) -> None:
        self.in_flight -= 1
        if future.cancelled() or future.exception() is not None:
            self.must_replan = True


def _key_of(command: RepeatedCommand) -> Hashable:
    """A key that is equal for two commands if the later one replaces the earlier one."""
    match command:
        case FenceRun() | CloseRun():
            return type(command), command.session_id, command.run
        case RestoreDisk():
            return RestoreDisk, command.disk
        case DecideRequest():
            return DecideRequest, command.id
        case SettleMembers():
            return SettleMembers, command.number
        case _:
            return (type(command),)

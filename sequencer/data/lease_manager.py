"""Lease requests on any node: a request is proposed until its outcome is applied here.

For one event loop. `run` returns the decision about this request, or raises. After an error the request may
have been granted, or may still be: a request with the same id gets the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from rt.errors import Overloaded, Timeout
from rt.net.grpc_errors import Unreachable
from sequencer.ipc.state_follower import StateFollower
from sequencer.state.apply_result import CommandRejected, LeasesGranted, Outcome
from sequencer.state.commands import Command
from sequencer.state.leases import AcquireLeases, ReleaseLeases, RenewLeases, no_room
from sequencer.state.state import SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""A request that is not applied after this time is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
WAITING_MAX: Final = 64
"""Maximum number of requests in progress. Each may take 64 KiB of the Raft log."""

_ROOM_HINT: Final = "Other leases must be released or expire first."

LeaseCommand: TypeAlias = AcquireLeases | RenewLeases | ReleaseLeases


class LeaseManager:
    """`propose` may lose a command. `is_up` says whether the control process is connected."""

    def __init__(
        self, follower: StateFollower, propose: Callable[[Command], None], is_up: Callable[[], bool]
    ) -> None:
        self._follower, self._propose, self._is_up = follower, propose, is_up
        self._waiting: dict[LeaseCommand, asyncio.Future[Outcome]] = {}

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        if isinstance(command, AcquireLeases | RenewLeases | ReleaseLeases):
            waiting = self._waiting.get(command)
            if waiting is not None and not waiting.done():
                waiting.set_result(outcome)

    def state(self) -> SequencerState:
        """The applied state; `Unreachable` unless this node gets what is committed."""
        state = self._follower.joined_state
        if not (self._is_up() and self._follower.standing.leader and self._follower.is_caught_up):
            raise Unreachable("this node knows no leader", hint="Try again, or another node.")
        return state

    async def run(self, command: LeaseCommand) -> LeasesGranted:
        """Propose the command and wait for the decision, `TIMEOUT_S` at most.

        `rt.Overloaded`: no more leases fit, or the same request is in progress. `rt.Timeout`: no decision was
        seen. `Unreachable`: nothing was proposed.
        """
        state = self.state()
        if isinstance(command, AcquireLeases) and (why := no_room(state, command)) is not None:
            raise Overloaded(why, hint=_ROOM_HINT)  # It would be rejected, so it is not proposed.
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded("too many lease requests in progress", expected=f"{WAITING_MAX} at most")
        if command in self._waiting:
            raise Overloaded("the same request is in progress", hint="Try again when it is done.")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[command] = outcome
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not outcome.done():
                    self._propose(command)
                    await asyncio.wait([outcome], timeout=PROPOSE_AGAIN_S)
        except TimeoutError:
            hint = "Repeat the request with the same id, on any node. It gets the same answer."
            raise Timeout(
                "no decision about the leases was seen", expected=f"{TIMEOUT_S:g} s", hint=hint
            ) from None
        finally:
            del self._waiting[command]
        came_to = outcome.result()
        if isinstance(came_to, CommandRejected):
            raise Overloaded(came_to.why, hint=_ROOM_HINT)
        assert isinstance(came_to, LeasesGranted), came_to
        return came_to

"""Leases as they are asked for on any node: a request is proposed until its outcome is applied here.

For one event loop. The law: `run` returns what consensus decided about this very request, or raises; then it
may have been decided, or may be yet, and who asks again by the same id gets what it got then.
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
from sequencer.state.lease_commands import AcquireLeases, ReleaseLeases, RenewLeases
from sequencer.state.leases import no_room
from sequencer.state.state import SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""What was not seen applied after so long is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
WAITING_MAX: Final = 64
"""Requests that are being answered: each may be as large as 64 KiB in consensus's log."""

_ROOM_HINT: Final = "Others must be released first, or lapse."

LeaseCommand: TypeAlias = AcquireLeases | RenewLeases | ReleaseLeases


class LeaseManager:
    """Proposes what is asked for, by `propose`, which may lose it; `is_up`: it is connected to consensus."""

    def __init__(
        self, replica: StateFollower, propose: Callable[[Command], None], is_up: Callable[[], bool]
    ) -> None:
        self._replica, self._propose, self._is_up = replica, propose, is_up
        self._waiting: dict[LeaseCommand, asyncio.Future[Outcome]] = {}

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """A command was applied here."""
        if isinstance(command, AcquireLeases | RenewLeases | ReleaseLeases):
            waiting = self._waiting.get(command)
            if waiting is not None and not waiting.done():
                waiting.set_result(outcome)

    def state(self) -> SequencerState:
        """What was applied here; `Unreachable` unless this node hears what is committed."""
        state = self._replica.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        if not (self._is_up() and self._replica.standing.leader and self._replica.is_caught_up):
            raise Unreachable("this node knows of no leader", hint="Try again, or another node.")
        return state

    async def run(self, command: LeaseCommand) -> LeasesGranted:
        """Have consensus decide about it, within some seconds.

        `rt.Overloaded`: there is no room for more, or that request is being answered. `rt.Timeout`: nothing
        was heard. `Unreachable`: nothing was proposed.
        """
        state = self.state()
        if isinstance(command, AcquireLeases) and (why := no_room(state, command)) is not None:
            raise Overloaded(why, hint=_ROOM_HINT)  # It would be refused: nothing is proposed for that.
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded("too many requests for leases", expected=f"{WAITING_MAX} at once at most")
        if command in self._waiting:
            raise Overloaded("that request is being answered", hint="Ask again when it is.")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[command] = outcome
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not outcome.done():
                    self._propose(command)
                    await asyncio.wait([outcome], timeout=PROPOSE_AGAIN_S)
        except TimeoutError:
            hint = "Ask again by the same id, of any node: what it got it has."
            raise Timeout("leases were not seen decided", expected=f"{TIMEOUT_S:g} s", hint=hint) from None
        finally:
            del self._waiting[command]
        came_to = outcome.result()
        if isinstance(came_to, CommandRejected):
            raise Overloaded(came_to.why, hint=_ROOM_HINT)
        assert isinstance(came_to, LeasesGranted), came_to
        return came_to

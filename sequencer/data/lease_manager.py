"""Requests for leases and their tables on any node: each is proposed until its outcome is applied here.

For one event loop. `run`, `write` and `post` return the decision about this request, or raise. After an error
the request may have been granted, or may be granted later. A request with the same id gets the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from rt.errors import Overloaded, Timeout
from rt.net.grpc_errors import Unreachable
from sequencer.ipc.state_follower import NO_LEADER_HINT, StateFollower
from sequencer.state.apply_result import (
    CommandRejected,
    LeasesGranted,
    Outcome,
    RequestPosted,
    TableWritten,
)
from sequencer.state.commands import Command
from sequencer.state.leases.leases import AcquireLeases, ReleaseLeases, RenewLeases, no_room
from sequencer.state.leases.requests import PostRequest
from sequencer.state.leases.tables import WriteTable
from sequencer.state.state import SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""A request that is not applied after this time is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
WAITING_MAX: Final = 64
"""Maximum number of requests in progress, counted separately for requests for leases, for writes to their
tables, and for requests to their owners. Each may take 64 KiB of the Raft log. They are counted separately
because the other kinds must not keep leases from being renewed.
"""

_LEASES: Final = "lease requests"
_ROOM_HINT: Final = "Other leases must be released or expire first."

LeaseCommand: TypeAlias = AcquireLeases | RenewLeases | ReleaseLeases
AnyCommand: TypeAlias = LeaseCommand | WriteTable | PostRequest
Key: TypeAlias = LeaseCommand | tuple[bytes, int] | bytes
"""The key that identifies a request. Two requests with equal keys get one answer."""


class LeaseManager:
    """`propose` may lose a command. `is_up` says whether the control process is connected."""

    def __init__(
        self, follower: StateFollower, propose: Callable[[Command], None], is_up: Callable[[], bool]
    ) -> None:
        self._follower, self._propose, self._is_up = follower, propose, is_up
        self._waiting: dict[Key, asyncio.Future[Outcome]] = {}

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        if isinstance(command, AcquireLeases | RenewLeases | ReleaseLeases | WriteTable | PostRequest):
            waiting = self._waiting.get(_key(command))
            if waiting is not None and not waiting.done():
                waiting.set_result(outcome)

    def state(self) -> SequencerState:
        """The applied state; `Unreachable` if this node does not receive committed commands."""
        state = self._follower.joined_state
        if not (self._is_up() and self._follower.standing.leader and self._follower.is_caught_up):
            raise Unreachable("this node knows no leader", hint=NO_LEADER_HINT)
        return state

    async def run(self, command: LeaseCommand) -> LeasesGranted:
        """Propose the command and wait for the decision, `TIMEOUT_S` at most.

        `rt.Overloaded`: no more leases fit, or the same request is in progress. `rt.Timeout`: no decision was
        seen. `Unreachable`: nothing was proposed.
        """
        state = self.state()
        if isinstance(command, AcquireLeases) and (why := no_room(state, command)) is not None:
            raise Overloaded(why, hint=_ROOM_HINT)  # It would be rejected, so it is not proposed.
        decided = await self._decision(command)
        if isinstance(decided, CommandRejected):
            raise Overloaded(decided.why, hint=_ROOM_HINT)
        assert isinstance(decided, LeasesGranted), decided
        return decided

    async def write(self, command: WriteTable) -> TableWritten:
        """Like `run`, for a part of a commit to a lease's table."""
        self.state()
        decided = await self._decision(command)
        assert isinstance(decided, TableWritten), decided
        return decided

    async def post(self, command: PostRequest) -> RequestPosted:
        """Like `run`, for a request to the owner of a lease."""
        self.state()
        decided = await self._decision(command)
        assert isinstance(decided, RequestPosted), decided
        return decided

    async def _decision(self, command: AnyCommand) -> Outcome:
        key = _key(command)
        what = _kind(key)
        if sum(_kind(one) == what for one in self._waiting) >= WAITING_MAX:
            raise Overloaded(f"too many {what} in progress", expected=f"{WAITING_MAX} at most")
        if key in self._waiting:
            raise Overloaded("the same request is in progress", hint="Try again when it is done.")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[key] = outcome
        again_s = PROPOSE_AGAIN_S
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not outcome.done():
                    self._propose(command)
                    await asyncio.wait([outcome], timeout=again_s)
                    # Large commands must not pile up while consensus is slow.
                    again_s *= 1 if what == _LEASES else 2
        except TimeoutError:
            hint = "Repeat the request with the same id, on any node. It gets the same answer."
            raise Timeout(
                "no decision about the request was seen", expected=f"{TIMEOUT_S:g} s", hint=hint
            ) from None
        finally:
            del self._waiting[key]
        return outcome.result()


def _key(command: AnyCommand) -> Key:
    if isinstance(command, PostRequest):
        return command.id
    return command.by.id if isinstance(command, WriteTable) else command


def _kind(key: Key) -> str:
    if isinstance(key, bytes):
        return "requests to owners of leases"
    return "writes to tables of leases" if isinstance(key, tuple) else _LEASES

"""Runs operators' requests from any node: each request is executed once while the caller waits, or never.

For one event loop. `run` returns the outcome, which may be a rejection. If `run` raises, the error shows
whether the request may have been executed. A request is not executed later
(`sequencer.state.operations.operator_requests`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

from archiver.policy import reached_ns
from rt.errors import Timeout
from rt.net.grpc_errors import Unreachable
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.state_follower import NO_LEADER_HINT, StateFollower
from sequencer.state.apply_result import CommandRejected, NotWaiting, Outcome, RequestLapsed
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import Command, DecideRequest, Operation, SubmitRequest
from sequencer.state.state import REQUEST_BYTES, SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""A request that is not applied after this time is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
"""How long a request may be executed; less than a REST client waits."""
DECIDED_S: Final = 2.0
"""How much longer `run` waits for the decision."""


class CommandClient:
    """Proposes requests through the control process and waits for their outcomes."""

    def __init__(self, follower: StateFollower, propose: Callable[[bytes], None]) -> None:
        self._follower, self._propose = follower, propose
        self._waiting: dict[bytes, asyncio.Future[Outcome]] = {}

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        match command, outcome:
            case DecideRequest(), NotWaiting():
                pass  # The earlier decision counts. If it was in a snapshot, its outcome is unknown here.
            case (DecideRequest(request), _) | (SubmitRequest(request), CommandRejected() | RequestLapsed()):
                waiting = self._waiting.get(request)
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome)

    def propose(self, command: Command) -> None:
        """Propose a command once, without waiting. It may be lost."""
        self._propose(encode_command(command))

    async def run(self, operation: Operation, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Execute an operation within `timeout_s` and return its outcome, which may be `CommandRejected`.

        `rt.Timeout` if the operation was not executed, or if it is unknown whether it was executed.
        `Unreachable` if the node has not joined its cluster yet, or if it knows no leader.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            outcome = await self._ask(operation, deadline - time.monotonic(), timeout_s)
            if not isinstance(outcome, RequestLapsed):
                return outcome
            if outcome.may_be_done:
                hint = "Check whether it was executed before you try again."
                raise _late(operation, "was too late", timeout_s, hint)
            # The leader's clock was ahead of this node's clock. The state has the leader's time now.
            if time.monotonic() >= deadline:
                raise _late(operation, "was too late", timeout_s, "Nothing was changed. Try again.")

    async def _ask(self, operation: Operation, left_s: float, timeout_s: float) -> Outcome:
        """Propose an operation as one request until it is decided; `left_s` of `timeout_s` are left."""
        state = self._follower.joined_state
        if not self._follower.standing.leader:
            raise Unreachable("this node knows no leader", hint=NO_LEADER_HINT)
        until_ns = clock_ns(self._follower.standing, state) + int(left_s * 1e9)
        ask = SubmitRequest(os.urandom(REQUEST_BYTES), until_ns, operation)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = outcome
        try:
            async with asyncio.timeout(left_s + DECIDED_S):
                while not outcome.done():
                    self.propose(ask)
                    await asyncio.wait([outcome], timeout=PROPOSE_AGAIN_S)
        except TimeoutError:
            hint = "It will not be decided later. Check whether it was executed before you try again."
            raise _late(operation, "got no decision", timeout_s, hint) from None
        finally:
            del self._waiting[ask.id]
        return outcome.result()


def clock_ns(standing: pb.Standing, state: SequencerState) -> int:
    """The time that a majority of the nodes' clocks had reached in their last reports.

    A node that is cut off gets no reports, so its requests expire earlier.
    """
    clocks = [one.summary.clock_ns for one in standing.nodes if one.summary.clock_ns]
    heard_ns = reached_ns(clocks, len(standing.nodes)) if clocks else None
    return max(time.time_ns() if heard_ns is None else heard_ns, state.decided_ns)


def _late(operation: Operation, what: str, timeout_s: float, hint: str) -> Timeout:
    return Timeout(f"{type(operation).__name__} {what}", expected=f"{timeout_s:g} s", hint=hint)

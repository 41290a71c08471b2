"""What operators ask for, from any node: carried out once, while somebody waits for it, or never.

For one event loop. The law: `run` returns what came of it here, a refusal too, which is for the caller to
judge; or it raises, and says whether it can have happened. It does not happen later
(`sequencer.state.operator_requests`).
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
from sequencer.ipc.state_follower import StateFollower
from sequencer.state.apply_result import CommandRejected, NotWaiting, Outcome, RequestLapsed
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import Command, DecideRequest, Operation, SubmitRequest
from sequencer.state.state import REQUEST_BYTES, SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""What was not seen applied after so long is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
"""So long a request may be carried out; less than a client of REST waits."""
DECIDED_S: Final = 2.0
"""So much longer it is waited for to hear what was decided."""


class CommandClient:
    """Proposes requests through the control process, and hears what becomes of them."""

    def __init__(self, replica: StateFollower, propose: Callable[[bytes], None]) -> None:
        self._replica, self._propose = replica, propose
        self._waiting: dict[bytes, asyncio.Future[Outcome]] = {}

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """A command was applied here."""
        match command, outcome:
            case DecideRequest(), NotWaiting():
                pass  # The one before it counts, which may have been in a snapshot: nobody here knows then.
            case (DecideRequest(request), _) | (SubmitRequest(request), CommandRejected() | RequestLapsed()):
                waiting = self._waiting.get(request)
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome)

    def propose(self, command: Command) -> None:
        """Propose it once, and wait for nothing: it may be lost."""
        self._propose(encode_command(command))

    async def run(self, operation: Operation, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Have an operation carried out within `timeout_s`; what that came to, which may be
        `CommandRejected`.

        Raises `rt.Timeout` if it was not, or if that is not known. `Unreachable` before the node has joined
        its cluster, and while it knows of no leader.
        """
        state = self._replica.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        if not self._replica.standing.leader:
            raise Unreachable("this node knows of no leader", hint="Try again, or another node.")
        until_ns = clock_ns(self._replica.standing, state) + int(timeout_s * 1e9)
        ask = SubmitRequest(os.urandom(REQUEST_BYTES), until_ns, operation)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = outcome
        try:
            async with asyncio.timeout(timeout_s + DECIDED_S):
                while not outcome.done():
                    self.propose(ask)
                    await asyncio.wait([outcome], timeout=PROPOSE_AGAIN_S)
        except TimeoutError:
            hint = "If it was not decided in time, it will not be: look whether it was before you ask again."
            raise _late(operation, "was not seen decided", timeout_s, hint) from None
        finally:
            del self._waiting[ask.id]
        came_to = outcome.result()
        if isinstance(came_to, RequestLapsed):
            never = "Nothing was changed, and nothing will be: ask again."
            hint = "Look whether it was done before you ask again." if came_to.may_be_done else never
            raise _late(operation, "came too late", timeout_s, hint)
        return came_to


def clock_ns(standing: pb.Standing, state: SequencerState) -> int:
    """What time it is by the nodes' clocks, or was when they were last heard of.

    A node that is cut off hears of none, so what it asks for is the sooner too late.
    """
    clocks = [one.summary.clock_ns for one in standing.nodes if one.summary.clock_ns]
    heard_ns = reached_ns(clocks, len(standing.nodes)) if clocks else None
    return max(time.time_ns() if heard_ns is None else heard_ns, state.decided_ns)


def _late(operation: Operation, what: str, timeout_s: float, hint: str) -> Timeout:
    return Timeout(f"{type(operation).__name__} {what}", expected=f"{timeout_s:g} s", hint=hint)

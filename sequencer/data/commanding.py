"""Commands of operators and subscribers, proposed from any node. For one event loop.

The law: `run` returns once the command was applied here, whoever proposed it and however often; what it came
to, a refusal too, is the caller's to judge. One that was applied unseen is proposed, and judged, once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rt.errors import Timeout
from rt.net.rpc_errors import Unreachable
from sequencer.commands import Command, encode_command
from sequencer.data.replica import Replica
from sequencer.outcomes import Outcome

PROPOSE_AGAIN_S: Final = 1.0
"""A command that was not seen applied after so long is proposed again: it may have been lost."""


class Commanding:
    """Proposes commands through the control process, and hears what becomes of them."""

    def __init__(self, replica: Replica, propose: Callable[[bytes], None]) -> None:
        self._replica, self._propose = replica, propose
        self._waiting: dict[Command, list[asyncio.Future[Outcome]]] = {}

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """A command was applied here."""
        for waiting in self._waiting.pop(command, []):
            waiting.set_result(outcome)

    def propose(self, command: Command) -> None:
        """Propose it once, and wait for nothing: it may be lost."""
        self._propose(encode_command(command))

    async def run(self, command: Command, *, timeout_s: float = 10.0) -> Outcome:
        """Have a command applied; what that came to, which may be `Refused`.

        Raises `rt.Timeout` if it takes too long: it may still be applied. `Unreachable` before the node has
        joined its cluster, and while it knows of no leader: what waits for one comes when nobody wants it.
        """
        state = self._replica.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        if not self._replica.standing.leader:
            raise Unreachable("this node knows of no leader", hint="Try again, or another node.")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(command, []).append(outcome)
        try:
            async with asyncio.timeout(timeout_s):
                while not outcome.done():
                    self.propose(command)
                    await asyncio.wait([outcome], timeout=PROPOSE_AGAIN_S)
        except TimeoutError:
            raise Timeout(
                f"{type(command).__name__} was not seen applied",
                wanted=f"{timeout_s:g} s",
                hint="It may still come: look before you ask again. Is there a leader?",
            ) from None
        finally:
            self._forget(command, outcome)
        return outcome.result()

    def _forget(self, command: Command, outcome: asyncio.Future[Outcome]) -> None:
        waiting = self._waiting.get(command, [])
        if outcome in waiting:
            waiting.remove(outcome)
        if not waiting:
            self._waiting.pop(command, None)

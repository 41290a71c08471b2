"""Changing what the nodes agree on about rolling and batching, from any node. For one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rt.errors import Timeout
from rt.net.rpc_errors import Unreachable
from sequencer.commands import Command, Configure, encode_command
from sequencer.data.replica import Replica
from sequencer.state import Configuration

PROPOSE_AGAIN_S: Final = 1.0
"""A command that was not seen applied after so long is proposed again: it may have been lost."""


class Configuring:
    """Proposes changes, and hears when they are applied here."""

    def __init__(self, replica: Replica, propose: Callable[[bytes], None]) -> None:
        self._replica, self._propose = replica, propose
        self._waiting: dict[Configure, asyncio.Event] = {}

    def on_applied(self, command: Command) -> None:
        """A command was applied."""
        if isinstance(command, Configure) and command in self._waiting:
            self._waiting.pop(command).set()

    async def configure(self, command: Configure, *, timeout_s: float = 10.0) -> Configuration:
        """Have the configuration changed; what it is once this node has applied the change.

        Raises `rt.Timeout` if that takes too long: it may still be changed. `Unreachable` before the node has
        joined its cluster.
        """
        state = self._replica.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        applied = self._waiting.setdefault(command, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                while not applied.is_set():
                    self._propose(encode_command(command))
                    await _set_within(applied, PROPOSE_AGAIN_S)
        except TimeoutError:
            raise Timeout(
                "the change of the configuration was not seen applied",
                wanted=f"{timeout_s:g} s",
                hint="Look at the configuration: it may still come. Is there a leader?",
            ) from None
        assert self._replica.state is not None
        return self._replica.state.configuration


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass

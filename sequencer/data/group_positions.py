"""The positions of groups: holds that are moved for several members, and are read back by them.

For one event loop. Invariants:
- `acknowledge` returns when the state of this node has every requested position, or a later one.
- A position that is acknowledged again, or late, moves nothing back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from rt.errors import Overloaded, Timeout
from sequencer.state.apply_result import CommandRejected, HoldMoved, Outcome
from sequencer.state.commands import Command, HoldPosition
from sequencer.state.state import SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""A position that is not applied after this time is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
_HINT: Final = (
    "Try again. If there are too many holds, release those of retired subscribers: POST /release-hold."
)


class GroupPositions:
    """`propose` may lose a command. `state` returns the applied state, or raises without a leader."""

    def __init__(self, state: Callable[[], SequencerState], propose: Callable[[Command], None]) -> None:
        self._state, self._propose = state, propose
        self._refused: dict[str, str] = {}
        """By name: why a hold was refused, for the calls that wait for it."""
        self._waiting = 0
        self._changed = asyncio.Event()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        match command, outcome:
            case _, HoldMoved():
                self._notify()
            case HoldPosition(name), CommandRejected(why) if self._waiting:
                self._refused[name] = why
                self._notify()

    def positions(self, prefix: str) -> dict[str, int]:
        """The positions whose name starts with `prefix`."""
        holds = self._state().holds
        return {name: hold.position for name, hold in holds.items() if name.startswith(prefix)}

    @property
    def log_range(self) -> tuple[int, int]:
        """The start and end of the merged log."""
        state = self._state()
        return state.log_start, state.position

    async def acknowledge(self, positions: Mapping[str, int]) -> None:
        """Move these positions forward.

        `rt.Overloaded`: the cluster has as many holds as it allows. `rt.Timeout`: no decision was seen; the
        positions may have moved.
        """
        self._waiting += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while left := self._left(positions):
                    for name, position in left.items():
                        self._refused.pop(name, None)
                        self._propose(HoldPosition(name, position, time.time_ns()))
                    await self._wait(positions)
        except TimeoutError:
            raise Timeout(
                "the positions of a group were not applied",
                got=", ".join(f"{name} at {at}" for name, at in self._left(positions).items())[:200],
                expected=f"within {TIMEOUT_S:g} s",
                hint="Repeat the request, on any node.",
            ) from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._refused.clear()

    async def _wait(self, positions: Mapping[str, int]) -> None:
        """Wait until all are applied, one is refused, or the time to propose them again has come."""
        end_s = time.monotonic() + PROPOSE_AGAIN_S
        while (left := self._left(positions)) and (left_s := end_s - time.monotonic()) > 0:
            holds = self._state().holds
            for name, why in self._refused.items():
                if name in left and name not in holds:
                    raise Overloaded(why, hint=_HINT)
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _left(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Those that the state does not have yet."""
        holds = self._state().holds
        return {
            name: position
            for name, position in positions.items()
            if name not in holds or holds[name].position < position
        }

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

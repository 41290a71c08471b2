"""Holds of named subscribers: positions that they acknowledge to this node are proposed to the cluster.

Invariants:
- An acknowledged position is proposed until the state has it, at most every `AGAIN_S` for each name.
- A hold that an operator released comes back only after the subscriber acknowledges or connects again.
- A subscriber without a hold can wait for its first one: until then anything may be trimmed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from sequencer.ipc.state_follower import StateFollower
from sequencer.state import commands
from sequencer.state.apply_result import CommandRejected, GroupReset, HoldMoved, HoldReleased, Outcome
from sequencer.state.state import SubscriberHold

AGAIN_S: Final = 5.0
REFUSED_S: Final = 60.0
"""How long to wait after a hold was refused. Other holds must be released first."""
NAMES_MAX: Final = 4096
"""Maximum number of subscribers whose hold is pending; as many as a node takes connections."""
CONFIRM_S: Final = 8.0
"""How long a subscriber waits for its first hold at most. Without a majority there is none."""
_INTERVAL_S: Final = 1.0

logger = logging.getLogger("sequencer")


class _RequestedHold(Struct):
    position: int
    due_s: float
    """When to propose it next."""


class RequestedHolds:
    """Positions that are not in the state yet. Pure."""

    def __init__(self) -> None:
        self._requested: dict[str, _RequestedHold] = {}

    def __len__(self) -> int:
        return len(self._requested)

    def record(self, name: str, position: int) -> bool:
        """Record a position that a subscriber acknowledged. Return False if too many subscribers are
        pending.
        """
        request = self._requested.get(name)
        if request is not None:
            request.position = max(request.position, position)
        elif len(self._requested) < NAMES_MAX:
            self._requested[name] = _RequestedHold(position, 0.0)
        else:
            return False
        return True

    def due(self, holds: Mapping[str, SubscriberHold], end: int, now_s: float) -> list[tuple[str, int]]:
        """The names and positions to propose now. A hold cannot be after `end`, the end of the log."""
        found: list[tuple[str, int]] = []
        for name, request in list(self._requested.items()):
            if now_s < request.due_s:
                continue
            held = holds[name].position if name in holds else -1
            if held >= request.position:
                del self._requested[name]
            elif held < (position := min(request.position, end)):
                request.due_s = now_s + AGAIN_S
                found.append((name, position))
        return found

    def forget(self, name: str) -> None:
        """Forget the pending position, because an operator released the hold."""
        self._requested.pop(name, None)

    def put_off(self, name: str, until_s: float) -> bool:
        """Do not propose before `until_s`. False if nothing is pending for the name."""
        request = self._requested.get(name)
        if request is not None:
            request.due_s = until_s
        return request is not None


class HoldTracker:
    """Proposes pending holds. For one event loop."""

    def __init__(
        self,
        follower: StateFollower,
        propose: Callable[[commands.Command], None],
        on_refused: Callable[[str, str], None] = lambda _name, _why: None,
    ) -> None:
        """`on_refused` gets the subscriber's name and the reason, each time a hold is refused."""
        self._follower, self._propose, self._on_refused = follower, propose, on_refused
        self._requested = RequestedHolds()
        self._refused: dict[str, tuple[str, float]] = {}
        """By name: the reason, and until when it is reported."""
        self._confirmed: dict[str, asyncio.Event] = {}
        """The subscribers that wait for their first hold."""

    def on_acknowledged(self, name: str, position: int) -> None:
        """Record that a subscriber with a certificate of that name has processed everything below
        `position`.
        """
        if not self._requested.record(name, position):
            logger.warning("hold_not_recorded name=%s position=%d", name, position)
            self._refuse(name, f"the holds of {NAMES_MAX} subscribers are pending")

    async def confirm(self, name: str) -> None:
        """Wait for the first hold of a subscriber that acknowledged: until the state has the hold or refuses
        it.

        After `CONFIRM_S`, log a warning and return.
        """
        try:
            async with asyncio.timeout(CONFIRM_S):
                while not self._is_held(name) and name not in self.refused:
                    self.propose_due(time.monotonic())
                    await self._confirmed.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            self._answer(name)  # Other calls of that name wake up and continue to wait.
            logger.warning("hold_not_confirmed name=%s seconds=%g", name, CONFIRM_S)

    def _answer(self, name: str) -> None:
        if (event := self._confirmed.pop(name, None)) is not None:
            event.set()

    @property
    def refused(self) -> dict[str, str]:
        """By name: why a hold was refused recently."""
        now_s = time.monotonic()
        return {name: why for name, (why, until_s) in self._refused.items() if now_s < until_s}

    def on_applied(self, command: commands.Command, outcome: Outcome) -> None:
        match command, outcome:
            case _, HoldReleased(name):
                self._forget(name)
            case _, GroupReset(names):
                for name in names:
                    self._forget(name)
            case _, HoldMoved(name):
                self._refused.pop(name, None)
                self._answer(name)
            case commands.HoldPosition(name), CommandRejected(why) if not self._is_held(name):
                if self._requested.put_off(name, time.monotonic() + REFUSED_S):
                    logger.warning("hold_refused name=%s why=%r", name, why)
                    self._refuse(name, why)

    def _forget(self, name: str) -> None:
        self._requested.forget(name)
        self._refused.pop(name, None)

    def _refuse(self, name: str, why: str) -> None:
        now_s = time.monotonic()
        self._refused = {one: said for one, said in self._refused.items() if now_s < said[1]}
        self._refused[name] = why, now_s + 2 * REFUSED_S  # It is proposed again before that.
        self._on_refused(name, why)
        self._answer(name)

    async def run(self) -> None:
        """Propose due holds every second, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.propose_due(time.monotonic())

    def propose_due(self, now_s: float) -> None:
        state = self._follower.state
        if state is None or not any(state.cluster) or not self._follower.standing.leader:
            return  # Without a leader a proposal would wait, and be outdated when applied.
        for name, position in self._requested.due(state.holds, state.position, now_s):
            self._propose(commands.HoldPosition(name, position, time.time_ns()))

    def _is_held(self, name: str) -> bool:
        state = self._follower.state
        return state is not None and name in state.holds

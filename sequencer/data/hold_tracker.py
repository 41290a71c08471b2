"""Holding data back for named subscribers: what they acknowledge to this node is proposed to all.

Laws:
- What a subscriber said is proposed again until the state has it, at most every `AGAIN_S` for each name.
- What an operator released is held again only after the subscriber says something new or connects again.
- A subscriber without a hold can wait for its first one: until then anything may be trimmed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sequencer.ipc.state_follower import StateFollower
from sequencer.state import commands
from sequencer.state.apply_result import CommandRejected, HoldMoved, HoldReleased, Outcome
from sequencer.state.state import SubscriberHold

AGAIN_S: Final = 5.0
REFUSED_S: Final = 60.0
"""So long a hold that was refused waits: others must be released first."""
NAMES_MAX: Final = 4096
"""Subscribers whose hold waits at once; as many connections as a node takes."""
CONFIRM_S: Final = 8.0
"""How long a subscriber waits for its first hold at most. Without a majority there is none."""
_LOOK_S: Final = 1.0

logger = logging.getLogger("sequencer")


@dataclass(slots=True)
class _RequestedHold:
    position: int
    due_s: float
    """Not proposed before."""


class RequestedHolds:
    """What named subscribers want to be held. Pure."""

    def __init__(self) -> None:
        self._wishes: dict[str, _RequestedHold] = {}

    def __len__(self) -> int:
        return len(self._wishes)

    def hear(self, name: str, position: int) -> bool:
        """A subscriber needs nothing below a position any more; false if there are too many to note it."""
        wish = self._wishes.get(name)
        if wish is not None:
            wish.position = max(wish.position, position)
        elif len(self._wishes) < NAMES_MAX:
            self._wishes[name] = _RequestedHold(position, 0.0)
        else:
            return False
        return True

    def due(self, holds: Mapping[str, SubscriberHold], end: int, now_s: float) -> list[tuple[str, int]]:
        """The names and positions to propose now. `end` is the log's: none can be held beyond it yet."""
        found: list[tuple[str, int]] = []
        for name, wish in list(self._wishes.items()):
            if now_s < wish.due_s:
                continue
            held = holds[name].position if name in holds else -1
            if held >= wish.position:
                del self._wishes[name]
            elif held < (position := min(wish.position, end)):
                wish.due_s = now_s + AGAIN_S
                found.append((name, position))
        return found

    def forget(self, name: str) -> None:
        """An operator does not want it."""
        self._wishes.pop(name, None)

    def put_off(self, name: str, until_s: float) -> bool:
        """Propose it no sooner; false if nothing is wanted."""
        wish = self._wishes.get(name)
        if wish is not None:
            wish.due_s = until_s
        return wish is not None


class HoldTracker:
    """Proposes what is due, by `propose`, from `run`. For one event loop."""

    def __init__(
        self,
        replica: StateFollower,
        propose: Callable[[commands.Command], None],
        on_refused: Callable[[str, str], None] = lambda _name, _why: None,
    ) -> None:
        """`on_refused` hears whose hold was refused, and why, as often as it is."""
        self._replica, self._propose, self._on_refused = replica, propose, on_refused
        self._wishes = RequestedHolds()
        self._refused: dict[str, tuple[str, float]] = {}
        """By name: why, and until when that counts."""
        self._confirmed: dict[str, asyncio.Event] = {}
        """The subscribers that wait for their first hold."""

    def on_acknowledged(self, name: str, position: int) -> None:
        """A subscriber with a certificate of that name needs nothing below `position` any more."""
        if not self._wishes.hear(name, position):
            logger.warning("hold_not_recorded name=%s position=%d", name, position)
            self._refuse(name, f"{NAMES_MAX} subscribers wait for their hold")

    async def confirm(self, name: str) -> None:
        """Wait until the state has a first hold for a subscriber that acknowledged, or refuses it.

        Returns after `CONFIRM_S` at the latest, with a warning.
        """
        try:
            async with asyncio.timeout(CONFIRM_S):
                while not self._is_held(name) and name not in self.refused:
                    self.propose_due(time.monotonic())
                    await self._confirmed.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            self._answer(name)  # Another call of that name waits on.
            logger.warning("hold_not_confirmed name=%s seconds=%g", name, CONFIRM_S)

    def _answer(self, name: str) -> None:
        if (event := self._confirmed.pop(name, None)) is not None:
            event.set()

    @property
    def refused(self) -> dict[str, str]:
        """Whose hold was refused of late, and why, by name."""
        now_s = time.monotonic()
        return {name: why for name, (why, until_s) in self._refused.items() if now_s < until_s}

    def on_applied(self, command: commands.Command, outcome: Outcome) -> None:
        """A command was applied here."""
        match command, outcome:
            case _, HoldReleased(name):
                self._wishes.forget(name)
                self._refused.pop(name, None)
            case _, HoldMoved(name):
                self._refused.pop(name, None)
                self._answer(name)
            case commands.HoldPosition(name), CommandRejected(why) if not self._is_held(name):
                if self._wishes.put_off(name, time.monotonic() + REFUSED_S):
                    logger.warning("hold_refused name=%s why=%r", name, why)
                    self._refuse(name, why)

    def _refuse(self, name: str, why: str) -> None:
        now_s = time.monotonic()
        self._refused = {one: said for one, said in self._refused.items() if now_s < said[1]}
        self._refused[name] = why, now_s + 2 * REFUSED_S  # It is asked for again before that.
        self._on_refused(name, why)
        self._answer(name)

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.propose_due(time.monotonic())

    def propose_due(self, now_s: float) -> None:
        """Propose what is due."""
        state = self._replica.state
        if state is None or not any(state.cluster) or not self._replica.standing.leader:
            return  # What is proposed to nobody only waits, and comes when it is not true any more.
        for name, position in self._wishes.due(state.holds, state.position, now_s):
            self._propose(commands.HoldPosition(name, position, time.time_ns()))

    def _is_held(self, name: str) -> bool:
        state = self._replica.state
        return state is not None and name in state.holds

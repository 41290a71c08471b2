"""Places for those who read for themselves: few at a time, in the order in which they ask.

Law: who holds a place and waits for its consumer loses it when somebody else has waited for long enough: a
consumer that hangs, or fails, keeps nobody else from reading.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

PATIENCE_S: Final = 1.0
"""How long a consumer may keep a place that others wait for, for each time that it is called."""


class Turns:
    """`count` places, of one agent."""

    def __init__(self, count: int) -> None:
        self._places = asyncio.Semaphore(count)
        self._waiting = 0

    @property
    def are_wanted(self) -> bool:
        """Whether somebody waits for a place."""
        return self._waiting > 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait for a place, and have it."""
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        turn = Turn(self, self._places)
        try:
            yield turn
        finally:
            turn.give_back()


class Turn:
    """A place, as long as `is_held`."""

    def __init__(self, turns: Turns, places: asyncio.Semaphore) -> None:
        self._turns = turns
        self._places = places
        self.is_held = True

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for one."""
        return self._turns.are_wanted

    def give_back(self) -> None:
        """Twice is allowed."""
        if self.is_held:
            self.is_held = False
            self._places.release()

    @contextlib.contextmanager
    def lent(self, let_go: Callable[[], None]) -> Iterator[None]:
        """While a consumer is waited for: where others wait too long, `let_go` and give the place back."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            if self.is_wanted:
                let_go()
                self.give_back()
            else:
                timers[:] = [loop.call_later(PATIENCE_S, look)]

        timers.append(loop.call_later(PATIENCE_S, look))
        try:
            yield
        finally:
            timers[0].cancel()

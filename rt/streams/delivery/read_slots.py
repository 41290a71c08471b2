"""Slots for catching up: a few at a time, granted in the order of requests.

Invariant: if the holder of a slot waits for its consumer, and another consumer has waited too long for a
slot, the slot is taken back. So a consumer that hangs or fails does not keep others from reading.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

PATIENCE_S: Final = 1.0
"""How long one call of a consumer may keep a slot that others wait for, in seconds."""


class ReadSlots:
    def __init__(self, count: int) -> None:
        self._places = asyncio.Semaphore(count)
        self._waiting = 0

    @property
    def are_wanted(self) -> bool:
        """Whether a consumer waits for a slot."""
        return self._waiting > 0

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[ReadSlot]:
        """Wait for a slot and hold it."""
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        slot = ReadSlot(self, self._places)
        try:
            yield slot
        finally:
            slot.give_back()


class ReadSlot:
    """A slot, while `is_held`."""

    def __init__(self, slots: ReadSlots, places: asyncio.Semaphore) -> None:
        self._slots = slots
        self._places = places
        self.is_held = True

    @property
    def is_wanted(self) -> bool:
        """Whether a consumer waits for a slot."""
        return self._slots.are_wanted

    def give_back(self) -> None:
        """May be called twice."""
        if self.is_held:
            self.is_held = False
            self._places.release()

    @contextlib.contextmanager
    def yielding(self, release: Callable[[], None]) -> Iterator[None]:
        """While the consumer runs: if others wait for too long, call `release` and give the slot back."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def check() -> None:
            if self.is_wanted:
                release()
                self.give_back()
            else:
                timers[:] = [loop.call_later(PATIENCE_S, check)]

        timers.append(loop.call_later(PATIENCE_S, check))
        try:
            yield
        finally:
            timers[0].cancel()

"""An event loop whose time passes only when nothing else can happen.

Law: the same program does the same things in the same order at the same times, whatever the machine does. It
is for programs that wait for timers and each other only: nothing that comes from a socket, a pipe or another
thread ends a wait, and what is handed to an executor runs at once, in the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(RuntimeError):
    """Everything waits, and no timer will end it."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at second 0."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Seconds since the loop was made, of its own time."""
        return self._now

    def advance(self, seconds: float | None) -> None:
        """Let time pass; None: there is no timer, so that it would pass for ever."""
        if seconds is None:
            raise Stuck("every task waits, and no timer is set")
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call it now; there is no `executor`."""
        del executor
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised to whoever awaits it
            done.set_exception(error)
        return done


class _Skipping(selectors.SelectSelector):
    """Never waits: it moves the loop's time instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._loop.advance(timeout)
        return ready


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time; `Stuck` if `main` waits for what cannot come."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

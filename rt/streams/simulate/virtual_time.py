"""An event loop whose time advances only when nothing else can run.

Invariant: a program does the same things in the same order at the same times, on any machine. This holds only
for programs that wait for timers and for each other: no socket, pipe or other thread ends a wait. Work for an
executor runs in the loop, at once or after a delay.
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
    """Starts at second 0. `delay_s` returns how long work for an executor waits before it runs."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._now = 0.0
        self._delay_s = delay_s
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    def advance(self, seconds: float | None) -> None:
        """Advance the time. `Stuck` if `seconds` is None: there is no timer, so nothing would ever run."""
        if seconds is None:
            raise Stuck("every task waits, and no timer is set")
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call `func` now or later, even if its future is cancelled. `executor` is ignored."""
        del executor
        done: asyncio.Future[T] = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - raised to the caller
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        if delay_s := self._delay_s():
            self.call_later(delay_s, call)
        else:
            call()
        return done


class _Skipping(selectors.SelectSelector):
    """Never waits: it advances the loop's time instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._loop.advance(timeout)
        return ready


def run(main: Coroutine[Any, Any, T], *, delay_s: Callable[[], float] = lambda: 0.0) -> T:
    """`asyncio.run` in virtual time. `Stuck` if `main` waits for something that cannot happen."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(delay_s)) as runner:
        return runner.run(main)

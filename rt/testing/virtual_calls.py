"""The functions of `map_async` in virtual time: every run is the same, without threads or an event loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from rt.query.async_calls import AsyncCall, OnFinished, Outcome
from rt.query.core.scheduler import NS_PER_S, Scheduler, Timer

_CLOSINGS_MAX: Final = 100


class until:  # noqa: N801 - awaited like a function
    """`await until(at_s)` in a function of `map_async` that `run` or `check_laws` calls: wait for that time.

    If the time has passed, the call does not wait. The time is absolute, so that a call after a crash ends at
    the same time.
    """

    def __init__(self, at_s: float) -> None:
        self.at_ns: Final = round(at_s * NS_PER_S)

    def __await__(self) -> Generator[until, None, None]:
        yield self


class VirtualCalls:
    """Runs a function at once, up to an `until` that is not due. Its result is reported by a timer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Final = scheduler

    def start(
        self, request: AsyncCall, value: Any, on_finished: OnFinished, *, after_s: float = 0.0
    ) -> VirtualCall:
        return VirtualCall(self._scheduler, request, value, on_finished, after_s)

    def set_full(self, operator: str, *, is_full: bool) -> None:
        """Do nothing: the sources of the test kit do not wait, so more values than `concurrency` wait in the
        operator.
        """


class VirtualCall:
    def __init__(
        self, scheduler: Scheduler, request: AsyncCall, value: Any, on_finished: OnFinished, after_s: float
    ) -> None:
        self._scheduler: Final = scheduler
        self._on_finished: Final = on_finished
        self._timers: list[Timer] = []
        start_ns = scheduler.now_ns + round(after_s * NS_PER_S)
        self._coroutine: Final = _awaited(request, value, until(start_ns / NS_PER_S))
        if request.timeout_s is not None:
            due_ns = start_ns + round(request.timeout_s * NS_PER_S)
            self._at(due_ns, partial(self._end, Outcome(error=request.late())))
        outcome = self._run()
        if outcome is not None:
            self._at(scheduler.now_ns, partial(self._end, outcome))

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for _ in range(_CLOSINGS_MAX):  # If it awaits while it is closed, it is not closed yet.
            with suppress(Exception):  # As in an event loop: no caller waits for these errors any more.
                self._coroutine.close()
                return

    def _run(self) -> Outcome | None:
        """Run to the end, or to the next `until` and set a timer for it."""
        while True:
            try:
                waits_for = self._coroutine.send(None)
            except StopIteration as end:
                return Outcome(end.value)
            except Exception as error:  # noqa: BLE001 - a user's function
                return Outcome(error=error)
            if not isinstance(waits_for, until):
                what = "in virtual time a function can only await rt.testing.queries.until"
                return Outcome(error=TypeError(f"{what}, got {waits_for!r}"))
            if waits_for.at_ns > self._scheduler.now_ns:
                self._at(waits_for.at_ns, self._go_on)
                return None

    def _go_on(self) -> None:
        outcome = self._run()
        if outcome is not None:
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.cancel()
        self._on_finished(outcome)

    def _at(self, due_ns: int, action: Callable[[], object]) -> None:
        self._timers.append(self._scheduler.at(due_ns, action))


async def _awaited(request: AsyncCall, value: Any, start: until) -> Any:
    await start
    return await request.awaitable(value)

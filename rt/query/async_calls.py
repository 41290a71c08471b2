"""Calls of coroutine functions for operators, in a thread with an event loop. Results come back as events.

    operator ─ start ─► loop thread ─► finished calls ─ run_finished, under the engine's lock ─► operator

Invariants:
- A result reaches its operator only in `run_finished`, on the thread that calls it, and never after `cancel`.
- The thread never needs the engine's lock. It starts with the first call, and ends with `close`.
- While an operator `is_full`, the engine accepts no values from its sources.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from msgspec import Struct

from rt.errors import RtError, Timeout

logger = logging.getLogger("rt.query")

_CLOSE_S: Final = 5.0
"""How long `close` waits for cancelled functions."""

AsyncFunction = Callable[[Any], Any]
"""Takes a value and returns an awaitable of the result."""


class AsyncCall(Struct, frozen=True):
    """What to call. `timeout_s`: seconds for one call; None: no limit."""

    function: AsyncFunction
    timeout_s: float | None = None

    def awaitable(self, value: Any) -> Any:
        """`TypeError` unless the function returns an awaitable."""
        made = self.function(value)
        if not inspect.isawaitable(made):
            raise TypeError(f"the function must return an awaitable, got {made!r}")
        return made

    def late(self) -> Timeout:
        what = "the function did not return in time"
        return Timeout(what, got=self.function, expected=f"{self.timeout_s} s")


class Outcome(Struct, frozen=True):
    """What a call ended with: a result, or an error."""

    result: Any = None
    error: Exception | None = None


OnFinished = Callable[[Outcome], object]


class Call(Protocol):
    def cancel(self) -> None:
        """Its result is no longer needed, and must not be reported. Idempotent."""


class Calls(Protocol):
    """Runs calls. The engine's lock is held during every method, except `wait` and `close`."""

    def start(self, request: AsyncCall, value: Any, on_finished: OnFinished, *, after_s: float = 0.0) -> Call:
        """Call the function, after a pause. `on_finished` must be called later, as an event."""

    def set_full(self, operator: str, *, is_full: bool) -> None:
        """Record whether the operator, `<name>@<address>`, can accept no more values."""


class AsyncCalls:
    """The calls of one engine."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._finished: deque[tuple[_AsyncCall, Outcome]] = deque()
        self._has_finished = threading.Event()
        self._full: dict[str, None] = {}
        self._open: set[_AsyncCall] = set()

    @property
    def open_count(self) -> int:
        """Number of calls whose results were not processed."""
        return len(self._open)

    @property
    def full(self) -> tuple[str, ...]:
        """The operators that can take no more values."""
        return tuple(self._full)

    @property
    def is_full(self) -> bool:
        return bool(self._full)

    def set_full(self, operator: str, *, is_full: bool) -> None:
        if is_full:
            self._full[operator] = None
        else:
            self._full.pop(operator, None)

    def start(self, request: AsyncCall, value: Any, on_finished: OnFinished, *, after_s: float = 0.0) -> Call:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="rt-query-calls", daemon=True
            )
            self._thread.start()
        call = _AsyncCall(self, self._loop, on_finished)
        self._open.add(call)
        self._loop.call_soon_threadsafe(call.begin, request, value, after_s)
        return call

    def run_finished(self) -> bool:
        """Report the calls that have finished. Returns whether there were any."""
        self._has_finished.clear()
        found = False
        for _ in range(len(self._finished)):
            call, outcome = self._finished.popleft()
            if call in self._open:
                self._open.remove(call)
                call.on_finished(outcome)
                found = True
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until a call has finished that was not reported yet. Return False at the timeout."""
        return self._has_finished.wait(timeout_s)

    def close(self) -> None:
        """Cancel all calls and end the thread. A function that does not end when cancelled is abandoned."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(2 * _CLOSE_S)
        if thread.is_alive():
            logger.warning("calls_not_ended thread=%s seconds=%s", thread.name, 2 * _CLOSE_S)

    def finish(self, call: _AsyncCall, outcome: Outcome) -> None:
        """Called in the loop's thread."""
        self._finished.append((call, outcome))
        self._has_finished.set()

    def drop(self, call: _AsyncCall) -> None:
        self._open.discard(call)


class _AsyncCall:
    def __init__(self, calls: AsyncCalls, loop: asyncio.AbstractEventLoop, on_finished: OnFinished) -> None:
        self._calls = calls
        self._loop = loop
        self.on_finished = on_finished
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._calls.drop(self)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop)

    def begin(self, request: AsyncCall, value: Any, after_s: float) -> None:
        if not self._is_cancelled:
            self._task = self._loop.create_task(self._run(request, value, after_s))

    async def _run(self, request: AsyncCall, value: Any, after_s: float) -> None:
        deadline = asyncio.timeout(request.timeout_s)
        try:
            await asyncio.sleep(after_s)
            async with deadline:
                outcome = Outcome(await request.awaitable(value))
        except asyncio.CancelledError:
            if self._is_cancelled:
                raise
            outcome = Outcome(error=RtError("the function was cancelled", got=request.function))
        except Exception as error:  # noqa: BLE001 - a user's function
            is_late = isinstance(error, TimeoutError) and deadline.expired()
            outcome = Outcome(error=request.late() if is_late else error)
        except BaseException as error:  # noqa: BLE001 - would end the thread, and all other calls
            outcome = Outcome(error=RtError("the function raised no Exception", got=repr(error)))
        self._calls.finish(self, outcome)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run until `loop.stop`. Then cancel the tasks, and wait for them."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()

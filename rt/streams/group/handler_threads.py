"""Daemon threads in which plain handlers run.

A handler that hangs delays neither the end of `Group.run` nor the exit of the interpreter. At its exit, the
interpreter would join threads of `concurrent.futures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")


class HandlerThreads:
    """At most `count` threads, made when they are needed. For one event loop; `close` it."""

    def __init__(self, count: int) -> None:
        self._count: Final = count
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._made = 0
        self._busy = 0

    async def run(self, act: Callable[[], T]) -> T:
        """Run `act` in a thread; return its result or raise its error. If this call is cancelled, `act`
        continues by itself.
        """
        loop = asyncio.get_running_loop()
        call = _Call(act, loop, loop.create_future())
        self._busy += 1
        call.ended.add_done_callback(self._on_ended)
        if self._made < min(self._busy, self._count):
            name = f"rt-group-{self._made}"
            threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True).start()
            self._made += 1
        self._calls.put(call)
        return await asyncio.shield(call.ended)

    def close(self) -> None:
        """End the threads, each after its call under way."""
        for _ in range(self._made):
            self._calls.put(None)

    def _on_ended(self, ended: asyncio.Future[Any]) -> None:
        self._busy -= 1
        ended.exception()  # The waiting call has it. After a cancellation no call waits.


class _Call(Generic[T]):
    def __init__(
        self, act: Callable[[], T], loop: asyncio.AbstractEventLoop, ended: asyncio.Future[T]
    ) -> None:
        self._act, self._loop, self.ended = act, loop, ended

    def run(self) -> None:
        """In a thread."""
        try:
            result = self._act()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            self._deliver(self.ended.set_exception, error)
        else:
            self._deliver(self.ended.set_result, result)

    def _deliver(self, deliver: Callable[..., None], *result: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(deliver, *result)


def _run_calls(calls: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()

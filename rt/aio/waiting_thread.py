"""The thread that waits for an `rt.aio.Subscriber`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from rt.errors import Closed, closed_in_child

_Result = TypeVar("_Result")


class WaitingThread:
    """One daemon thread that runs one task at a time. It never keeps a process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = 0
        """The process that has the thread; 0 if it was not started."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of its first task."""

    @property
    def is_own(self) -> bool:
        """False in a forked child, which does not have the thread."""
        return self._pid in {0, os.getpid()}

    def require_own(self) -> None:
        """Raise `rt.Closed` in a forked child, or if the running loop is not the loop of the first task."""
        if not self.is_own:
            raise closed_in_child("the subscriber")
        if self._loop not in {None, asyncio.get_running_loop()}:
            raise Closed("the subscriber belongs to another event loop", hint="Open one in each loop.")

    def do(self, act: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Run `act` in the thread; returns a future of the running loop."""
        if not self.is_own:
            raise closed_in_child("the subscriber")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        future.add_done_callback(_looked_at)

        def job() -> None:
            settle: Callable[[Any], None]
            try:
                result: Any = act()
                settle = future.set_result
            except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the result
                result, settle = _storable(error), future.set_exception
            with contextlib.suppress(RuntimeError):  # The loop was closed: no task awaits the result.
                loop.call_soon_threadsafe(_settle, future, settle, result)

        if self._thread is None:
            self._pid, self._loop = os.getpid(), loop
            self._thread = threading.Thread(target=self._run, name="rt-aio", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return future

    def end(self) -> None:
        """End the thread after the tasks queued so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _storable(error: BaseException) -> BaseException:
    """Return the error, which a handler may have raised, in a form that a future accepts.

    A future with `StopIteration` would never end; `CancelledError` would end the waiting task in silence.
    """
    if not isinstance(error, StopIteration | asyncio.CancelledError):
        return error
    stored = RuntimeError(f"on_event raised {type(error).__name__}")
    stored.__cause__ = error
    return stored


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], result: object) -> None:
    if not future.done():
        settle(result)


def _looked_at(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that no task awaits, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()

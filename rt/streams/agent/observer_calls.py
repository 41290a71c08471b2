"""Calls of one observer, which may raise, hang, be cancelled, or change its own subscription.

Invariant: a call raises an `Exception` for any error of the observer, or `CancelledError` if the task that
makes it must end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Final, TypeVar

from rt.streams.core.errors import ConsumerGone, DeliveryFailed, StreamError
from rt.streams.core.stream_id import StreamId
from rt.streams.observer import StreamObserver

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_CANCELLED_S: Final = 5.0
"""How long a cancelled call, or `on_close`, may take, in seconds."""

_CALL: ContextVar[object | None] = ContextVar("rt_streams_call", default=None)
"""The observer call that the current code runs in. Waiting for that call would deadlock."""


class ObserverCalls:
    """One call at a time."""

    __slots__ = ("_begun_at", "_call", "_closing", "_stream", "observer")

    def __init__(self, stream: StreamId, observer: StreamObserver) -> None:
        self._stream = stream
        self.observer = observer
        self._call: object | None = None
        """The call under way."""
        self._begun_at = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def run(self, call: Awaitable[T]) -> T:
        """Await a call of the observer. `DeliveryFailed` if its own task was cancelled."""
        self._call = object()
        self._begun_at = asyncio.get_running_loop().time()
        token = _CALL.set(self._call)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise DeliveryFailed("the consumer's own task was cancelled") from None
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # Such as a panic of an extension module.
            raise DeliveryFailed(f"the consumer raised {type(error).__name__}", got=str(error)) from error
        finally:
            self._call = None
            _CALL.reset(token)

    def age_s(self, now: float) -> float:
        """How long the call under way has lasted at `now`, in the loop's time; 0 if there is none."""
        return 0.0 if self._call is None else now - self._begun_at

    async def report(self, error: StreamError) -> None:
        """Call `on_error`. Only `ConsumerGone` is raised."""
        try:
            await self.run(self.observer.on_error(error))
        except ConsumerGone:
            raise
        except Exception as failure:  # noqa: BLE001 - it was notified
            logger.warning("error_handler_failed stream=%s error=%r", self._stream, failure)

    async def end(self, task: asyncio.Task[None], deadline: float) -> None:
        """End the task that makes the calls. A call under way may last until `deadline`, in the loop's time.

        Does not wait if the observer itself calls it.
        """
        call = self._call
        if call is not None and _CALL.get() is call:
            return
        if call is None:
            task.cancel()
        left = deadline - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.wait([task], timeout=left)
        task.cancel()
        _, stuck = await asyncio.wait([task], timeout=_CANCELLED_S)
        if stuck:
            logger.error("consumer_not_cancelled stream=%s observer=%r", self._stream, self.observer)

    async def close(self) -> None:
        """Call `on_close`. Does not wait for an observer that hangs."""
        self._closing = asyncio.get_running_loop().create_task(self._on_close())
        _, late = await asyncio.wait([self._closing], timeout=_CANCELLED_S)
        if late:
            self._closing.cancel()
            logger.error("consumer_not_closed stream=%s observer=%r", self._stream, self.observer)

    async def _on_close(self) -> None:
        try:
            await self.observer.on_close()
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises; there is no caller to report it to
            logger.warning("consumer_close_failed stream=%s error=%r", self._stream, error)

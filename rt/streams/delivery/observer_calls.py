"""Calls of one observer, which may raise, hang, be cancelled, or change its own subscription.

Invariants:
- A call raises an `Exception` for any error of the observer, or `CancelledError` if the task that makes it
  must end.
- A call is cancelled once, when it has lasted for the time limit. The next call of the same observer starts
  only after it has ended. One timer serves all calls of a queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final, TypeVar

from rt.streams.core.errors import ConsumerGone, DeliveryFailed, StreamError
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.observer import StreamGap, StreamObserver

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_CANCELLED_S: Final = 5.0
"""How long a cancelled call, or `on_close`, may take, in seconds."""

_CALL: ContextVar[object | None] = ContextVar("rt_streams_call", default=None)
"""The observer call that the current code runs in. Waiting for that call would deadlock."""


_RESOLUTION_S: Final = 0.001
"""Time that may be left of a limit because of rounding."""


class CallDeadlines:
    """The deadlines for the calls of one queue. If `limit_s` is `math.inf`, there is no limit."""

    __slots__ = ("_calls", "_timer", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._calls: dict[ObserverCalls, None] = {}
        """In the order in which the calls started."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, calls: ObserverCalls) -> None:
        if self.limit_s == math.inf:
            return
        self._calls[calls] = None
        if self._timer is None:
            self._arm(self.limit_s)

    def end(self, calls: ObserverCalls) -> None:
        self._calls.pop(calls, None)

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._calls:
            oldest = next(iter(self._calls))
            left_s = self.limit_s - oldest.age_s(now)
            if left_s > _RESOLUTION_S:
                self._arm(left_s)
                return
            del self._calls[oldest]
            oldest.cancel()


class ObserverCalls:
    """The calls of one observer, one at a time."""

    __slots__ = ("_call", "_closing", "_deadlines", "_is_late", "_stream", "begun_at", "observer", "task")

    def __init__(self, stream: StreamId, observer: StreamObserver, deadlines: CallDeadlines) -> None:
        self._stream = stream
        self.observer = observer
        self._deadlines = deadlines
        self.task: asyncio.Task[None] | None = None
        """The task that makes the calls, while it runs."""
        self._is_late = False
        """Whether the call under way was cancelled because it lasts too long."""
        self._call: object | None = None
        """The call under way."""
        self.begun_at = 0.0
        """When the last call began, in the loop's time."""
        self._closing: asyncio.Task[None] | None = None

    async def run(self, call: Awaitable[T]) -> T:
        """Await a call of the observer, in `task`. `DeliveryFailed` if it lasts too long, or its own task was
        cancelled.
        """
        self._call = object()
        self.begun_at = asyncio.get_running_loop().time()
        token = _CALL.set(self._call)
        task = self.task
        self._deadlines.begin(self)
        try:
            return await call
        except asyncio.CancelledError:
            is_late, self._is_late = self._is_late, False
            if task is not None and (task.uncancel() if is_late else task.cancelling()):
                raise
            if is_late:
                limit = f"{self._deadlines.limit_s:g} s"
                raise DeliveryFailed("a call of the consumer did not end", expected=limit) from None
            raise DeliveryFailed("the consumer's own task was cancelled") from None
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # Such as a panic of an extension module.
            raise DeliveryFailed(f"the consumer raised {type(error).__name__}", got=str(error)) from error
        finally:
            self._deadlines.end(self)
            self._call = None
            if self._is_late and task is not None:  # It was cancelled, but has ended in another way.
                self._is_late = False
                task.uncancel()
            _CALL.reset(token)

    def cancel(self) -> None:
        """Cancel the call under way, because it lasts too long."""
        if self.task is not None:
            self._is_late = True
            self.task.cancel()

    def age_s(self, now: float) -> float:
        """How long the call under way has lasted at `now`, in the loop's time; 0 if there is none."""
        return 0.0 if self._call is None else now - self.begun_at

    async def report(self, error: StreamError) -> None:
        """Call `on_error`. Only `ConsumerGone` is raised."""
        try:
            await self.run(self.observer.on_error(error))
        except ConsumerGone:
            raise
        except Exception as failure:  # noqa: BLE001 - it was notified
            logger.warning("error_handler_failed stream=%s error=%r", self._stream, failure)

    async def end(self, deadline: float) -> None:
        """End the task that makes the calls. A call under way may last until `deadline`, in the loop's time.

        Does not wait if the observer itself calls it.
        """
        task, call = self.task, self._call
        if task is None or (call is not None and _CALL.get() is call):
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


class LateObserver(StreamObserver):
    """An observer whose factory has failed. `last_token`, the first call of the consumer, calls `make`. It is
    retried until `make` returns an observer.
    """

    def __init__(self, make: Callable[[], StreamObserver]) -> None:
        self._make = make
        self._made: StreamObserver | None = None

    @property
    def takes_single_events(self) -> bool:
        return self._made is not None and self._made.takes_single_events

    async def last_token(self) -> SequenceToken | None:
        if self._made is None:
            self._made = self._make()
        return await self._made.last_token()

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        assert self._made is not None
        return await self._made.on_batch(batch)

    async def on_gap(self, gap: StreamGap) -> None:
        assert self._made is not None
        await self._made.on_gap(gap)

    async def on_error(self, error: StreamError) -> None:
        if self._made is None:
            await super().on_error(error)
        else:
            await self._made.on_error(error)

    async def on_close(self) -> None:
        if self._made is not None:
            await self._made.on_close()

"""`rt.aio.Subscriber`: the subscriber for event loops.

Invariants:
- A thread waits; the loop never blocks.
- Cancelling a call loses no message: messages leave this object in order, each once, and only when a call
  returns them.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from msgspec.structs import replace

import rt.client.subscriber
from rt.aio.waiting_thread import WaitingThread
from rt.client.follow_reader import DeliveryCounter, SubscriberStats, own_deliveries
from rt.endpoints import check_endpoints
from rt.errors import Closed, InvalidOption
from rt.log.read.reader import EventHandler, Place
from rt.log.read.row_delivery import RowDelivery
from rt.log.read.start_position import CheckedPlace, check_place
from rt.log.scan.message_batch import Message, MessageBatch
from rt.option_checks import check_count, check_position, check_timeout
from rt.sidecar.pull_settings import Retention

if TYPE_CHECKING:
    from rt.net.tls import TLS

_Result = TypeVar("_Result")

_TOGETHER = 1000
"""Messages that an iteration delivers before it yields to the loop."""


class Subscriber:
    """Like `rt.Subscriber`, with the same arguments. Opened by `async with`, or by the first call.

    One task at a time reads (`async for`, `poll` and `batches`, which may be mixed). `pause`, `resume`, `ack`
    and `close` may be called from any task of the same loop; in another loop, reading raises `rt.Closed`. If
    `close` is cancelled, the closing continues in its thread. `on_event` is called in the reading thread,
    which is at most one batch ahead of what was delivered.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        endpoints: Sequence[str] = (),
        tls: TLS | None = None,
        position: Place | None = None,
        epoch: int | None = None,
        topics: Collection[str] | None = None,
        on_event: EventHandler | None = None,
        retention: Retention = "follow",
        name: str | None = None,
        connect_timeout: float | None = 5.0,
    ) -> None:
        self.stream, self.name = stream, name
        self._make = partial(
            rt.client.subscriber.Subscriber,
            path,
            stream,
            endpoints=check_endpoints(endpoints),
            tls=tls,
            position=position,
            epoch=epoch,
            topics=topics,
            on_event=on_event,
            retention=retention,
            name=name,
            connect_timeout=connect_timeout,
        )
        self._thread = WaitingThread()
        self._opening: asyncio.Future[rt.client.subscriber.Subscriber] | None = None
        self._subscriber: rt.client.subscriber.Subscriber | None = None
        """Set by the thread."""
        self._reading: asyncio.Future[MessageBatch | None] | None = None
        """The batch that the thread is reading, or has read and no call has received yet."""
        self._left: deque[MessageBatch] = deque()
        """Batches read but not delivered."""
        self._delivery = RowDelivery()
        own_deliveries.add(self._delivery)
        self._messages: Iterator[Message] = iter(())
        """The messages that an iteration is delivering."""
        self._position = 0
        self._counter = DeliveryCounter()
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    @property
    def position(self) -> int:
        """The position of the next message; 0 while it is unknown."""
        position = self._delivery.position
        return self._position if position is None else position

    @property
    def epoch(self) -> int | None:
        """See `rt.Subscriber.epoch`. It may be that of a message that was read and not delivered yet."""
        return None if self._subscriber is None else self._subscriber.epoch

    @property
    def log_end(self) -> int | None:
        """See `rt.Subscriber.log_end`. None before it was opened."""
        return None if self._subscriber is None else self._subscriber.log_end

    def stats(self) -> SubscriberStats:
        """See `rt.Subscriber.stats`: from any thread. `rt.Closed` before it was opened."""
        if self._subscriber is None:
            raise Closed("the subscriber is not open", hint="Use `async with`, or read from it.")
        read = self._subscriber.stats()
        held = [(batch, len(batch)) for batch in tuple(self._left)]
        position = self._position
        if (rest := self._delivery.rest) is not None:
            held.append(rest)
            position = int(rest[0].positions[-rest[1]])
        messages, size = self._counter.delivered(held)
        lag = None if read.log_end is None else max(read.log_end - position, 0)
        return replace(read, messages=messages, bytes=size, position=position, lag=lag)

    def __aiter__(self) -> Self:
        """Iterate over messages until `close`. Waits while paused."""
        return self

    async def __anext__(self) -> Message:
        if not self._running.is_set():
            await self._running.wait()
        while (message := next(self._messages, None)) is None:
            self._thread.require_own()  # Before the loop runs: a child shares the loop with its parent.
            await asyncio.sleep(0)
            batch = await self._next(math.inf, _TOGETHER)
            if batch is None:
                raise StopAsyncIteration
            self._messages = self._delivery.start(batch)
        return message

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Iterate over the same messages in columns."""
        while (batch := await self._next(math.inf, None)) is not None:
            yield batch

    async def next_batch(
        self, timeout: float | None = None, max_messages: int | None = None
    ) -> MessageBatch | None:
        """The next messages in columns; None after `timeout` seconds (None: no limit), or `close`."""
        if max_messages is not None:
            check_count(max_messages, name="max_messages", least=1)
        return await self._next(_deadline(timeout), max_messages)

    async def poll(self, max_messages: int = 1000, timeout: float | None = 1.0) -> list[Message]:
        """Up to `max_messages`, waiting at most `timeout` seconds (None: no limit) for the first.

        Empty while paused, or before there is a log.
        """
        deadline = _deadline(timeout)
        if check_count(max_messages, name="max_messages") == 0:
            return []
        batch = await self._next(deadline, max_messages)
        return [] if batch is None else list(batch.messages())

    def pause(self) -> None:
        """Deliver nothing until `resume`; nothing is lost, and the pull continues."""
        self._running.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._running.set()

    async def seek(self, position: Place) -> None:
        """Continue at `position`, before or after what was delivered. For the task that reads.

        See `rt.Subscriber.seek`.
        """
        start = check_place(position)
        subscriber = await self._opened()
        self._position = before = self.position
        done = self._thread.do(lambda: _sought(subscriber, start, before))
        if self._reading is not None and not self._reading.done():
            subscriber.call_off()
        self._reading = None
        self._take_back()
        for batch in self._left:  # Messages that were read ahead are no longer delivered.
            self._counter.subtract(batch)
        self._left.clear()
        self._messages = iter(())
        self._position = await asyncio.shield(done)

    async def ack(self, position: int) -> None:
        """Record durably that everything below `position` is done. A named subscriber resumes there."""
        self._check_handed_out(position)
        await self._do(lambda subscriber: subscriber.ack(position))

    async def trim(self, position: int) -> None:
        """See `rt.Subscriber.trim`."""
        self._check_handed_out(position)
        await self._do(lambda subscriber: subscriber.trim(position))

    async def close(self) -> None:
        """Stop; another task's iteration ends. Messages not acknowledged are delivered again later."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._thread.is_own:
            return  # Only the parent may close it.
        self._running.set()
        self._position = self.position  # Messages that were read ahead are no longer delivered.
        self._messages = iter(())
        self._take_back()
        try:
            if (subscriber := self._subscriber) is not None:  # Its thread may wait in it.
                await asyncio.shield(asyncio.to_thread(subscriber.close))
            elif self._opening is not None:
                await asyncio.shield(self._thread.do(self._close_opened))
        finally:
            self._thread.end()

    async def __aenter__(self) -> Self:
        try:
            await self._opened()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _opened(self) -> rt.client.subscriber.Subscriber:
        if self._is_closed:
            raise Closed("the subscriber is closed")
        self._thread.require_own()
        if self._opening is None:
            self._opening = self._thread.do(self._open)
            self._opening.add_done_callback(self._begin)
        return await asyncio.shield(self._opening)

    def _begin(self, opening: asyncio.Future[rt.client.subscriber.Subscriber]) -> None:
        """Set the position after the opening, even if the call that opened it was cancelled."""
        if not opening.cancelled() and opening.exception() is None:
            self._position = max(self._position, opening.result().position)

    def _open(self) -> rt.client.subscriber.Subscriber:
        """Called in the thread."""
        subscriber = self._subscriber = self._make()
        return subscriber

    def _close_opened(self) -> None:
        """Called in the thread."""
        if self._subscriber is not None:
            self._subscriber.close()

    async def _next(self, deadline: float, max_messages: int | None) -> MessageBatch | None:
        """Return up to `max_messages`; None at the deadline, or when closed.

        There is no await between the wait and the return, so a cancellation loses no message.
        """
        self._thread.require_own()
        loop = asyncio.get_running_loop()
        try:
            subscriber = await self._opened()
        except Closed:
            return None
        while not self._is_closed:
            left = None if deadline == math.inf else max(0.0, deadline - loop.time())
            if not self._running.is_set():
                try:
                    async with asyncio.timeout(left):
                        await self._running.wait()
                except TimeoutError:
                    return None
                continue
            if (batch := self._take(max_messages)) is not None:
                return batch
            reading = self._reading
            if reading is None:
                reading = self._reading = self._thread.do(subscriber.next_batch)
            await asyncio.wait([reading], timeout=left)
            if not reading.done():
                self._position = max(self._position, subscriber.passed)
                return None
        return None

    def _take(self, max_messages: int | None) -> MessageBatch | None:
        """Return messages that were already read; None if there are none. Raises the thread's error."""
        self._take_back()
        if not self._left and self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            if (read := reading.result()) is not None:
                self._left.append(read)
                self._counter.add(read)
        if not self._left:
            return None
        batch = self._left.popleft()
        if max_messages is not None and len(batch) > max_messages:
            self._left.appendleft(batch.slice(max_messages, len(batch)))
            batch = batch.slice(0, max_messages)
        self._position = int(batch.positions[-1]) + 1
        return batch

    def _take_back(self) -> None:
        """Put back the rows that an interrupted iteration has not delivered."""
        if (rest := self._delivery.take_rest()) is not None:
            self._left.appendleft(rest)

    def _check_handed_out(self, position: int) -> None:
        if not 0 <= check_position(position) <= self.position:
            raise InvalidOption(f"position {position} was not delivered yet: the next is {self.position}")

    async def _do(self, act: Callable[[rt.client.subscriber.Subscriber], _Result]) -> _Result:
        """Run `act` in the thread, and interrupt the wait of the thread."""
        subscriber = await self._opened()
        done = self._thread.do(lambda: act(subscriber))
        if self._reading is not None and not self._reading.done():
            subscriber.call_off()
        return await asyncio.shield(done)


def _sought(subscriber: rt.client.subscriber.Subscriber, start: CheckedPlace, before: int) -> int:
    """Seek, and return the new position. If the seek fails, the subscriber continues at `before`."""
    try:
        subscriber.seek(start)
    except BaseException:
        if subscriber.position > before:
            subscriber.seek(before)  # What was read ahead is read again.
        raise
    return subscriber.position


def _deadline(timeout: float | None) -> float:
    """The deadline in the time of the running loop."""
    timeout = check_timeout(timeout)
    return math.inf if timeout is None else asyncio.get_running_loop().time() + timeout

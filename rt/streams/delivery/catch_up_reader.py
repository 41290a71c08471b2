"""Catch-up: a consumer that the cache has evicted reads its stream from the queue's history.

Invariants:
- While it reads, it holds one of a few read slots, and the result of one read in memory.
- It returns to the cache as soon as the cache has everything that it needs next.
- An unreadable history is retried indefinitely and affects no other consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, TypeVar

from rt.streams.core.event_batch import EventBatch
from rt.streams.delivery.read_slots import ReadSlot
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.queue.adapter import HistoryReader

if TYPE_CHECKING:
    from rt.streams.delivery.consumer import Consumer

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_NOTHING_NEW_S: Final = 0.05
"""The wait after an empty read, in seconds, if more events are expected."""


class _Unreadable(Exception):
    """Wraps the error of the history. Does not leave this module."""


class CatchUpReader:
    """Reads the history for one consumer."""

    __slots__ = ("_consumer", "_failures", "_queue")

    def __init__(self, queue: ServedQueue, consumer: Consumer) -> None:
        self._queue = queue
        self._consumer = consumer
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last try to read the history failed."""
        return self._failures > 0

    @property
    def _is_halted(self) -> bool:
        """Whether the consumer gets nothing now: it stops, or its queue is paused or lost."""
        return self._consumer.is_stopping or self._queue.is_halted

    async def run(self) -> None:
        """Run until the cache has the next events, or other consumers need the slot."""
        try:
            async with self._queue.read_slots.acquire() as slot:
                if not self._has_joined():
                    await self._read(slot)
        except _Unreadable as error:
            self._failures += 1
            self._queue.counts.failures += 1
            stream, wanted = self._consumer.record.stream, self._consumer.wanted
            logger.warning("history_failed stream=%s token=%s error=%r", stream, wanted, error.__cause__)
            await asyncio.sleep(self._queue.backoff(self._failures))

    def _has_joined(self) -> bool:
        """Return to the cache if it has everything from the consumer's position on. Returns whether it
        has.
        """
        consumer = self._consumer
        if not self._queue.cache.covers(consumer.record.stream, consumer.wanted):
            return False
        self._failures = 0
        consumer.join_cache(consumer.wanted)
        return True

    async def _read(self, slot: ReadSlot) -> None:
        queue, stream, wanted = self._queue, self._consumer.record.stream, self._consumer.wanted
        reader = await _of_history(queue.adapter.history(queue.id, stream, wanted))
        try:
            while not self._is_halted and not self._has_joined():
                if not await self._read_on(reader, slot) or slot.is_wanted:
                    return
        finally:
            await _close(reader)

    async def _read_on(self, reader: HistoryReader, slot: ReadSlot) -> bool:
        """Deliver what one read returns. False if the reader is not at the consumer's position."""
        consumer = self._consumer
        before = consumer.wanted
        read = await _of_history(reader.read(self._queue.options.catch_up_events))
        self._failures = 0
        for gap in read.gaps:
            consumer.add_gap(gap)
        pending, end = deque(read.batches), read.end
        del read  # When the slot is given up, `pending` must be the only reference to the events.
        closing: list[asyncio.Task[None]] = []

        def release() -> None:
            pending.clear()
            closing.append(asyncio.ensure_future(_close(reader)))

        while (part := self._next(pending)) is not None:
            if self._is_halted:
                return False
            at = consumer.wanted
            with slot.yielding(release):
                await consumer.hand_out(part)
            if not slot.is_held or consumer.wanted < at or not consumer.is_catching_up:
                return False
        with slot.yielding(release):
            await consumer.report_gaps(end)
        if not slot.is_held or self._is_halted or not consumer.is_catching_up:
            return False
        consumer.pass_over(end)
        if consumer.wanted == before:
            await asyncio.sleep(_NOTHING_NEW_S)
        return True

    def _next(self, pending: deque[EventBatch]) -> EventBatch | None:
        """The next events to deliver; None if there are none."""
        while pending:
            rest = pending[0].from_token(self._consumer.wanted)
            if rest is not None:
                pending[0] = rest
                return rest.slice(0, self._consumer.window)
            pending.popleft()
        return None


async def _of_history(call: Awaitable[T]) -> T:
    try:
        return await call
    except Exception as error:
        raise _Unreadable from error


async def _close(reader: HistoryReader) -> None:
    try:
        await reader.close()
    except Exception as error:  # noqa: BLE001 - nothing depends on it
        logger.warning("history_not_closed error=%r", error)

"""Reading for oneself: a consumer that the cache has left behind follows its stream in the queue's history.

Laws. It holds one of few places while it reads, and one read in memory. It is back in the cache as soon as
that has all that comes next. A history that cannot be read is tried again for ever, and is nobody else's
trouble.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, TypeVar

from rt.streams.adapters import HistoryReader
from rt.streams.batches import EventBatch
from rt.streams.turns import Turn

if TYPE_CHECKING:
    from rt.streams.delivery import Consumer, DeliveryHost

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_NOTHING_NEW_S: Final = 0.05
"""How long to wait where reading again brought nothing, though there is more to come."""


class _Unreadable(Exception):
    """The history raised its cause; never leaves this module."""


class CatchingUp:
    """Of one consumer."""

    __slots__ = ("_consumer", "_failures", "_host")

    def __init__(self, host: DeliveryHost, consumer: Consumer) -> None:
        self._host = host
        self._consumer = consumer
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the history could not be read when that was tried last."""
        return self._failures > 0

    async def run(self) -> None:
        """Until the cache has what comes next, or others want to read."""
        try:
            async with self._host.turns.turn() as turn:
                if not self._has_joined():
                    await self._read(turn)
        except _Unreadable as error:
            self._failures += 1
            self._host.counts.failures += 1
            stream, wanted = self._consumer.record.stream, self._consumer.wanted
            logger.warning("history_failed stream=%s token=%s error=%r", stream, wanted, error.__cause__)
            await asyncio.sleep(self._host.backoff(self._failures))

    def _has_joined(self) -> bool:
        """Back into the cache, if that has all from here on."""
        consumer = self._consumer
        if not self._host.cache.covers(consumer.record.stream, consumer.wanted):
            return False
        self._failures = 0
        consumer.join_cache(consumer.wanted)
        return True

    async def _read(self, turn: Turn) -> None:
        reader = await _of_history(self._host.history(self._consumer))
        try:
            while not self._consumer.is_stopping and not self._has_joined():
                if not await self._read_on(reader, turn) or turn.is_wanted:
                    return
        finally:
            await _close(reader)

    async def _read_on(self, reader: HistoryReader, turn: Turn) -> bool:
        """Hand out what one read brings; False if the reader is not where the consumer is."""
        consumer = self._consumer
        before = consumer.wanted
        read = await _of_history(reader.read(self._host.options.catch_up_events))
        self._failures = 0
        if read.gap is not None:
            consumer.note_gap(read.gap)
        pending, end = deque(read.batches), read.end
        del read  # Where the place is lost, `pending` is all that there is of it.
        closing: list[asyncio.Task[None]] = []

        def let_go() -> None:
            pending.clear()
            closing.append(asyncio.ensure_future(_close(reader)))

        while (part := self._next(pending)) is not None:
            if consumer.is_stopping:
                return False
            at = consumer.wanted
            with turn.lent(let_go):
                await consumer.hand_out(part)
            if not turn.is_held or consumer.wanted < at or not consumer.is_behind:
                return False
        with turn.lent(let_go):
            await consumer.tell_gaps(end)
        if not turn.is_held or consumer.is_stopping or not consumer.is_behind:
            return False
        consumer.pass_over(end)
        if consumer.wanted == before:
            await asyncio.sleep(_NOTHING_NEW_S)
        return True

    def _next(self, pending: deque[EventBatch]) -> EventBatch | None:
        """What to hand out next."""
        while pending:
            rest = pending[0].behind(self._consumer.wanted)
            if rest is not None:
                pending[0] = rest
                return rest.slice(0, self._consumer.tries.events)
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

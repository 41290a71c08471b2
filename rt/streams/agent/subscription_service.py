"""Creates, resumes and ends subscriptions of one queue.

Invariants:
- The position is pinned before anything is awaited.
- A change is durable when its call returns.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4
from weakref import WeakValueDictionary

from rt.streams.agent.consumer import Consumer
from rt.streams.agent.served_queue import ServedQueue
from rt.streams.agent.subscription_store import SubscriptionRecord, SubscriptionStore
from rt.streams.agent.subscription_table import ConsumerFactories, SubscriptionTable
from rt.streams.core.errors import NoSuchSubscription, NotRewindable, QueueElsewhere, StreamError
from rt.streams.core.stream_id import SequenceToken, StartPosition, StreamId, checked_token
from rt.streams.observer import StreamObserver


class SubscriptionService:
    """What an agent offers to the provider."""

    def __init__(
        self,
        queue: ServedQueue,
        table: SubscriptionTable,
        store: SubscriptionStore,
        factories: ConsumerFactories,
    ) -> None:
        self._queue = queue
        self._table = table
        self._store = store
        self._factories = factories
        self._resuming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._dismissing: set[asyncio.Future[None]] = set()

    async def subscribe(
        self,
        stream: StreamId,
        observer: StreamObserver,
        consumer: str | None,
        start: SequenceToken | StartPosition,
    ) -> str:
        """Returns the new subscription's id. If the store cannot be written, there is no subscription."""
        record = SubscriptionRecord(uuid4().hex, stream, consumer)
        is_named = not isinstance(start, StartPosition)
        served = self._table.serve(record, observer, self._start_of(stream, start), is_named=is_named)
        self._store.put(record, served.wanted)
        try:
            await self._store.commit()
        except BaseException:
            self._store.remove(record.id)
            self._table.leave(served)
            await served.close()
            raise
        if self._table.serves(served):
            self._factories.attach(record.id, observer)
            served.begin()
        return record.id

    async def resume(
        self, subscription_id: str, observer: StreamObserver, start: SequenceToken | None
    ) -> None:
        """Continue with another observer, from `start` or the stored position. Clears a fault.

        On `NoSuchSubscription`, `NotRewindable` and `ValueError` nothing has changed. Concurrent calls run
        one after the other.
        """
        resuming = self._resuming.setdefault(subscription_id, asyncio.Lock())
        async with resuming:
            if not self._queue.is_open:
                raise QueueElsewhere(
                    "this host stopped serving the queue during the call", got=subscription_id
                )
            await self._resume(subscription_id, observer, start)

    async def _resume(
        self, subscription_id: str, observer: StreamObserver, start: SequenceToken | None
    ) -> None:
        before = self._table.served.get(subscription_id)
        record = self._store.record(subscription_id) if before is None else before.record
        if record is None:
            raise NoSuchSubscription("no such subscription", got=subscription_id)
        if start is not None:
            start = self._start_of(record.stream, start)
        place = self._store.place(record.id) if before is None else before.wanted
        whole = SubscriptionRecord(record.id, record.stream, record.consumer, record.pattern)
        served = self._table.serve(whole, observer, start or place or self._queue.cache.low())
        self._factories.attach(record.id, observer)
        try:
            if before is not None:
                self._table.leave(before)
                await self._dismiss(before)
                if start is None and self._table.serves(served) and before.wanted != served.wanted:
                    served.go_to(before.wanted)
            if self._table.serves(served):
                self._store.put(whole, served.wanted)
            await self._store.commit()
        finally:
            served.begin()
        if not self._table.serves(served):
            raise NoSuchSubscription("the subscription ended while it was resumed", got=subscription_id)

    async def unsubscribe(self, subscription_id: str) -> None:
        """End it; does nothing if it does not exist. Waits for a call of its observer under way.

        Raises `StreamError` for an implicit subscription whose pattern is registered on this host.
        """
        consumer = self._table.served.get(subscription_id)
        record = self._store.record(subscription_id) if consumer is None else consumer.record
        if record is not None and record.pattern is not None and self._factories.has_pattern(record.pattern):
            hint = "Let the consumer raise ConsumerGone, or do not register the pattern."
            raise StreamError(
                "cannot end an implicit subscription while its pattern is registered", got=record, hint=hint
            )
        self._table.unattended.pop(subscription_id, None)
        self._factories.detach(subscription_id)
        self._store.remove(subscription_id)
        if consumer is not None:
            self._table.leave(consumer)
            await self._dismiss(consumer)
        await self._store.commit()

    def found(self, stream: StreamId) -> list[SubscriptionRecord]:
        """The subscriptions of a stream: served, faulted, or waiting to be resumed."""
        records = {record.id: record for record in self._store.records()}
        records.update((each.record.id, each.record) for each in self._table.served.values())
        return [record for record in records.values() if record.stream == stream]

    async def _dismiss(self, consumer: Consumer) -> None:
        """Wait a limited time for a call under way, then unpin the position, even if the caller is
        cancelled.
        """

        async def dismissed() -> None:
            await consumer.stop(self._queue.now() + self._queue.options.drain_s)
            await consumer.close()

        work = asyncio.ensure_future(dismissed())
        self._dismissing.add(work)
        work.add_done_callback(self._dismissing.discard)
        await asyncio.shield(work)

    def _start_of(self, stream: StreamId, start: SequenceToken | StartPosition) -> SequenceToken:
        cache, is_rewindable = self._queue.cache, self._queue.is_rewindable
        if start is StartPosition.LATEST:
            return cache.end
        if start is StartPosition.EARLIEST_AVAILABLE:
            return SequenceToken(0) if is_rewindable else cache.oldest(stream)
        start = checked_token(start)
        if not is_rewindable and not cache.covers(stream, start):
            wanted = f"{cache.oldest(stream)} or later"
            raise NotRewindable("the queue cannot be read again", where=stream, got=start, expected=wanted)
        return start

"""Creates, resumes and ends subscriptions of one queue.

Invariants:
- The position is pinned before anything is awaited, except the end of the queue.
- A change is durable when its call returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

from msgspec.structs import replace

from rt.objects import CommitUnknown
from rt.streams.agent.subscription_table import SubscriptionTable
from rt.streams.core.delivery import DeliveryOptions
from rt.streams.core.errors import NoSuchSubscription, NotRewindable, QueueElsewhere, StreamError
from rt.streams.core.stream_id import SequenceToken, StartPosition, StreamId, checked_token, stream_of
from rt.streams.delivery.consumer import Consumer
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.observer import StreamObserver
from rt.streams.requests.desk import Undone
from rt.streams.requests.request import PostedRequest, QueueAnswer, QueueRequest
from rt.streams.subscriptions.consumer_factories import ConsumerFactories
from rt.streams.subscriptions.start_place import CheckedStart, Start, check_start, known_start
from rt.streams.subscriptions.subscription_store import SubscriptionRecord, SubscriptionStore, named_id

logger = logging.getLogger("rt.streams")


class _Place(NamedTuple):
    """A start that was found. `is_named`: the caller named its event, so what is missing there is a gap."""

    wanted: SequenceToken
    is_named: bool


_LATEST_S: Final = 5.0
"""How long the queue may take to report its end, in seconds."""


class SubscriptionService:
    """The operations that an agent offers to the provider."""

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
        start: Start,
        name: str | None = None,
        delivery: DeliveryOptions | None = None,
    ) -> str:
        """Returns the subscription's id. If the store cannot be written, there is no new subscription.

        If one of that `name` exists it continues with `observer` where it is, also after a fault.
        """
        checked = check_start(start)
        if name is None:
            record = SubscriptionRecord(uuid4().hex, stream, consumer, created_s=int(time.time()))
            return await self._create(record, observer, await self._found(stream, checked), delivery)
        subscription_id = named_id(name, stream)
        resuming = self._resuming.setdefault(subscription_id, asyncio.Lock())
        async with resuming:
            self._require_open()
            place = None if self.has(subscription_id) else await self._found(stream, checked)
            if place is None or self.has(subscription_id):
                await self._resume(subscription_id, observer, None, consumer, delivery)
                return subscription_id
            record = SubscriptionRecord(
                subscription_id, stream, consumer, name=name, created_s=int(time.time())
            )
            return await self._create(record, observer, place, delivery)

    async def _found(self, stream: StreamId, start: CheckedStart) -> _Place:
        """The start of a subscription. Nothing is awaited after the start is known."""
        if start is StartPosition.LATEST:
            return _Place(await self._latest(), is_named=False)
        known = await known_start(self._queue.adapter, self._queue.id, start)
        self._require_open()
        return _Place(self._start_of(stream, known), is_named=isinstance(known, SequenceToken))

    async def _latest(self) -> SequenceToken:
        """The end of the queue. If the queue does not report it: the end of the events that were read."""
        end = None
        try:
            async with asyncio.timeout(_LATEST_S):
                end = await self._queue.adapter.latest(self._queue.id)
        except Exception as error:  # noqa: BLE001 - the subscription starts earlier
            logger.warning("queue_end_unknown queue=%s error=%r", self._queue.id, error)
        self._require_open()
        return max(self._queue.cache.end, end or self._queue.cache.end)

    def _require_open(self) -> None:
        if not self._queue.is_open:
            raise QueueElsewhere("this host stopped serving the queue during the call", where=self._queue.id)

    async def _create(
        self,
        record: SubscriptionRecord,
        observer: StreamObserver,
        place: _Place,
        delivery: DeliveryOptions | None,
        *,
        and_then: Callable[[], None] | None = None,
        if_undone: Callable[[], None] = lambda: None,
    ) -> str:
        """Create a subscription. `and_then` is for an observer of a factory, and is called in the same step
        as the edits. With `and_then` the edits stay if the result of their commit is unknown. `if_undone` is
        called in the step in which the edits are undone.
        """
        served = self._table.serve(record, observer, place.wanted, is_named=place.is_named, delivery=delivery)

        def undo() -> None:
            self._store.remove(record.id)
            if self._table.serves(served):
                self._table.leave(served)
            if_undone()

        self._store.put(record, served.wanted)
        if and_then is not None:
            and_then()
        try:
            await self._store.commit(undo)
        except BaseException as error:
            is_known = isinstance(error, Exception) and not isinstance(error, CommitUnknown)
            if and_then is None or is_known:
                undo()
                await served.close()
            else:
                served.begin()
            raise
        if self._table.serves(served):
            if and_then is None:
                self._factories.attach(record.id, observer, served.policy.own)
            served.begin()
        return record.id

    async def resume(self, subscription_id: str, observer: StreamObserver, start: Start | None) -> None:
        """Continue with another observer, from `start` or the stored position. Clears a fault.

        On `NoSuchSubscription`, `NotRewindable` and `ValueError` nothing has changed. Concurrent calls run
        one after the other.
        """
        checked = None if start is None else check_start(start)
        resuming = self._resuming.setdefault(subscription_id, asyncio.Lock())
        async with resuming:
            self._require_open()
            place = None
            if checked is not None:
                place = await self._found(self._required(subscription_id).stream, checked)
            await self._resume(subscription_id, observer, place)

    def _required(self, subscription_id: str) -> SubscriptionRecord:
        record = self._record(subscription_id)
        if record is None:
            raise NoSuchSubscription("no such subscription", got=subscription_id)
        return record

    async def _resume(
        self,
        subscription_id: str,
        observer: StreamObserver,
        start: _Place | None,
        consumer: str | None = None,
        delivery: DeliveryOptions | None = None,
    ) -> None:
        before, record = self._table.served.get(subscription_id), self._required(subscription_id)
        if delivery is None:
            delivery = self._factories.delivery(record) if before is None else before.policy.own
        place = self._store.place(record.id) if before is None else before.wanted
        whole = replace(record, fault=None, consumer=consumer or record.consumer)
        wanted = place or self._queue.cache.low() if start is None else start.wanted
        served = self._table.serve(
            whole,
            observer,
            wanted,
            is_named=start is None or start.is_named,
            delivery=delivery,
        )
        self._factories.attach(record.id, observer, served.policy.own)
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

    async def unsubscribe(self, subscription_id: str, and_then: Callable[[], None] = lambda: None) -> None:
        """End the subscription; do nothing if it does not exist. Waits for a call of its observer under way.

        `and_then` is called in the same step as the edits. Raises `StreamError` for an implicit subscription
        whose pattern is registered on this host.
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
        and_then()
        if consumer is not None:
            await self._dismiss(consumer)
        await self._store.commit()

    # Requests of others. An edit and its answer are one step: nothing is awaited in between.

    async def carry_out(
        self, request: QueueRequest, posted: PostedRequest, answer: Callable[[QueueAnswer], None]
    ) -> None:
        """See `rt.streams.requests.desk.CarryOut`."""
        if request.action in ("pause", "continue"):
            await self._pause(request.action == "pause", answer)
        elif request.action == "subscribe":
            await self._subscribe_for(request, posted, answer)
        else:
            lock = self._resuming.setdefault(request.subscription, asyncio.Lock())
            async with lock:
                self._require_open()
                record, place = self._required(request.subscription), None
                if request.action == "end":
                    await self.unsubscribe(record.id, lambda: answer(QueueAnswer(record.id, "ended")))
                    return
                if request.start is not None:
                    place = await self._found(record.stream, request.start)
                    record = self._required(request.subscription)
                if request.needs_consumer:
                    self._require_consumer(record)
                await self._move(record, place, answer, clears_fault=request.action == "resume")

    async def _pause(self, is_paused: bool, answer: Callable[[QueueAnswer], None]) -> None:
        if self._queue.pause(is_paused=is_paused):
            self._store.pause(int(time.time()) if is_paused else None)
            for consumer in list(self._table.served.values()):
                consumer.wake()  # During a pause the consumer only notices the pause.
        answer(QueueAnswer(state="paused" if is_paused else "continued"))
        await self._store.commit()

    async def _subscribe_for(
        self, request: QueueRequest, posted: PostedRequest, answer: Callable[[QueueAnswer], None]
    ) -> None:
        """Make a subscription that a consumer of this host serves. One of that name continues where it is."""
        stream = stream_of(request.topic)
        subscription_id = posted.id.hex() if request.name is None else named_id(request.name, stream)
        lock = self._resuming.setdefault(subscription_id, asyncio.Lock())
        async with lock:
            start = request.start or StartPosition.LATEST
            place = await self._found(stream, check_start(start))
            record = self._record(subscription_id)
            if record is not None:
                whole = replace(record, consumer=request.consumer or record.consumer)
                self._require_consumer(whole)
                await self._move(whole, None, answer, clears_fault=True)
                return
            record = SubscriptionRecord(
                subscription_id, stream, request.consumer, name=request.name, created_s=int(time.time())
            )
            self._require_consumer(record)
            observer = self._table.observer(record)
            if observer is None:
                raise StreamError("this host has no such consumer", got=request.consumer)
            try:
                await self._create(
                    record,
                    observer,
                    place,
                    None,
                    and_then=lambda: answer(QueueAnswer(subscription_id, "served")),
                    if_undone=lambda: self._store.take_back(posted),
                )
            except StreamError:
                raise
            except Exception as error:
                if isinstance(error, CommitUnknown):
                    raise
                raise Undone(str(error)) from error

    async def _move(
        self,
        record: SubscriptionRecord,
        place: _Place | None,
        answer: Callable[[QueueAnswer], None],
        *,
        clears_fault: bool,
    ) -> None:
        """Continue a subscription at `place`; None: where it is. Also if a consumer has it."""
        before = self._table.served.get(record.id)
        whole = replace(record, fault=None) if clears_fault else record
        if place is None and before is not None and whole == before.record:
            answer(QueueAnswer(record.id, "served"))
            await self._store.commit()
            return
        if place is None:
            at = self._store.place(record.id) if before is None else before.wanted
            place = _Place(at or self._queue.cache.low(), is_named=True)
        wanted = place.wanted
        observer = self._table.observer(whole) if whole.fault is None else None
        if before is not None:
            self._table.leave(before)
        served: Consumer | None = None
        state = "faulted"
        if observer is not None:
            delivery = None if before is None else before.policy.own
            served = self._table.serve(whole, observer, wanted, is_named=place.is_named, delivery=delivery)
            wanted, state = served.wanted, "served"
        elif whole.fault is None:
            self._table.unattended[record.id] = None
            state = "unattended"
        self._store.put(whole, wanted)
        answer(QueueAnswer(record.id, state))
        try:
            if before is not None:
                await self._dismiss(before)
        finally:
            if served is not None:
                served.begin()
        await self._store.commit()

    def _require_consumer(self, record: SubscriptionRecord) -> None:
        if not self._factories.has_consumer(record):
            raise StreamError(
                "the host that owns the queue has no consumer for the subscription",
                where=self._queue.id,
                got=record.consumer or record.pattern or "no consumer",
                hint="Name a consumer that all hosts register: `provider.consumer(name, factory)`.",
            )

    def _record(self, subscription_id: str) -> SubscriptionRecord | None:
        served = self._table.served.get(subscription_id)
        return self._store.record(subscription_id) if served is None else served.record

    def has(self, subscription_id: str) -> bool:
        """Whether there is such a subscription here."""
        return subscription_id in self._table.served or self._store.record(subscription_id) is not None

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
        if start is StartPosition.EARLIEST_AVAILABLE:
            return SequenceToken(0) if is_rewindable else cache.oldest(stream)
        start = checked_token(start)
        if not is_rewindable and not cache.covers(stream, start):
            wanted = f"{cache.oldest(stream)} or later"
            raise NotRewindable("the queue cannot be read again", where=stream, got=start, expected=wanted)
        return start

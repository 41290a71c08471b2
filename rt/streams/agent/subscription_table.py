"""The consumers of an agent, by subscription and by stream, and the positions to store for them.

Invariants:
- A new stream gets its implicit consumers in the same step, each at its stored position, so that they miss no
  event.
- A recorded subscription that is not served keeps its position.
- Nothing here waits, except for a commit when a subscription ends.
"""

from __future__ import annotations

import heapq
import logging
from functools import partial

from msgspec import Struct, field

from rt.streams.agent.pattern_starts import PatternStarts
from rt.streams.core.delivery import DeliveryOptions
from rt.streams.core.errors import ConsumerGone, DeliveryFailed
from rt.streams.core.metrics import SUBSCRIPTIONS_MAX, StuckCall, SubscriptionLag
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.delivery.consumer import Consumer
from rt.streams.delivery.observer_calls import LateObserver
from rt.streams.delivery.selective_consumer import SelectiveConsumer
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.event_tracing import TracedObserver
from rt.streams.observer import StreamObserver
from rt.streams.subscriptions.consumer_factories import ConsumerFactories
from rt.streams.subscriptions.subscription_store import SubscriptionRecord, SubscriptionStore, implicit_id

logger = logging.getLogger("rt.streams")


class KnownStream(Struct, eq=False):
    """A stream that had events or has a subscription. `seen_at` is the loop's time."""

    seen_at: float
    has_implicit: bool = False
    """Whether its implicit consumers were created."""
    consumers: list[Consumer] = field(default_factory=list)


class SubscriptionTable:
    """The table of one queue. `factories` are those of the provider on this host."""

    def __init__(
        self,
        queue: ServedQueue,
        store: SubscriptionStore,
        factories: ConsumerFactories,
        starts: PatternStarts,
    ) -> None:
        self._queue = queue
        self._store = store
        self._factories = factories
        self._starts = starts
        self.served: dict[str, Consumer] = {}
        self.streams: dict[StreamId, KnownStream] = {}
        self.catching_up: dict[Consumer, None] = {}
        self._moved: dict[Consumer, None] = {}
        """The consumers whose position differs from the stored one."""
        self.leaving: dict[Consumer, None] = {}
        """Consumers that no longer serve a subscription, but are not closed yet."""
        self._reads_history = False
        """Whether the queue is read at positions that all subscriptions have already passed."""
        self.unattended: dict[str, None] = {}
        """The ids of subscriptions that are recorded, not faulted, and without an observer on this host."""

    # Streams

    def add_stream(self, stream: StreamId, now: float) -> None:
        """An event of the stream was read at `now`: create its missing implicit consumers."""
        known = self.streams.get(stream)
        if known is None or not known.has_implicit:
            self._queue.on_new_stream(stream)
            known = self._stream(stream)
            known.has_implicit = True
            self._serve_implicit(stream)
        known.seen_at = now

    def apply_patterns(self) -> None:
        """Serve the subscriptions that a new pattern gives to the known streams, and the recorded
        subscriptions that waited for the pattern.
        """
        for subscription_id in list(self.unattended):
            record = self._store.record(subscription_id)
            if record is not None and record.is_implicit:
                self.take_over(record)
        for stream in list(self.streams):
            self._serve_implicit(stream)

    def forget_idle(self, inactive_s: float) -> list[Consumer]:
        """Remove streams that had no events for `inactive_s`. Returns their consumers, which pin nothing any
        more.
        """
        gone, now = list[Consumer](), self._queue.now()
        for stream, known in list(self.streams.items()):
            is_quiet = now - known.seen_at >= inactive_s
            if is_quiet and all(self._may_forget(each) for each in known.consumers):
                gone += known.consumers
                del self.streams[stream]
        for consumer in gone:
            self.leave(consumer)
            consumer.cursor.close()
        return gone

    def _may_forget(self, consumer: Consumer) -> bool:
        """Whether the consumer has all events and its position is stored. If it returns, it starts after the
        events that were read by then.
        """
        return (
            consumer.record.is_implicit
            and consumer.is_idle
            and consumer not in self._moved
            and self._store.place(consumer.record.id) is None
            and self._store.record(consumer.record.id) is None
        )

    def _stream(self, stream: StreamId) -> KnownStream:
        known = self.streams.get(stream)
        if known is None:
            known = self.streams[stream] = KnownStream(self._queue.now())
        return known

    def _serve_implicit(self, stream: StreamId) -> None:
        for pattern in self._factories.patterns_of(stream):
            subscription_id = implicit_id(pattern, stream)
            if subscription_id in self.served or self._store.record(subscription_id) is not None:
                continue  # Already served, or faulted.
            record = SubscriptionRecord(subscription_id, stream, None, pattern)
            wanted, is_named = self._store.place(subscription_id), True
            if wanted is None:
                wanted, is_named = self._starts.of(pattern, self._queue.cache.end)
            if (observer := self.observer(record)) is None:
                continue
            consumer = self.serve(record, observer, wanted, is_named=is_named)
            reset = self._queue.recent_reset
            if reset is not None and self._store.place(subscription_id) is None:
                consumer.add_gap(reset, is_late=True)  # It may know events from before the reset.
            consumer.begin()

    # Consumers

    def take_over(self, record: SubscriptionRecord) -> None:
        """Serve a recorded subscription if its observer is known here; otherwise keep its position."""
        place = self._store.place(record.id) or self._store.low or SequenceToken(0)
        if record.fault is not None:
            return
        observer = self.observer(record)
        if observer is not None:
            self.serve(record, observer, place).begin()
        else:
            self._store.put(record, place)
            self.unattended[record.id] = None

    def serve(
        self,
        record: SubscriptionRecord,
        observer: StreamObserver,
        wanted: SequenceToken,
        *,
        is_named: bool = True,
        delivery: DeliveryOptions | None = None,
    ) -> Consumer:
        """Serve a subscription with a new consumer. The position of the consumer is pinned at `wanted` when
        this returns. The consumer gets no events before its `begin` is called. See `Consumer.seat`.
        """
        if delivery is None:
            delivery = self._factories.delivery(record)
        else:
            delivery = delivery.over(self._factories.registered(record))
        if self._queue.tracing is not None:
            observer = TracedObserver(observer, self._queue.tracing, record.label)
        serializer = self._queue.serializers.get(record.stream.namespace)
        if serializer is None and delivery.where is None and delivery.batch_within_s is None:
            consumer = Consumer(self._queue, self, record, observer, delivery)
        else:
            consumer = SelectiveConsumer(self._queue, self, record, observer, delivery, serializer)
        self.unattended.pop(record.id, None)
        self.served[record.id] = consumer
        self._stream(record.stream).consumers.append(consumer)
        consumer.seat(wanted, is_named=is_named)
        for reset in self._store.resets:
            if reset.resumed == consumer.wanted:
                consumer.add_gap(reset)
        self._moved[consumer] = None
        return consumer

    def serves(self, consumer: Consumer) -> bool:
        """Whether this consumer serves its subscription. False after the subscription was resumed or has
        ended.
        """
        return self.served.get(consumer.record.id) is consumer

    def leave(self, consumer: Consumer) -> bool:
        """Stop serving the consumer's subscription with it. Its cursor is already closed or will be closed.
        Returns whether the consumer served the subscription.
        """
        was_served = self.serves(consumer)
        if was_served:
            del self.served[consumer.record.id]
        self.leaving[consumer] = None
        self.catching_up.pop(consumer, None)
        self._moved.pop(consumer, None)
        known = self.streams.get(consumer.record.stream)
        if known is not None and consumer in known.consumers:
            known.consumers.remove(consumer)
        return was_served

    # Reports of consumers

    def on_advanced(self, consumer: Consumer, events: int) -> None:
        """The consumer accepted `events` more events. If it no longer serves its subscription, its position
        is ignored.
        """
        self._queue.counts.delivered += events
        if self.served.get(consumer.record.id) is consumer:
            self._moved[consumer] = None
        self._queue.progressed.set()

    def on_catch_up_started(self, consumer: Consumer) -> None:
        """The consumer started to catch up. Its position must be stored separately from now on."""
        self._queue.counts.catch_ups += 1
        if self.serves(consumer):
            self.catching_up[consumer] = None

    def on_caught_up(self, consumer: Consumer) -> None:
        self.catching_up.pop(consumer, None)

    def on_closed(self, consumer: Consumer) -> None:
        self.leaving.pop(consumer, None)

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault the subscription durably, if this consumer serves it."""
        if self.leave(consumer):
            self._queue.counts.faults += 1
            self._store.fault(consumer.record, str(error)[:1000], consumer.wanted)
            await self._store.commit()
            logger.warning("subscription_faulted stream=%s error=%s", consumer.record.stream, error)

    async def unregister(self, consumer: Consumer) -> None:
        """End the subscription durably, if this consumer serves it."""
        if self.leave(consumer):
            self._factories.detach(consumer.record.id)
            self._store.remove(consumer.record.id)
            await self._store.commit()

    def observer(self, record: SubscriptionRecord) -> StreamObserver | None:
        """The observer of the subscription on this host, if any. If the factory raises, it is called again
        according to the policy.
        """
        try:
            return self._factories.observer(record)
        except Exception as error:  # noqa: BLE001 - whatever a factory raises
            logger.warning("observer_creation_failed stream=%s error=%r", record.stream, error)
            return LateObserver(partial(self._made, record))

    def _made(self, record: SubscriptionRecord) -> StreamObserver:
        observer = self._factories.observer(record)
        if observer is None:
            raise ConsumerGone("there is no factory any more", got=record.label)
        return observer

    def explicit(self, end: SequenceToken) -> list[SubscriptionLag]:
        """The explicit subscriptions that lag furthest behind `end`, the largest lag first."""
        found = list[SubscriptionLag]()
        low = self._store.low or end
        for record in self._store.records():
            if record.is_implicit:
                continue
            consumer = self.served.get(record.id)
            if consumer is None:
                at = self._store.place(record.id) or low
                state = "unattended" if record.fault is None else "faulted"
            else:
                at = max(consumer.wanted, low) if consumer.is_idle else consumer.wanted
                state = self._state_of(consumer)
            lag = max(0, end.sequence_number - at.sequence_number - (at.event_index > 0))
            found.append(SubscriptionLag(lag, record.stream.topic, record.label, state))
        return heapq.nlargest(SUBSCRIPTIONS_MAX, found)

    def stuck_calls(self) -> list[StuckCall]:
        """The consumers that have not advanced past an event for too long."""
        now, limit_s = self._queue.now(), self._queue.options.stuck_after_s
        return [
            StuckCall(age_s, each.record.stream.topic, each.record.label)
            for each in self.served.values()
            if (age_s := each.waited_s(now)) > limit_s
        ]

    def _state_of(self, consumer: Consumer) -> str:
        if consumer.waited_s(self._queue.now()) > self._queue.options.stuck_after_s:
            return "stuck"
        if consumer.is_failing:
            return "failing"
        return "behind" if consumer.is_catching_up else "served"

    # Stored positions

    def record_positions(self, low: SequenceToken) -> None:
        """Store the positions of all consumers. `low` is the position of the consumers in the cache.

        A consumer that is back in the cache may be before the stored `low`. Then its own position is stored,
        as during its catch-up.
        """
        noted = max(low, self._store.low or low)
        before, self._reads_history = self._reads_history, self._queue.cache.end < noted
        if before and not self._reads_history:
            # Idle consumers no longer need a position of their own.
            self._moved.update(dict.fromkeys(self.served.values()))
        places: dict[str, SequenceToken] = {}
        moved, self._moved = self._moved, {}
        for consumer in {**moved, **self.catching_up}:
            if consumer.needs_before(noted):
                self._store.put(consumer.record, consumer.wanted)
                continue
            if consumer.record.is_implicit:
                self._store.unrecord(consumer.record.id)
            if consumer.wanted > noted:
                places[consumer.record.id] = consumer.wanted
        self._store.record_positions(noted, places, lambda each: self._has_all_before(noted, each))
        self._starts.record_ends(self._queue.cache.end, noted)

    def reread_positions(self) -> list[SequenceToken]:
        """The positions of subscriptions that must read events again that the other subscriptions have."""
        places = [self._store.place(each) for each in self.unattended]
        return [consumer.wanted for consumer in self.catching_up] + [
            each for each in places if each is not None
        ]

    def _has_all_before(self, low: SequenceToken, subscription_id: str) -> bool:
        consumer = self.served.get(subscription_id)
        if consumer is not None:
            return not consumer.needs_before(low)
        return self._store.record(subscription_id) is None

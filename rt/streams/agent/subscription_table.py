"""The consumers of an agent, by subscription and by stream, and the positions to store for them.

Invariants:
- A new stream gets its implicit consumers in the same step, each at its stored position, so that they miss no
  event.
- A recorded subscription that is not served keeps its place.
- Nothing here waits, except for a commit when a subscription ends.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from fnmatch import translate

from rt.errors import InvalidOption
from rt.names import check_name
from rt.streams.agent.consumer import Consumer
from rt.streams.agent.served_queue import ServedQueue
from rt.streams.agent.subscription_store import SubscriptionRecord, SubscriptionStore, implicit_id
from rt.streams.core.errors import DeliveryFailed
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.observer import ObserverFactory, StreamObserver

logger = logging.getLogger("rt.streams")


@dataclass(slots=True, eq=False)
class KnownStream:
    """A stream that had events or has a subscription. `seen_at` is the loop's time."""

    seen_at: float
    has_implicit: bool = False
    """Whether its implicit consumers were created."""
    consumers: list[Consumer] = field(default_factory=list)


class ConsumerFactories:
    """The consumers of this host: by subscription, by name, and for every stream of a pattern.

    They outlive the agents: a queue that returns to this host finds them here.
    """

    def __init__(self) -> None:
        self._attached: dict[str, StreamObserver] = {}
        self._factories: dict[str, ObserverFactory] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], ObserverFactory]] = {}

    def add_factory(self, name: str, factory: ObserverFactory) -> None:
        """Use `factory` for subscriptions of consumer `name`. `ValueError` if the name is taken."""
        if self._factories.setdefault(check_name(name, kind="consumer"), factory) is not factory:
            raise InvalidOption(f"consumer {name!r} is already registered")

    def add_pattern(self, name: str, pattern: str, factory: ObserverFactory) -> None:
        """Give every stream whose topic matches a subscription. `ValueError` if the name is taken."""
        if check_name(name, kind="subscription") in self._patterns:
            raise InvalidOption(f"implicit subscription {name!r} is already registered")
        self._patterns[name] = (re.compile(translate(pattern)), factory)

    def attach(self, subscription_id: str, observer: StreamObserver) -> None:
        """Use this observer for the subscription, also after its queue returns to this host."""
        self._attached[subscription_id] = observer

    def detach(self, subscription_id: str) -> None:
        self._attached.pop(subscription_id, None)

    def has_pattern(self, name: str) -> bool:
        return name in self._patterns

    def patterns_of(self, stream: StreamId) -> list[str]:
        """The names of the implicit subscriptions of a stream."""
        return [name for name, (pattern, _) in self._patterns.items() if pattern.fullmatch(stream.topic)]

    def observer(self, record: SubscriptionRecord) -> StreamObserver | None:
        """The observer on this host; None if there is none. Raises what a factory raises."""
        attached = self._attached.get(record.id)
        if attached is not None:
            return attached
        factory: ObserverFactory | None = None
        if record.pattern is not None:
            factory = self._patterns[record.pattern][1] if record.pattern in self._patterns else None
        elif record.consumer is not None:
            factory = self._factories.get(record.consumer)
        return None if factory is None else factory(record.stream)


class SubscriptionTable:
    """The table of one queue. `factories` are those of the provider on this host."""

    def __init__(self, queue: ServedQueue, store: SubscriptionStore, factories: ConsumerFactories) -> None:
        self._queue = queue
        self._store = store
        self._factories = factories
        self.served: dict[str, Consumer] = {}
        self.streams: dict[StreamId, KnownStream] = {}
        self.catching_up: dict[Consumer, None] = {}
        self._moved: dict[Consumer, None] = {}
        """The consumers whose position differs from the stored one."""
        self.leaving: dict[Consumer, None] = {}
        """No longer served, but not closed yet."""
        self.unattended: dict[str, None] = {}
        """Recorded, not faulted, and without an observer on this host."""

    # Streams

    def add_stream(self, stream: StreamId, now: float) -> None:
        """An event of the stream was read at `now`: create its missing implicit consumers."""
        known = self.streams.get(stream)
        if known is None or not known.has_implicit:
            known = self._stream(stream)
            known.has_implicit = True
            self._serve_implicit(stream)
        known.seen_at = now

    def apply_patterns(self) -> None:
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
        """Whether it has everything and that is stored. If it returns, it starts after what was read by
        then.
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
            wanted = self._store.place(subscription_id) or self._queue.cache.end
            if (observer := self._observer(record, wanted)) is not None:
                self.serve(record, observer, wanted).begin()

    # Consumers

    def take_over(self, record: SubscriptionRecord) -> None:
        """Serve a recorded subscription if its observer is known here; otherwise keep its place."""
        place = self._store.place(record.id) or self._store.low or SequenceToken(0)
        if record.fault is not None:
            return
        observer = self._observer(record, place)
        if observer is not None:
            self.serve(record, observer, place).begin()
        elif (left := self._store.record(record.id)) is not None and left.fault is None:
            self._store.put(record, place)
            self.unattended[record.id] = None

    def serve(
        self,
        record: SubscriptionRecord,
        observer: StreamObserver,
        wanted: SequenceToken,
        *,
        is_named: bool = True,
    ) -> Consumer:
        """Its position is pinned at `wanted` when this returns. It gets no events before `begin`. See
        `Consumer.seat`.
        """
        consumer = Consumer(self._queue, self, record, observer)
        self.unattended.pop(record.id, None)
        self.served[record.id] = consumer
        self._stream(record.stream).consumers.append(consumer)
        consumer.seat(wanted, is_named=is_named)
        self._moved[consumer] = None
        return consumer

    def serves(self, consumer: Consumer) -> bool:
        """Whether this consumer serves its subscription. False once that was resumed or has ended."""
        return self.served.get(consumer.record.id) is consumer

    def leave(self, consumer: Consumer) -> bool:
        """Stop serving it; its cursor is already closed or will be. Returns whether it was served."""
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
        """It accepted `events` more events. The position of one that is no longer served is ignored."""
        self._queue.counts.delivered += events
        if self.served.get(consumer.record.id) is consumer:
            self._moved[consumer] = None
        self._queue.progressed.set()

    def on_catch_up_started(self, consumer: Consumer) -> None:
        """Its position must be stored separately from now on."""
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

    def _observer(self, record: SubscriptionRecord, wanted: SequenceToken) -> StreamObserver | None:
        """Its observer on this host, if any. If the factory raises, the subscription is faulted."""
        try:
            return self._factories.observer(record)
        except Exception as error:  # noqa: BLE001 - whatever a factory raises
            logger.warning("observer_creation_failed stream=%s error=%r", record.stream, error)
            self._queue.counts.faults += 1
            self._store.fault(record, f"{type(error).__name__}: {error}"[:1000], wanted)
            return None

    # Stored positions

    def note(self, low: SequenceToken) -> None:
        """Store the positions of all consumers. `low` is the position of those in the cache.

        A consumer back in the cache may be before the stored `low`. Then its place is stored, as while it
        caught up.
        """
        noted = max(low, self._store.low or low)
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
        self._store.note(noted, places, lambda each: self._has_all_before(noted, each))

    def reread_positions(self) -> list[SequenceToken]:
        """The places of subscriptions that must read again what the others have."""
        places = [self._store.place(each) for each in self.unattended]
        return [consumer.wanted for consumer in self.catching_up] + [
            each for each in places if each is not None
        ]

    def _has_all_before(self, low: SequenceToken, subscription_id: str) -> bool:
        consumer = self.served.get(subscription_id)
        if consumer is not None:
            return not consumer.needs_before(low)
        return self._store.record(subscription_id) is None

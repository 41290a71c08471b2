"""The consumers of an agent, by subscription and by stream, and the positions to store for them.

Invariants:
- A new stream gets its implicit consumers in the same step, each at its stored position, so that they miss no
  event.
- A recorded subscription that is not served keeps its place.
- Nothing here waits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rt.streams.agent.consumer import Consumer, DeliveryHost
from rt.streams.agent.consumer_factories import ConsumerFactories
from rt.streams.agent.subscription_store import SubscriptionRecord, SubscriptionStore, implicit_id
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.observer import StreamObserver

logger = logging.getLogger("rt.streams")


@dataclass(slots=True, eq=False)
class KnownStream:
    """A stream that had events or has a subscription. `seen_at` is the loop's time."""

    seen_at: float
    has_implicit: bool = False
    """Whether its implicit consumers were created."""
    consumers: list[Consumer] = field(default_factory=list)


class SubscriptionTable:
    """The table of one agent, `host`. `known` holds the consumers of the provider on this host."""

    def __init__(self, host: DeliveryHost, registry: SubscriptionStore, known: ConsumerFactories) -> None:
        self._host = host
        self._registry = registry
        self._known = known
        self.served: dict[str, Consumer] = {}
        self.streams: dict[StreamId, KnownStream] = {}
        self.catching_up: dict[Consumer, None] = {}
        """The consumers that are catching up."""
        self.moved: dict[Consumer, None] = {}
        """The consumers whose position differs from the stored one."""
        self.leaving: dict[Consumer, None] = {}
        """No longer served, but not closed yet."""
        self.unattended: dict[str, None] = {}
        """Recorded, not faulted, and without an observer on this host."""

    # Streams

    def add_stream(self, stream: StreamId, now: float) -> None:
        """An event of the stream was read: create its missing implicit consumers."""
        known = self.streams.get(stream)
        if known is None or not known.has_implicit:
            known = self._stream(stream, now)
            known.has_implicit = True
            self._serve_implicit(stream, now)
        known.seen_at = now

    def apply_patterns(self, now: float) -> None:
        """Apply a new pattern to the known streams."""
        for stream in list(self.streams):
            self._serve_implicit(stream, now)

    def forget_idle(self, now: float, inactive_s: float) -> list[Consumer]:
        """Remove streams that had no events for `inactive_s`. Returns their consumers, which pin nothing any
        more.
        """
        gone: list[Consumer] = []
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
            and consumer not in self.moved
            and self._registry.place(consumer.record.id) is None
            and self._registry.record(consumer.record.id) is None
        )

    def _stream(self, stream: StreamId, now: float) -> KnownStream:
        known = self.streams.get(stream)
        if known is None:
            known = self.streams[stream] = KnownStream(now)
        return known

    def _serve_implicit(self, stream: StreamId, now: float) -> None:
        for pattern in self._known.patterns_of(stream):
            subscription_id = implicit_id(pattern, stream)
            if subscription_id in self.served or self._registry.record(subscription_id) is not None:
                continue  # Already served, or faulted.
            record = SubscriptionRecord(subscription_id, stream, None, pattern)
            wanted = self._registry.place(subscription_id) or self._host.cache.end
            if (observer := self._observer(record, wanted)) is not None:
                self.serve(record, observer, wanted, now).begin()

    # Consumers

    def take_over(self, record: SubscriptionRecord, now: float) -> None:
        """Serve a recorded subscription if its observer is known here; otherwise keep its place."""
        place = self._registry.place(record.id) or self._registry.low or SequenceToken(0)
        if record.fault is not None:
            return
        observer = self._observer(record, place)
        if observer is not None:
            self.serve(record, observer, place, now).begin()
        elif (left := self._registry.record(record.id)) is not None and left.fault is None:
            self._registry.put(record, place)
            self.unattended[record.id] = None

    def serve(
        self,
        record: SubscriptionRecord,
        observer: StreamObserver,
        wanted: SequenceToken,
        now: float,
        *,
        is_named: bool = True,
    ) -> Consumer:
        """Its position is pinned at `wanted` when this returns. It gets no events before `begin`. See
        `Consumer.seat`.
        """
        consumer = Consumer(self._host, record, observer)
        self.unattended.pop(record.id, None)
        self.served[record.id] = consumer
        self._stream(record.stream, now).consumers.append(consumer)
        consumer.seat(wanted, is_named=is_named)
        self.moved[consumer] = None
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
        self.moved.pop(consumer, None)
        known = self.streams.get(consumer.record.stream)
        if known is not None and consumer in known.consumers:
            known.consumers.remove(consumer)
        return was_served

    def _observer(self, record: SubscriptionRecord, wanted: SequenceToken) -> StreamObserver | None:
        """Its observer on this host, if any. If the factory raises, the subscription is faulted."""
        try:
            return self._known.observer(record)
        except Exception as error:  # noqa: BLE001 - whatever a factory raises
            logger.warning("observer_creation_failed stream=%s error=%r", record.stream, error)
            self._host.counts.faults += 1
            self._registry.fault(record, f"{type(error).__name__}: {error}"[:1000], wanted)
            return None

    # Stored positions

    def note(self, low: SequenceToken) -> None:
        """Store the positions of all consumers. `low` is the position of those in the cache.

        A consumer back in the cache may be before the stored `low`. Then its place is stored, as while it
        caught up.
        """
        noted = max(low, self._registry.low or low)
        places: dict[str, SequenceToken] = {}
        moved, self.moved = self.moved, {}
        for consumer in {**moved, **self.catching_up}:
            if consumer.needs_before(noted):
                self._registry.put(consumer.record, consumer.wanted)
                continue
            if consumer.record.is_implicit:
                self._registry.unrecord(consumer.record.id)
            if consumer.wanted > noted:
                places[consumer.record.id] = consumer.wanted
        self._registry.note(noted, places, lambda each: self._has_all_before(noted, each))

    def reread_positions(self) -> list[SequenceToken]:
        """The places of subscriptions that must read again what the others have."""
        places = [self._registry.place(each) for each in self.unattended]
        return [consumer.wanted for consumer in self.catching_up] + [
            each for each in places if each is not None
        ]

    def _has_all_before(self, low: SequenceToken, subscription_id: str) -> bool:
        consumer = self.served.get(subscription_id)
        if consumer is not None:
            return not consumer.needs_before(low)
        return self._registry.record(subscription_id) is None

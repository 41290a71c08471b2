"""Whom an agent serves: consumers by subscription and by stream, and what the books are to say of them.

Laws. A stream that is met gets its implicit consumers in the same step, each from where it was, so that
nothing passes them by. A subscription that is recorded and not served keeps its place. Nothing here waits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rt.streams.delivery import Consumer, DeliveryHost
from rt.streams.directory import Consumers
from rt.streams.ids import SequenceToken, StreamId
from rt.streams.observing import StreamObserver
from rt.streams.registry import QueueRegistry, SubscriptionRecord, implicit_id

logger = logging.getLogger("rt.streams")


@dataclass(slots=True, eq=False)
class Met:
    """A stream of which something came, or that somebody wants. `seen_at` is the loop's time."""

    seen_at: float
    has_implicit: bool = False
    """Whether its implicit consumers were looked for."""
    consumers: list[Consumer] = field(default_factory=list)


class Roster:
    """Of one agent, `host`. `known` says who consumes what on this host of the provider."""

    def __init__(self, host: DeliveryHost, registry: QueueRegistry, known: Consumers) -> None:
        self._host = host
        self._registry = registry
        self._known = known
        self.served: dict[str, Consumer] = {}
        self.streams: dict[StreamId, Met] = {}
        self.behind: dict[Consumer, None] = {}
        """Those that read for themselves."""
        self.moved: dict[Consumer, None] = {}
        """Those that the books do not know the place of."""
        self.leaving: dict[Consumer, None] = {}
        """Those that are not served any more, and not closed yet."""
        self.unattended: dict[str, None] = {}
        """Recorded, not faulted, and nobody here to consume."""

    # Streams

    def meet(self, stream: StreamId, now: float) -> None:
        """Something came of it: it gets the implicit consumers that it has not yet."""
        met = self.streams.get(stream)
        if met is None or not met.has_implicit:
            met = self._stream(stream, now)
            met.has_implicit = True
            self._serve_implicit(stream, now)
        met.seen_at = now

    def meet_again(self, now: float) -> None:
        """There is another pattern: it counts for the streams that are known, from now on."""
        for stream in list(self.streams):
            self._serve_implicit(stream, now)

    def forget_idle(self, now: float, inactive_s: float) -> list[Consumer]:
        """Streams of which nothing came for long leave the memory; their consumers, who pin nothing more."""
        gone: list[Consumer] = []
        for stream, met in list(self.streams.items()):
            is_quiet = now - met.seen_at >= inactive_s
            if is_quiet and all(self._may_forget(each) for each in met.consumers):
                gone += met.consumers
                del self.streams[stream]
        for consumer in gone:
            self.leave(consumer)
            consumer.cursor.close()
        return gone

    def _may_forget(self, consumer: Consumer) -> bool:
        """Whether it has everything, and the books say so: it comes back behind what was read by then."""
        return (
            consumer.record.is_implicit
            and consumer.is_idle
            and consumer not in self.moved
            and self._registry.place(consumer.record.id) is None
            and self._registry.record(consumer.record.id) is None
        )

    def _stream(self, stream: StreamId, now: float) -> Met:
        met = self.streams.get(stream)
        if met is None:
            met = self.streams[stream] = Met(now)
        return met

    def _serve_implicit(self, stream: StreamId, now: float) -> None:
        for pattern in self._known.patterns_of(stream):
            subscription_id = implicit_id(pattern, stream)
            if subscription_id in self.served or self._registry.record(subscription_id) is not None:
                continue  # Served already, or faulted.
            record = SubscriptionRecord(subscription_id, stream, None, pattern)
            wanted = self._registry.place(subscription_id) or self._host.cache.end
            if (observer := self._observer(record, wanted)) is not None:
                self.serve(record, observer, wanted, now).begin()

    # Consumers

    def take_over(self, record: SubscriptionRecord, now: float) -> None:
        """One that was recorded: it is served if its observer is known here, and keeps its place if not."""
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
        """Pinned at `wanted` when this returns; it is handed nothing before `begin`. See `Consumer.seat`."""
        consumer = Consumer(self._host, record, observer)
        self.unattended.pop(record.id, None)
        self.served[record.id] = consumer
        self._stream(record.stream, now).consumers.append(consumer)
        consumer.seat(wanted, is_named=is_named)
        self.moved[consumer] = None
        return consumer

    def serves(self, consumer: Consumer) -> bool:
        """Whether it is the one by whom its subscription is served; not once it was resumed, or has ended."""
        return self.served.get(consumer.record.id) is consumer

    def leave(self, consumer: Consumer) -> bool:
        """Not served any more; its cursor is closed already, or will be. Whether it was served."""
        was_served = self.serves(consumer)
        if was_served:
            del self.served[consumer.record.id]
        self.leaving[consumer] = None
        self.behind.pop(consumer, None)
        self.moved.pop(consumer, None)
        met = self.streams.get(consumer.record.stream)
        if met is not None and consumer in met.consumers:
            met.consumers.remove(consumer)
        return was_served

    def _observer(self, record: SubscriptionRecord, wanted: SequenceToken) -> StreamObserver | None:
        """Who consumes it here, if anybody does; one that cannot be made is a fault of the subscription."""
        try:
            return self._known.observer(record)
        except Exception as error:  # noqa: BLE001 - whatever a factory raises
            logger.warning("observer_not_made stream=%s error=%r", record.stream, error)
            self._host.counts.faults += 1
            self._registry.fault(record, f"{type(error).__name__}: {error}"[:1000], wanted)
            return None

    # What the books are to say

    def note(self, low: SequenceToken) -> None:
        """Put into the books what everybody has, `low` being what those in the cache have.

        Who came back into the cache may stand before what the books say already: then it is recorded with its
        place, as one that reads for itself.
        """
        noted = max(low, self._registry.low or low)
        places: dict[str, SequenceToken] = {}
        moved, self.moved = self.moved, {}
        for consumer in {**moved, **self.behind}:
            if consumer.lacks_before(noted):
                self._registry.put(consumer.record, consumer.wanted)
                continue
            if consumer.record.is_implicit:
                self._registry.unrecord(consumer.record.id)
            if consumer.wanted > noted:
                places[consumer.record.id] = consumer.wanted
        self._registry.note(noted, places, lambda each: self._has_all_before(noted, each))

    def lacking(self) -> list[SequenceToken]:
        """The places of those that are to read again what the others have."""
        places = [self._registry.place(each) for each in self.unattended]
        return [consumer.wanted for consumer in self.behind] + [each for each in places if each is not None]

    def _has_all_before(self, low: SequenceToken, subscription_id: str) -> bool:
        consumer = self.served.get(subscription_id)
        if consumer is not None:
            return not consumer.lacks_before(low)
        return self._registry.record(subscription_id) is None

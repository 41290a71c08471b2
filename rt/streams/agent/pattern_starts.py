"""Decides where the streams of an implicit subscription start, if the subscription is new to the queue's
subscription store.

    store:    pattern -> the first token that its streams need, or nothing: `low`, as all others
    history   that token is below `low`: the queue is read again from there, and meets its streams
    later     it is at or after `low`: events before it are passed over

Invariants:
- A pattern starts once. Its start is durable before the queue is read. Its streams then continue there.
- While history is read, the stored token is never after the events that were read. So the next owner reads
  the rest.
"""

from __future__ import annotations

from rt.streams.core.stream_id import SequenceToken, StartPosition
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.subscriptions.consumer_factories import ConsumerFactories
from rt.streams.subscriptions.start_place import check_start, known_start
from rt.streams.subscriptions.subscription_store import SubscriptionStore


class PatternStarts:
    """The starts of the patterns in one queue."""

    def __init__(self, queue: ServedQueue, store: SubscriptionStore, factories: ConsumerFactories) -> None:
        self._queue = queue
        self._store = store
        self._factories = factories
        self._low = store.low
        """The `low` of the store before this agent read anything. Streams without a position of their own
        continue there.
        """
        self._places: dict[str, SequenceToken] = {}
        """The starts of patterns that differ from `low`."""

    async def resolve(self) -> None:
        """Record the start of each pattern that is not known yet. Raises errors of the queue."""
        default = self._queue.options.start
        for name, start in self._factories.starts().items():
            if self._store.knows_pattern(name):
                self._set(name, self._store.pattern_place(name))
                continue
            if start is None and default is not None:
                start = check_start(default)
            place: SequenceToken | None = None
            if start is not None:
                found = await known_start(self._queue.adapter, self._queue.id, start)
                place = await self._token(found) if isinstance(found, StartPosition) else found
            elif self._low is None:
                continue  # Recorded by `note`.
            self._set(name, place)

    def _set(self, name: str, place: SequenceToken | None) -> None:
        self._store.put_pattern(name, place)
        if place is None:
            self._places.pop(name, None)
        else:
            self._places[name] = place

    async def _token(self, start: StartPosition) -> SequenceToken | None:
        if start is StartPosition.LATEST:
            return await self._queue.adapter.latest(self._queue.id) or SequenceToken(0)
        return SequenceToken(0) if self._queue.is_rewindable else None

    @property
    def first(self) -> SequenceToken | None:
        """The token from which the queue must be read. None if the patterns do not determine it."""
        if not self._queue.is_rewindable:
            return None
        starts = dict(self._factories.starts())
        found = list(self._places.values())
        if self._low is None:
            # The other patterns start at the oldest event.
            return min(found) if found and len(found) == len(starts) else SequenceToken(0) if found else None
        return min((place for place in found if place < self._low), default=None)

    def of(self, pattern: str, end: SequenceToken) -> tuple[SequenceToken, bool]:
        """The start of a stream of the pattern that has no position of its own, if all events before `end`
        were read. Also whether missing events there are a gap. They are no gap if the stream starts at the
        oldest event that exists.
        """
        place = self._places.get(pattern)
        if place is None:
            return (end if self._low is None else max(end, self._low)), True
        return max(end, place), place > SequenceToken(0)

    def record_ends(self, end: SequenceToken, low: SequenceToken) -> None:
        """Record that all events before `end` were read, and that all streams without a position of their own
        have all events before `low`.
        """
        for name in self._factories.starts():
            place = self._places.get(name)
            if not self._store.knows_pattern(name) or (place is not None and place < low <= end):
                self._set(name, None)
            elif place is not None and place < low:
                self._set(name, max(place, end))

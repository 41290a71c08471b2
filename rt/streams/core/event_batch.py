"""Batches of events: queues return them, caches hold them, consumers get them.

Invariants:
- A batch holds events of one stream, with rising tokens.
- A batch is immutable; a slice shares its memory where possible.
- Between a queue and a consumer only whole batches are handled, never single events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from msgspec import Struct

from rt.log.format.headers import Headers
from rt.streams.core.stream_id import SequenceToken, StreamId


class EventBatch(Struct, frozen=True, eq=False):
    """One or more events of a stream, in columns of equal length.

    Event i has the token (`sequence_numbers[i]`, `event_indexes[i]`). Without `event_indexes` all indexes are
    0. `size_bytes` is the approximate memory of the events. `headers` are those of each event's message;
    None: no event has any.
    """

    stream: StreamId
    sequence_numbers: Sequence[int]
    events: Sequence[Any]
    event_indexes: Sequence[int] | None = None
    size_bytes: int = 0
    headers: Sequence[Headers] | None = None

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[tuple[SequenceToken, Any]]:
        indexes = repeat(0) if self.event_indexes is None else self.event_indexes
        return zip(map(SequenceToken, self.sequence_numbers, indexes), self.events, strict=False)

    @property
    def first(self) -> SequenceToken:
        return self.token(0)

    @property
    def last(self) -> SequenceToken:
        return self.token(-1)

    @property
    def end(self) -> SequenceToken:
        """The first token after its last event."""
        index = 0 if self.event_indexes is None else int(self.event_indexes[-1])
        return SequenceToken(int(self.sequence_numbers[-1]), index + 1)

    def token(self, index: int) -> SequenceToken:
        return SequenceToken(
            int(self.sequence_numbers[index]),
            0 if self.event_indexes is None else int(self.event_indexes[index]),
        )

    def place_of(self, start: SequenceToken) -> int:
        """How many of its events lie before `start`."""
        if self.event_indexes is None:
            find = bisect_right if start.event_index else bisect_left
            return find(self.sequence_numbers, start.sequence_number)
        first = bisect_left(self.sequence_numbers, start.sequence_number)
        if not start.event_index:
            return first
        last = bisect_right(self.sequence_numbers, start.sequence_number, first)
        return bisect_left(self.event_indexes, start.event_index, first, last)

    def slice(self, start: int, stop: int | None = None) -> EventBatch:
        """Events `start` up to, not including, `stop`. There must be at least one."""
        stop = len(self.events) if stop is None else min(stop, len(self.events))
        if start == 0 and stop == len(self.events):
            return self
        assert 0 <= start < stop, (start, stop)
        return EventBatch(
            self.stream,
            self.sequence_numbers[start:stop],
            self.events[start:stop],
            None if self.event_indexes is None else self.event_indexes[start:stop],
            self.size_bytes * (stop - start) // len(self.events),
            None if self.headers is None else self.headers[start:stop],
        )

    def from_token(self, start: SequenceToken) -> EventBatch | None:
        """The events at or after `start`; None if there are none."""
        place = self.place_of(start)
        return self.slice(place) if place < len(self.events) else None


def join(batches: Sequence[EventBatch]) -> EventBatch:
    """Join consecutive batches of one stream."""
    if len(batches) == 1:
        return batches[0]
    indexes: list[int] | None = None
    if any(batch.event_indexes is not None for batch in batches):
        indexes = [
            index for batch in batches for index in (batch.event_indexes or repeat(0, len(batch.events)))
        ]
    headers: list[Headers] | None = None
    if any(batch.headers is not None for batch in batches):
        headers = [one for batch in batches for one in (batch.headers or repeat((), len(batch.events)))]
    return EventBatch(
        batches[0].stream,
        list(chain.from_iterable(batch.sequence_numbers for batch in batches)),
        list(chain.from_iterable(batch.events for batch in batches)),
        indexes,
        sum(batch.size_bytes for batch in batches),
        headers,
    )

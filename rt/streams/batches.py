"""Events in batches: what queues give, caches hold and consumers get.

Laws. A batch is of one stream, its tokens rise. It is never changed: a slice shares what it can. Batches are
what moves on the way from a queue to a consumer; nothing on the way looks at one event.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from rt.streams.ids import SequenceToken, StreamId


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """One or more events of a stream, in columns of one length.

    Event i has the token (`sequence_numbers[i]`, `event_indexes[i]`); no `event_indexes`: all are 0.
    `size_bytes` is about the memory that the events take.
    """

    stream: StreamId
    sequence_numbers: Sequence[int]
    events: Sequence[Any]
    event_indexes: Sequence[int] | None = None
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[tuple[SequenceToken, Any]]:
        indexes = repeat(0) if self.event_indexes is None else self.event_indexes
        return zip(map(SequenceToken, self.sequence_numbers, indexes), self.events, strict=False)

    @property
    def first(self) -> SequenceToken:
        """The token of its first event."""
        return self.token(0)

    @property
    def last(self) -> SequenceToken:
        """The token of its last event."""
        return self.token(len(self.events) - 1)

    @property
    def end(self) -> SequenceToken:
        """The first place behind its last event."""
        return self.last.next

    def token(self, index: int) -> SequenceToken:
        """Of event `index`."""
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
        """Events `start` up to, not including, `stop`, of which there is one at least."""
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
        )

    def behind(self, start: SequenceToken) -> EventBatch | None:
        """The events at or behind `start`; None if there is none."""
        place = self.place_of(start)
        return self.slice(place) if place < len(self.events) else None


def join(batches: Sequence[EventBatch]) -> EventBatch:
    """One batch of several of a stream, each behind the one before."""
    if len(batches) == 1:
        return batches[0]
    indexes: list[int] | None = None
    if any(batch.event_indexes is not None for batch in batches):
        indexes = [
            index for batch in batches for index in (batch.event_indexes or repeat(0, len(batch.events)))
        ]
    return EventBatch(
        batches[0].stream,
        list(chain.from_iterable(batch.sequence_numbers for batch in batches)),
        list(chain.from_iterable(batch.events for batch in batches)),
        indexes,
        sum(batch.size_bytes for batch in batches),
    )

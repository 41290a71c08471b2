"""Converts the columns of a log to batches of events, one per stream, of the topics that a host reads.

Invariants:
- The events of a stream keep their order.
- A message that cannot be split is still delivered, as an `UnreadableMessage`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct

from rt.errors import InvalidOption
from rt.log.format.headers import Headers
from rt.log.read.projection import EVERYTHING, Projection
from rt.log.read.topic_patterns import check_wanted
from rt.log.scan.message_batch import MessageBatch
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId, stream_of

Split: TypeAlias = Callable[[bytes], Sequence[Any]]
"""Splits a message's value into its events, at least one."""

_STREAMS_MAX: Final = 100_000
"""The number of cached stream names."""
_VALUE_BYTES: Final = 64
"""The approximate memory that Python needs for an event besides its bytes."""


class TopicSelection:
    """Topics that match one of `patterns` (`*`, `?`, `[…]`). None: all topics. Raises `rt.InvalidOption`.

    Nodes do not send messages of other topics. If a directory is read, the values of other topics are not
    read.
    """

    def __init__(self, patterns: Collection[str] | None) -> None:
        if isinstance(patterns, str) or (patterns is not None and not patterns):
            expected = "a list of patterns, such as ['trades/*']"
            raise InvalidOption(
                "not patterns of topics", where="topics", got=repr(patterns)[:200], expected=expected
            )
        self._topics = None if patterns is None else check_wanted(patterns)
        self.patterns: Final = () if self._topics is None else self._topics.patterns
        """Empty: all topics."""
        self.interest: Final = EVERYTHING if self._topics is None else Projection(topics=self._topics)

    def has(self, topic: str) -> bool:
        """Whether this host reads the topic."""
        return self._topics is None or topic in self._topics

    def of(self, batch: MessageBatch) -> MessageBatch | None:
        """The messages that this host reads; None if there are none."""
        return batch if self._topics is None else batch.with_topics(self._topics)


class UnreadableMessage(Struct, frozen=True):
    """Stands for a message that `split` could not decode."""

    value: bytes
    reason: str


def position_of(token: SequenceToken, split: Split | None) -> int:
    """The position to read from, to get the event of `token` and the following events."""
    return token.sequence_number + (split is None and token.event_index > 0)


class ReadSizer:
    """Calculates how many messages to request, so that they contain about as many events as there is room
    for.

    Starts with one message, because the number of events per message is unknown. After that, the number at
    most doubles each time.
    """

    def __init__(self, split: Split | None) -> None:
        self._is_even = split is None
        self._messages = 1

    def messages(self, events_max: int) -> int:
        """The number to request for `events_max` events."""
        return events_max if self._is_even else min(self._messages, events_max)

    def brought(self, messages: int, events: int, events_max: int) -> None:
        """Record that `messages` messages contained `events` events."""
        self._messages = max(1, min(2 * messages, messages * events_max // max(events, 1)))


def events_of(batch: MessageBatch, streams: dict[str, StreamId], split: Split | None) -> list[EventBatch]:
    """The events of a batch, by stream. `streams` caches the names across calls."""
    if len(streams) > _STREAMS_MAX:
        streams.clear()
    whole = list(_by_topic(batch, streams))
    return whole if split is None else [_taken_apart(each, split) for each in whole]


def _by_topic(batch: MessageBatch, streams: dict[str, StreamId]) -> Iterator[EventBatch]:
    sizes = np.diff(batch.value_offsets)
    if batch.topic_index is None or len(batch.topic_names) == 1:
        size = int(sizes.sum()) + _VALUE_BYTES * len(batch)
        numbers: Sequence[int] = range(int(batch.positions[0]), batch.end)
        if len(numbers) != len(batch):
            numbers = batch.positions.tolist()
        headers = None if batch.header_table is None else batch.headers
        yield EventBatch(_named(batch.topic_names[0], streams), numbers, batch.values, None, size, headers)
        return
    order = np.argsort(batch.topic_index, kind="stable")
    index = batch.topic_index[order]
    edges = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(order)]
    positions = batch.positions[order].tolist()
    read = batch.values
    places = order.tolist()
    values = [read[place] for place in places]
    of_each = None if batch.header_table is None else batch.headers
    ends = np.concatenate(([0], np.cumsum(sizes[order], dtype=np.int64)))[edges].tolist()
    topics = index[edges[:-1]].tolist()
    for at, topic in enumerate(topics):
        start, stop = edges[at], edges[at + 1]
        size = ends[at + 1] - ends[at] + _VALUE_BYTES * (stop - start)
        stream = _named(batch.topic_names[topic], streams)
        headers = None if of_each is None else [of_each[place] for place in places[start:stop]]
        yield EventBatch(stream, positions[start:stop], values[start:stop], None, size, headers)


def _named(topic: str, streams: dict[str, StreamId]) -> StreamId:
    stream = streams.get(topic)
    if stream is None:
        stream = streams[topic] = stream_of(topic)
    return stream


def _taken_apart(batch: EventBatch, split: Split) -> EventBatch:
    numbers: list[int] = []
    indexes: list[int] = []
    events: list[Any] = []
    headers: list[Headers] = []
    of_each = repeat(()) if batch.headers is None else batch.headers
    for number, value, of_message in zip(batch.sequence_numbers, batch.events, of_each, strict=False):
        carried = _split(split, value)
        numbers += [int(number)] * len(carried)
        indexes += range(len(carried))
        events += carried
        headers += [of_message] * len(carried)
    size = batch.size_bytes + _VALUE_BYTES * len(events)
    return EventBatch(
        batch.stream, numbers, events, indexes, size, None if batch.headers is None else headers
    )


def _split(split: Split, value: bytes) -> Sequence[Any]:
    # The message must not be lost, even if `split` raises.
    try:
        return split(value) or [UnreadableMessage(value, "it carries no event")]
    except Exception as error:  # noqa: BLE001
        return [UnreadableMessage(value, f"{type(error).__name__}: {error}")]

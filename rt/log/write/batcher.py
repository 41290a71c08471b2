"""Collect messages into batches, and make the drafts to encode.

Invariants:
- A message is completely in the batch or not at all. Appending its value adds it, and its number follows from
  the count of values. So a call that is interrupted at any point leaves no partial message.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from rt.errors import InvalidMessage, InvalidOption, MessageTooLarge, TopicTooLong
from rt.log.format.batch import BatchDraft
from rt.log.format.constants import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, TOPIC_BYTES_MAX, TOPICS_MAX, Int64s
from rt.log.format.headers import (
    COPIES_BYTES_MAX,
    SECTION_COST_BYTES,
    SETS_MAX,
    Headers,
    cost_of,
    encode_headers,
)

MESSAGE_COST_BYTES: Final = 16
"""A message's share of the columns: offset 4, timestamp 8, topic index 2, and padding."""
BATCH_COST_BYTES: Final = 64
TOPIC_COST_BYTES: Final = 8
TOGETHER_BYTES: Final = 2**20
"""Batches cut from one call are written together up to this size: large writes are faster."""
TOGETHER_MOST: Final = 256
"""Limit of the number of batches that are written together. Each has up to three buffers, and a write takes
at most 1,024 buffers.
"""


_REST_SHARE: Final = 16


def rest_bytes(batch_bytes: int) -> int:
    """The number of bytes by which the last batch of a call may exceed `batch_bytes`.

    Otherwise each call with `batch_bytes` of values would leave a small batch, with the same costs as a large
    one.
    """
    return min(batch_bytes // _REST_SHARE, BATCH_BYTES_MAX - batch_bytes)


class PendingBatch:
    """The batch that is being collected: its first number, columns, topics and cost."""

    __slots__ = ("bytes", "copies_bytes", "first", "indices", "pairs", "sets", "stamps", "topics", "values")

    def __init__(self, first: int) -> None:
        self.first = first
        self.values: list[bytes] = []
        self.stamps: list[int] = []
        self.indices: list[int] = []
        """The topic index of each message; the bits from 16 on are the number of its headers in `sets`."""
        self.topics: dict[str, int] = {}
        self.bytes = BATCH_COST_BYTES
        self.sets: dict[Headers, int] = {}
        """The different headers, numbered from 1. Number 0 means no headers."""
        self.pairs = 0
        self.copies_bytes = 0
        """The cost of the headers if each message had its own."""

    @property
    def end(self) -> int:
        return self.first + len(self.values)

    def has_room(self, topic: str, size: int, batch_bytes: int, headers: Headers = ()) -> bool:
        """Whether messages of `topic` that cost `size` fit. An empty batch has room for anything."""
        if not self.values:
            return True
        if headers:
            own = cost_of(headers)
            if self.copies_bytes + own > COPIES_BYTES_MAX:
                return False
            if headers not in self.sets:
                if self.pairs + len(headers) >= SETS_MAX:  # A message without headers has a set too.
                    return False
                size += own + SECTION_COST_BYTES
        cost = 0 if topic in self.topics else len(topic.encode()) + TOPIC_COST_BYTES
        return self.bytes + size + cost <= batch_bytes and (cost == 0 or len(self.topics) < TOPICS_MAX)

    def add_topic(self, topic: str) -> int:
        """Add a topic, if it is new; return its index in this batch."""
        if (index := self.topics.get(topic)) is not None:
            return index
        self.bytes += len(topic.encode()) + TOPIC_COST_BYTES
        return self.topics.setdefault(topic, len(self.topics))

    def add_headers(self, headers: Headers) -> int:
        """Add the headers of one message; return their part of the message's entry in `indices`."""
        if not headers:
            return 0
        cost = cost_of(headers)
        self.copies_bytes += cost
        if (known := self.sets.get(headers)) is not None:
            return known << 16
        self.bytes += cost + SECTION_COST_BYTES
        self.pairs += len(headers)
        return self.sets.setdefault(headers, len(self.sets) + 1) << 16

    def add_many(self, values: list[bytes], stamps: list[int], index: int, cost: int) -> None:
        """Add messages of the topic at `index`: all of them or, if interrupted, none."""
        try:
            self.indices += [index] * len(values)
            self.stamps += stamps
            self.values += values
            self.bytes += cost
        except BaseException:
            self.realign()
            raise

    def realign(self) -> None:
        """After an interrupted call: remove column entries without a value."""
        count = len(self.values)
        del self.stamps[count:], self.indices[count:]

    def draft(self) -> BatchDraft:
        """The batch, ready to be encoded.

        The columns are made without numpy, except those of headers: most batches are small and written by a
        thread that has slept. There, numpy takes several times as long.
        """
        assert len(self.values) == len(self.stamps) == len(self.indices), "columns of different lengths"
        return _draft(
            self.values,
            array("i", itertools.accumulate(map(len, self.values), initial=0)),
            array("q", self.stamps),
            (min(self.stamps), max(self.stamps)),
            self.topics,
            self.indices,
            self.sets,
        )


class BulkMessages:
    """Many values of one topic, to be cut into batches."""

    def __init__(self, values: list[bytes], topic: str, stamps: Int64s) -> None:
        self.values = values
        self.topic = topic
        self.stamps = stamps
        self._offsets = offsets_of(values)
        self._costs = self._offsets + np.arange(0, MESSAGE_COST_BYTES * (len(values) + 1), MESSAGE_COST_BYTES)

    def cost(self, start: int) -> int:
        """The cost of the values from `start` on, without their topic."""
        return int(self._costs[-1] - self._costs[start])

    def cut(
        self, start: int, *, after: PendingBatch, batch_bytes: int, together_bytes: int
    ) -> list[BatchDraft]:
        """Batches of up to `batch_bytes`, to be written together. If `after` is not empty, the first batch is
        `after`, filled up with the values from `start` on. The next batches have only the following values. A
        small rest is added to the last batch.

        The list is empty if `after` is empty and the values from `start` on fit into one batch.
        """
        room = batch_bytes - BATCH_COST_BYTES - TOPIC_COST_BYTES - TOPIC_BYTES_MAX
        costs, drafts = self._costs, list[BatchDraft]()
        if after.values:
            joined = self._joining(after, start, batch_bytes)
            drafts.append(self._join(after, start, joined))
            start += joined
        places = [start]
        rest = rest_bytes(batch_bytes)
        while (
            self.cost(places[-1]) > room
            and costs[places[-1]] - costs[start] < together_bytes
            and len(places) <= TOGETHER_MOST
        ):
            stop = int(costs.searchsorted(costs[places[-1]] + room, "right")) - 1
            stop = max(stop, places[-1] + 1)
            is_whole = self.cost(places[-1]) <= room + rest
            places.append(len(self.values) if is_whole else stop)
        return drafts + [self._draft(*place) for place in itertools.pairwise(places)]

    def rest(self, start: int) -> tuple[list[bytes], list[int]]:
        return self.values[start:], self.stamps[start:].tolist()

    def _joining(self, batch: PendingBatch, start: int, batch_bytes: int) -> int:
        """The number of values from `start` on that fit into `batch`, which is not empty."""
        cost = 0 if self.topic in batch.topics else len(self.topic.encode()) + TOPIC_COST_BYTES
        if cost and len(batch.topics) == TOPICS_MAX:
            return 0
        room = batch_bytes - batch.bytes - cost
        if room < self.cost(start) <= room + rest_bytes(batch_bytes):
            return len(self.values) - start
        limit = self._costs[start] + room
        return max(int(self._costs.searchsorted(limit, "right")) - 1 - start, 0)

    def _join(self, batch: PendingBatch, start: int, count: int) -> BatchDraft:
        """`batch` followed by `count` values."""
        if not count:
            return batch.draft()
        own = offsets_of(batch.values)
        added = self._offsets[start + 1 : start + count + 1] - self._offsets[start]
        stamps = np.concatenate([np.array(batch.stamps, np.int64), self.stamps[start : start + count]])
        topics = dict(batch.topics)
        index = topics.setdefault(self.topic, len(topics))
        return _draft(
            batch.values + self.values[start : start + count],
            np.concatenate([own, added + own[-1]]).astype(np.int32),
            stamps,
            _range(stamps),
            topics,
            batch.indices + [index] * count if len(topics) > 1 or batch.sets else (),
            batch.sets,
        )

    def _draft(self, start: int, stop: int) -> BatchDraft:
        offsets = (self._offsets[start : stop + 1] - self._offsets[start]).astype(np.int32)
        stamps = self.stamps[start:stop]
        return _draft(self.values[start:stop], offsets, stamps, _range(stamps), {self.topic: 0}, ())


def _draft(
    values: list[bytes],
    offsets: npt.NDArray[np.int32] | array[int],
    stamps: Int64s | array[int],
    times: tuple[int, int],
    topics: Mapping[str, int],
    indices: Sequence[int],
    sets: Mapping[Headers, int] = MappingProxyType({}),
) -> BatchDraft:
    """`times` is the range of `stamps`. `indices` may be empty if there is only one topic and there are no
    headers.
    """
    if len(topics) > len(values):
        topics, indices = _used_topics(topics, indices)
    headers = b""
    if sets:
        headers = _headers(sets, np.array(indices, np.int64) >> 16)
        indices = [index & 0xFFFF for index in indices]
    return BatchDraft(
        b"".join(values),
        offsets,
        stamps,
        *times,
        [topic.encode() for topic in topics],
        array("H", indices) if len(topics) > 1 else None,
        headers,
    )


def _range(stamps: Int64s) -> tuple[int, int]:
    if stamps.strides == (0,):  # All timestamps are one value.
        return int(stamps[0]), int(stamps[0])
    return int(stamps.min()), int(stamps.max())


def _used_topics(topics: Mapping[str, int], indices: Sequence[int]) -> tuple[dict[str, int], list[int]]:
    """The topics and indices without the topics that interrupted calls left: no reader accepts more topics
    than messages.
    """
    used = sorted({index & 0xFFFF for index in indices})
    names, places = [*topics], {old: new for new, old in enumerate(used)}
    kept = {names[old]: new for old, new in places.items()}
    return kept, [index >> 16 << 16 | places[index & 0xFFFF] for index in indices]


def _headers(sets: Mapping[Headers, int], index: Int64s) -> bytes:
    known: list[Headers] = [(), *sets]
    used, own = np.unique(index, return_inverse=True)
    found = [known[number] for number in used.tolist()]
    return encode_headers(found, own.astype(np.uint16) if len(found) > 1 else None)


def offsets_of(values: Sequence[bytes]) -> Int64s:
    """The offset of each value when the values are joined, and the end of the last. Raises
    `rt.MessageTooLarge`.
    """
    offsets = np.zeros(len(values) + 1, np.int64)
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    np.cumsum(lengths, out=offsets[1:])
    if len(values):
        check_size(int(lengths.max()))
    return offsets


def as_bytes(value: object) -> bytes:
    """A copy of the value as bytes. Raises `TypeError` if it is not a buffer of bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a message's value must be bytes, not {type(value).__name__}: encode it first")


def as_values(values: Iterable[bytes]) -> list[bytes]:
    """The values of a call that publishes many values. `rt.InvalidOption` for a single value, or a mapping.

    The items of these are not values: of a mapping, only the keys would be published.
    """
    if isinstance(values, Mapping | str | bytes | bytearray | memoryview):
        raise InvalidOption(
            "not a series of values",
            where="values",
            got=type(values).__name__,
            expected="a list, or another iterable, of bytes",
            hint="`publish` takes one value. Of a dict, pass the .values().",
        )
    values = values if isinstance(values, list) else list(values)
    return values if set(map(type, values)) <= {bytes} else [as_bytes(value) for value in values]


def check_size(size: int, headers: Headers = (), *, where: str | None = None) -> None:
    """Raise `rt.MessageTooLarge` for a value, with its headers, above the limit."""
    if headers:
        size += cost_of(headers) + SECTION_COST_BYTES
    if size > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(
            "message too large",
            where=where,
            got=f"{size} bytes",
            expected=f"at most {MESSAGE_BYTES_MAX}",
            hint="Split the value.",
        )


def check_topic(topic: str, *, where: str | None = None) -> None:
    """Raise `TypeError`, `rt.InvalidMessage` or `rt.TopicTooLong` for an invalid topic."""
    if not isinstance(topic, str):
        raise TypeError(f"a topic must be str, not {type(topic).__name__}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            "the topic is not valid Unicode",
            where=f"character {error.start}",
            got=ascii(topic)[:200],
            expected="text that UTF-8 can encode",
        ) from error
    if size > TOPIC_BYTES_MAX:
        raise TopicTooLong(
            "topic too long",
            where=where,
            got=f"{size} bytes of UTF-8",
            expected=f"at most {TOPIC_BYTES_MAX}",
        )


def checked_stamp(timestamp_ns: int) -> int:
    """A timestamp as int. Raises `TypeError` or `rt.InvalidMessage` if it is not an int64."""
    stamp = operator.index(timestamp_ns)
    if not -(2**63) <= stamp < 2**63:
        raise InvalidMessage(f"timestamp_ns={stamp} is outside int64: it counts nanoseconds since 1970")
    return stamp


def checked_stamps(timestamps_ns: Sequence[int] | Int64s, count: int) -> Int64s:
    """A copy of the timestamps as a column. `TypeError` or `rt.InvalidMessage` if they are not `count`
    int64s.
    """
    stamps = np.ascontiguousarray(timestamps_ns)
    if stamps.shape != (count,):
        raise InvalidMessage(f"timestamps_ns of shape {stamps.shape} for {count} values")
    if count and stamps.dtype.kind not in "iu":
        raise TypeError(f"timestamps_ns must be whole nanoseconds, not {stamps.dtype}")
    if stamps.dtype == np.uint64 and count and stamps.max() >= 2**63:
        raise InvalidMessage("timestamps_ns is outside int64: it counts nanoseconds since 1970")
    return stamps.astype(np.int64)

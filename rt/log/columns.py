"""Messages in columns: what readers hand out, and how batches become it.

Law: decoding checks every offset and index before it is used, so that bytes with a valid checksum and hostile
contents raise `BadBatch` and never reach past a buffer. A large batch is not copied: its columns are views of
the bytes that were read. Many small batches are decoded together, with a fixed number of numpy calls for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rt.log.batch import BATCH_HEADER_BYTES, BadBatch, BatchHeader, expand
from rt.log.layout import TOPIC_BYTES_MAX, padded

if TYPE_CHECKING:
    import pyarrow

Int64s = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64] | npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

_GROUP_BATCH_BYTES_MAX = 64 * 1024
"""Above it a batch is worth a view of its own; below it, decoding it alone would cost more than its bytes."""
_GROUP_BYTES_MAX = 16 * 2**20
"""What small batches decoded together may come to once they are decompressed."""
_COPY_MEAN_BYTES_MAX = 4096
"""Up to this mean size one bulk copy of all values, then slices of bytes, beats a copy for each value."""


class Message(NamedTuple):
    """One message. In a session log `position` is the message's number."""

    position: int
    timestamp_ns: int
    session: str
    number: int
    topic: str
    value: bytes


_ZERO = bytes(4)
_message = partial(tuple.__new__, Message)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Consecutive messages in columns, all of one length.

    `positions`, `timestamps_ns` (ns since the Unix epoch) and `numbers` are int64. Sessions and topics are
    dictionaries: `session_index[i]` is the place of message i's session in `session_names`, or None where
    there is just one; topics likewise. Message i's value is
    `value_bytes[value_offsets[i]:value_offsets[i + 1]]`. Arrays may be views of a read buffer: treat them as
    read-only.
    """

    positions: Int64s
    timestamps_ns: Int64s
    numbers: Int64s
    session_names: tuple[str, ...]
    session_index: Indices | None
    topic_names: tuple[str, ...]
    topic_index: Indices | None
    value_offsets: npt.NDArray[np.int32]
    value_bytes: memoryview

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def end(self) -> int:
        """One past the last position."""
        return int(self.positions[-1]) + 1

    @property
    def values(self) -> list[bytes]:
        """The values, each copied into bytes of its own."""
        offsets = self.value_offsets.tolist()
        if offsets[-1] - offsets[0] > _COPY_MEAN_BYTES_MAX * len(self):
            return [self.value_bytes[start:end].tobytes() for start, end in pairwise(offsets)]
        data = self.value_bytes.tobytes()
        return [data[start:end] for start, end in pairwise(offsets)]

    @property
    def topics(self) -> list[str]:
        """The topic of each message."""
        return _spread(self.topic_names, self.topic_index, len(self))

    @property
    def sessions(self) -> list[str]:
        """The session of each message."""
        return _spread(self.session_names, self.session_index, len(self))

    def messages(self, positions: Iterator[int] | None = None) -> Iterator[Message]:
        """The messages one by one. `positions`, if given, is where the positions are taken from."""
        rows = zip(
            self.positions.tolist() if positions is None else positions,
            self.timestamps_ns.tolist(),
            repeat(self.session_names[0]) if self.session_index is None else self.sessions,
            self.numbers.tolist(),
            repeat(self.topic_names[0]) if self.topic_index is None else self.topics,
            self.values,
            strict=False,
        )
        return map(_message, rows)

    def slice(self, start: int, stop: int) -> MessageBatch:
        """Messages `start` up to, not including, `stop`; nothing is copied."""
        return MessageBatch(
            self.positions[start:stop],
            self.timestamps_ns[start:stop],
            self.numbers[start:stop],
            self.session_names,
            None if self.session_index is None else self.session_index[start:stop],
            self.topic_names,
            None if self.topic_index is None else self.topic_index[start:stop],
            self.value_offsets[start : stop + 1],
            self.value_bytes,
        )

    def select(self, mask: npt.NDArray[np.bool_]) -> MessageBatch:
        """The messages where `mask` is true; their values are copied together."""
        lengths = np.diff(self.value_offsets)[mask]
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        return MessageBatch(
            self.positions[mask],
            self.timestamps_ns[mask],
            self.numbers[mask],
            self.session_names,
            None if self.session_index is None else self.session_index[mask],
            self.topic_names,
            None if self.topic_index is None else self.topic_index[mask],
            offsets,
            memoryview(b"".join(self._runs(mask))),
        )

    def with_topics(self, wanted: frozenset[str]) -> MessageBatch | None:
        """Only the messages of the `wanted` topics; None if there are none."""
        keep = np.fromiter((name in wanted for name in self.topic_names), np.bool_, len(self.topic_names))
        if keep.all():
            return self
        if self.topic_index is None or not keep.any():
            return None
        mask = keep[self.topic_index]
        return self.select(mask) if mask.any() else None

    def to_arrow(self) -> pyarrow.RecordBatch:
        """A record batch of position, timestamp (ns, UTC), session, number, topic (dictionaries) and value.

        Values, offsets and timestamps are not copied. Needs the extra `rt-transport[arrow]`.
        """
        from rt.log.arrow import record_batch

        return record_batch(self)

    def _runs(self, mask: npt.NDArray[np.bool_]) -> Iterator[memoryview]:
        """The value bytes of each run of consecutive messages in `mask`."""
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        places = self.value_offsets[edges].tolist()
        for start, end in zip(places[::2], places[1::2], strict=True):
            yield self.value_bytes[start:end]


class Placed(NamedTuple):
    """A batch whose checksums hold, at its place in a buffer and in its log.

    `first_position` is the position of the batch's message 0, were it not skipped; the first `skip` messages
    are not part of the log (dedup).
    """

    start: int
    header: BatchHeader
    first_position: int
    skip: int
    session_id: int
    offset: int


def groups(batches: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
    """Cut a run of batches into those to decode together, in order."""
    first, size = 0, 0
    for index, batch in enumerate(batches):
        plain = batch.header.columns_bytes + batch.header.values_bytes
        if index > first and (plain > _GROUP_BATCH_BYTES_MAX or size + plain > _GROUP_BYTES_MAX):
            yield batches[first:index]
            first, size = index, 0
        size += plain
        if plain > _GROUP_BATCH_BYTES_MAX:
            yield batches[first : index + 1]
            first, size = index + 1, 0
    if first < len(batches):
        yield batches[first:]


def decode(buffer: Bytes, batches: Sequence[Placed], sessions: dict[int, str]) -> MessageBatch | None:
    """Decode `batches`, one of the `groups`, from `buffer`; None if every message of them is skipped.

    `BadBatch` for what no writer of ours makes.
    """
    if any(batch.header.flags for batch in batches):
        buffer, batches = _expanded(buffer, batches)
    if len(batches) == 1:
        return _decode_one(buffer, batches[0], sessions)
    return _decode_many(buffer, batches, sessions)


def _expanded(buffer: Bytes, batches: Sequence[Placed]) -> tuple[Bytes, list[Placed]]:
    view, parts, moved, start = buffer.data, [], [], 0
    for batch in batches:
        plain = expand(view[batch.start : batch.start + batch.header.total_bytes], batch.header)
        header = batch.header._replace(
            flags=0,
            total_bytes=len(plain),
            columns_stored=batch.header.columns_bytes,
            values_stored=batch.header.values_bytes,
        )
        parts.append(plain)
        moved.append(batch._replace(start=start, header=header))
        start += len(plain)
    return np.frombuffer(b"".join(parts) if len(parts) > 1 else parts[0], np.uint8), moved


def _decode_one(buffer: Bytes, batch: Placed, sessions: dict[int, str]) -> MessageBatch | None:
    header = batch.header
    count = header.message_count
    at = batch.start + BATCH_HEADER_BYTES
    offsets = buffer[at : at + 4 * (count + 1)].view(np.int32)
    if offsets[0] != 0 or offsets[-1] != header.values_bytes or (np.diff(offsets) < 0).any():
        raise BadBatch("value offsets do not rise from 0 to the end of the values")
    at += padded(4 * (count + 1))
    timestamps_ns = buffer[at : at + 8 * count].view(np.int64)
    at += 8 * count
    topic_index = None
    if header.topic_count > 1:
        topic_index = buffer[at : at + 2 * count].view(np.uint16)
        if topic_index.max() >= header.topic_count:
            raise BadBatch(f"topic index {topic_index.max()} of {header.topic_count} topics")
        at += padded(2 * count)
    topics = _read_topics(
        buffer, at, header.topic_count, batch.start + BATCH_HEADER_BYTES + header.columns_bytes
    )
    values = batch.start + BATCH_HEADER_BYTES + padded(header.columns_stored)
    whole = MessageBatch(
        np.arange(batch.first_position, batch.first_position + count, dtype=np.int64),
        timestamps_ns,
        np.arange(header.first, header.first + count, dtype=np.int64),
        (sessions[batch.session_id],),
        None,
        tuple(topics),
        topic_index,
        offsets,
        buffer.data[values : values + header.values_bytes],
    )
    if batch.skip >= count:
        return None
    return whole.slice(batch.skip, count) if batch.skip else whole


def _decode_many(buffer: Bytes, batches: Sequence[Placed], sessions: dict[int, str]) -> MessageBatch | None:
    starts = np.array([batch.start for batch in batches], np.int64)
    words = _words(buffer)
    counts = words[starts // 4 + 5].astype(np.int64)
    topic_counts = _halves(buffer)[starts // 2 + 9].astype(np.int64)
    values_bytes = words[starts // 4 + 15].astype(np.int64)
    offsets_at = starts + BATCH_HEADER_BYTES
    timestamps_at = offsets_at + (4 * (counts + 1) + 7 & ~7)
    index_at = timestamps_at + 8 * counts
    topics_at = index_at + np.where(topic_counts > 1, 2 * counts + 7 & ~7, 0)

    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offset_place = np.repeat(offsets_at // 4, counts) + within
    ends = words[offset_place + 1].astype(np.int64)
    if (
        words[offsets_at // 4].any()
        or (words[offsets_at // 4 + counts] != values_bytes).any()
        or (ends < words[offset_place]).any()
    ):
        raise BadBatch("value offsets do not rise from 0 to the end of the values")
    value_offsets = np.zeros(len(within) + 1, np.int32)
    value_offsets[1:] = ends + np.repeat(np.cumsum(values_bytes) - values_bytes, counts)

    topic_names, topic_index = _topics_of_many(buffer, batches, topics_at, index_at)
    session_names, session_index = _sessions_of_many(batches, counts, sessions)
    firsts = np.array([batch.first_position for batch in batches], np.int64)
    numbers = np.array([batch.header.first for batch in batches], np.int64)
    whole = MessageBatch(
        np.repeat(firsts, counts) + within,
        _longs(buffer)[np.repeat(timestamps_at // 8, counts) + within],
        np.repeat(numbers, counts) + within,
        session_names,
        session_index,
        topic_names,
        topic_index,
        value_offsets,
        memoryview(b"".join(_values_of(buffer, batches))),
    )
    if not any(batch.skip for batch in batches):
        return whole
    kept = within >= np.repeat(np.array([batch.skip for batch in batches], np.int64), counts)
    return whole.select(kept) if kept.any() else None


def _values_of(buffer: Bytes, batches: Sequence[Placed]) -> list[memoryview]:
    view, parts = buffer.data, []
    for batch in batches:
        start = batch.start + BATCH_HEADER_BYTES + padded(batch.header.columns_stored)
        parts.append(view[start : start + batch.header.values_bytes])
    return parts


def _topics_of_many(
    buffer: Bytes, batches: Sequence[Placed], topics_at: Int64s, index_at: Int64s
) -> tuple[tuple[str, ...], Int64s | None]:
    """One dictionary for all the batches, and each message's place in it."""
    places: dict[str, int] = {}
    indices: list[Int64s] = []
    singles: list[int] = []
    single_counts: list[int] = []

    def flush() -> None:
        if singles:
            indices.append(np.repeat(np.array(singles, np.int64), single_counts))
            singles.clear()
            single_counts.clear()

    for batch, at, index_start in zip(batches, topics_at.tolist(), index_at.tolist(), strict=True):
        header = batch.header
        end = batch.start + BATCH_HEADER_BYTES + header.columns_bytes
        own = [
            places.setdefault(name, len(places)) for name in _read_topics(buffer, at, header.topic_count, end)
        ]
        if header.topic_count == 1:
            singles.append(own[0])
            single_counts.append(header.message_count)
            continue
        flush()
        index = buffer[index_start : index_start + 2 * header.message_count].view(np.uint16)
        if index.max() >= header.topic_count:
            raise BadBatch(f"topic index {index.max()} of {header.topic_count} topics")
        indices.append(np.array(own, np.int64)[index])
    flush()
    return tuple(places), None if len(places) == 1 else np.concatenate(indices)


def _sessions_of_many(
    batches: Sequence[Placed], counts: Int64s, sessions: dict[int, str]
) -> tuple[tuple[str, ...], Int64s | None]:
    places: dict[int, int] = {}
    index = [places.setdefault(batch.session_id, len(places)) for batch in batches]
    names = tuple(sessions[session_id] for session_id in places)
    return names, None if len(names) == 1 else np.repeat(np.array(index, np.int64), counts)


def _read_topics(buffer: Bytes, at: int, count: int, end: int) -> list[str]:
    """The topics whose offsets start at `at`; their bytes must end exactly at `end`."""
    text = at + 4 * (count + 1)
    if text > end:
        raise BadBatch("topics reach beyond the columns")
    raw = buffer[text:end].tobytes()
    try:
        if count == 1:
            if buffer[at : at + 8].tobytes() != _ZERO + len(raw).to_bytes(4, "little"):
                raise BadBatch("topic offsets do not rise from 0 to the end of the topics")
            topics = [raw.decode()]
        else:
            offsets = buffer[at:text].view(np.int32)
            if offsets[0] != 0 or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
                raise BadBatch("topic offsets do not rise from 0 to the end of the topics")
            topics = [raw[start:stop].decode() for start, stop in pairwise(offsets.tolist())]
    except UnicodeDecodeError as error:
        raise BadBatch(f"a topic is not UTF-8: {error}") from error
    if len(raw) > TOPIC_BYTES_MAX and max(len(topic.encode()) for topic in topics) > TOPIC_BYTES_MAX:
        raise BadBatch(f"a topic above {TOPIC_BYTES_MAX} bytes")
    return topics


def _words(buffer: Bytes) -> npt.NDArray[np.int32]:
    return buffer[: len(buffer) & ~3].view(np.int32)


def _halves(buffer: Bytes) -> npt.NDArray[np.uint16]:
    return buffer[: len(buffer) & ~1].view(np.uint16)


def _longs(buffer: Bytes) -> Int64s:
    return buffer[: len(buffer) & ~7].view(np.int64)


def _spread(names: tuple[str, ...], index: Indices | None, count: int) -> list[str]:
    if index is None:
        return [names[0]] * count
    table: Any = names
    return [table[place] for place in index.tolist()]

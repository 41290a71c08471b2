"""How batches become messages in columns.

Law: decoding checks every offset and index before it is used, so that bytes with a valid checksum and hostile
contents raise `BadBatch` and never reach past a buffer. A large batch is not copied: its columns are views of
the bytes that were read. Many small batches are decoded together, with a fixed number of numpy calls for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rt.log.batch import BATCH_HEADER_BYTES, HEADER, BadBatch, BatchHeader, Int64s, expand
from rt.log.layout import TOPIC_BYTES_MAX, padded
from rt.log.messages import Message, MessageBatch

__all__ = [
    "Bytes",
    "Message",
    "MessageBatch",
    "Placed",
    "PlacedRun",
    "decode",
    "decode_runs",
    "groups",
    "topics_of",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

_GROUP_BATCH_BYTES_MAX = 64 * 1024
"""Above it a batch is worth a view of its own; below it, decoding it alone would cost more than its bytes."""
_GROUP_BYTES_MAX = 16 * 2**20
"""What small batches decoded together may come to once they are decompressed."""

_FEW_TOPICS_BYTES_MAX = 512
"""Up to there what was read of topics is kept."""
_TOPICS_TOGETHER_MIN = 32
"""From so many batches on it pays to look whether all have one topic before each is asked."""
_GATHERED_MEAN_BYTES_MAX = 512
"""Up to there a gather costs less than a slice for each batch."""
_NO_VALUES = memoryview(b"")

_BAD_OFFSETS = "value offsets do not rise from 0 to the end of the values"
_BAD_TOPIC_INDEX = "a topic index is not below the number of topics"
_BAD_TIMES = "the time range in the header is not that of the messages"


class Placed(NamedTuple):
    """A batch whose header and checksums hold, at its place in a buffer and in its log.

    `start` is a multiple of 8: frames have such sizes, and buffers start with one. `first_position` is the
    position of the batch's message 0, were it not skipped; the first `skip` messages are not part of the log
    (dedup).
    """

    start: int
    header: BatchHeader
    first_position: int
    skip: int
    session_id: int
    offset: int


class PlacedRun(NamedTuple):
    """Many small batches of one block, verified, uncompressed; arrays have one entry a batch, as in
    `Placed`.
    """

    starts: Int64s
    counts: Int64s
    first_positions: Int64s
    skips: Int64s
    session_id: int
    log_offset: int
    """What a place in the buffer is off its offset in the log."""
    end: int
    """Where the last one ends."""

    def between(self, start: int, end: int) -> PlacedRun | None:
        """The batches with messages from position `start` up to `end`; None if there are none."""
        keep = (self.first_positions < end) & (self.first_positions + self.counts > start)
        if keep.all():
            return self
        if not keep.any():
            return None
        arrays = (self.starts[keep], self.counts[keep], self.first_positions[keep], self.skips[keep])
        return PlacedRun(*arrays, *self[4:])

    def placed(self, data: memoryview) -> list[Placed]:
        """The batches one by one."""
        rows = zip(self.starts.tolist(), self.first_positions.tolist(), self.skips.tolist(), strict=True)
        return [
            Placed(
                start,
                BatchHeader(*HEADER.unpack_from(data, start)),
                first,
                skip,
                self.session_id,
                start + self.log_offset,
            )
            for start, first, skip in rows
        ]


def groups(batches: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
    """Cut a run of batches into those to decode together, in order: a large one alone, small ones bounded."""
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


def decode(
    buffer: Bytes, batches: Sequence[Placed], sessions: dict[int, str], *, values: bool = True
) -> MessageBatch | None:
    """Decode `batches`, one of the `groups`, from `buffer`; None if every message of them is skipped.

    Without `values` they need not be in the buffer, and those of the messages are empty. `BadBatch` for what
    no writer of ours makes.
    """
    if any(batch.header.flags for batch in batches):
        buffer, batches = _expanded(buffer, batches, values)
    if len(batches) == 1:
        return _decode_one(buffer, batches[0], sessions, values)
    return _decode_many(buffer, batches, sessions, values)


def topics_of(data: memoryview, at: int, header: BatchHeader) -> list[str] | None:
    """The topics that the batch at `at`, whose columns verify, names; None if they cannot be read here."""
    if header.flags:
        return None
    count, columns_end = header.message_count, at + BATCH_HEADER_BYTES + header.columns_bytes
    start = at + BATCH_HEADER_BYTES + padded(4 * (count + 1)) + 8 * count
    if header.topic_count > 1:
        start += padded(2 * count)
    try:
        return [*_read_topics(bytes(data[start:columns_end]), header.topic_count)]
    except BadBatch:
        return None


def _expanded(buffer: Bytes, batches: Sequence[Placed], values: bool) -> tuple[Bytes, list[Placed]]:
    plain, headers = expand(buffer.data, [(batch.start, batch.header) for batch in batches], values=values)
    moved, start = [], 0
    for batch, header in zip(batches, headers, strict=True):
        moved.append(batch._replace(start=start, header=header))
        start += header.total_bytes
    return np.frombuffer(plain, np.uint8), moved


def _decode_one(
    buffer: Bytes, batch: Placed, sessions: dict[int, str], with_values: bool
) -> MessageBatch | None:
    header = batch.header
    count = header.message_count
    at = batch.start + BATCH_HEADER_BYTES
    columns_end = at + header.columns_bytes
    offsets = buffer[at : at + 4 * (count + 1)].view(np.int32)
    if not with_values:
        offsets = np.zeros(count + 1, np.int32)
    elif offsets[0] != 0 or offsets[-1] != header.values_bytes or (offsets[1:] < offsets[:-1]).any():
        raise BadBatch(_BAD_OFFSETS)
    at += padded(4 * (count + 1))
    timestamps_ns = buffer[at : at + 8 * count].view(np.int64)
    if timestamps_ns.min() != header.timestamp_low_ns or timestamps_ns.max() != header.timestamp_high_ns:
        raise BadBatch(_BAD_TIMES)
    at += 8 * count
    topic_index = None
    if header.topic_count > 1:
        topic_index = buffer[at : at + 2 * count].view(np.uint16)
        if topic_index.max() >= header.topic_count:
            raise BadBatch(_BAD_TOPIC_INDEX)
        at += padded(2 * count)
    topics = _read_topics(buffer[at:columns_end].tobytes(), header.topic_count)
    values = batch.start + BATCH_HEADER_BYTES + padded(header.columns_bytes)
    whole = MessageBatch(
        np.arange(batch.first_position, batch.first_position + count, dtype=np.int64),
        timestamps_ns,
        np.arange(header.first, header.end, dtype=np.int64),
        (sessions[batch.session_id],),
        None,
        tuple(topics),
        topic_index,
        offsets,
        buffer.data[values : values + header.values_bytes] if with_values else _NO_VALUES,
    )
    if batch.skip >= count:
        return None
    return whole.slice(batch.skip, count) if batch.skip else whole


def _decode_many(
    buffer: Bytes, batches: Sequence[Placed], sessions: dict[int, str], with_values: bool
) -> MessageBatch | None:
    """What `_decode_one` says of each of `batches`, one behind the other."""
    starts, _, first_positions, skips, session_ids, _ = zip(*batches, strict=True)
    group = _Group(buffer, np.array(starts, np.int64))
    positions, skipped = np.array(first_positions, np.int64), np.array(skips, np.int64)
    return group.messages(positions, skipped, group.named(session_ids, sessions), with_values)


def decode_runs(
    buffer: Bytes, runs: Sequence[PlacedRun], sessions: dict[int, str], *, values: bool = True
) -> MessageBatch | None:
    """What `decode` says of all the batches of `runs`, one behind the other."""
    starts, counts, first_positions, skips, session_ids, _, _ = zip(*runs, strict=True)
    group = _Group(buffer, np.concatenate(starts))
    places: dict[int, int] = {}
    index = [places.setdefault(session_id, len(places)) for session_id in session_ids]
    names = tuple(sessions[session_id] for session_id in places)
    messages = [int(each.sum()) for each in counts]
    named = names, None if len(names) == 1 else np.repeat(np.array(index, np.int64), messages)
    return group.messages(np.concatenate(first_positions), np.concatenate(skips), named, values)


class _Group:
    """Batches in a buffer, read together. Arrays have one entry a batch; `within` has one a message.

    Counts and sizes are read from the headers, at the places of the header's diagram.
    """

    def __init__(self, buffer: Bytes, starts: Int64s) -> None:
        self.buffer = buffer
        self.view = buffer.data
        self.halves: npt.NDArray[np.uint16] = buffer[: len(buffer) & -2].view(np.uint16)
        self.words: npt.NDArray[np.int32] = buffer[: len(buffer) & -4].view(np.int32)
        self.longs: Int64s = buffer[: len(buffer) & -8].view(np.int64)
        self.starts = starts
        self.topic_counts = self.halves[(starts + 18) // 2].astype(np.int64)
        self.counts = self.words[(starts + 20) // 4].astype(np.int64)
        columns_bytes = self.words[(starts + 56) // 4]
        self.values_bytes = self.words[(starts + 60) // 4].astype(np.int64)
        self.offsets_at = starts + BATCH_HEADER_BYTES
        self.timestamps_at = self.offsets_at + (4 * self.counts + 11 & -8)
        self.index_at = self.timestamps_at + 8 * self.counts
        self.topics_at = self.index_at + np.where(self.topic_counts > 1, 2 * self.counts + 7 & -8, 0)
        self.columns_end = self.offsets_at + columns_bytes
        self.values_at = self.offsets_at + (columns_bytes + 7 & -8)
        self.firsts = np.cumsum(self.counts) - self.counts
        """The ordinal of each batch's first message in the group; `within` is a message's in its batch."""
        self.within = np.arange(self.counts.sum()) - self.spread(self.firsts)

    def spread(self, entries: Int64s) -> Int64s:
        """Each batch's entry for each of its messages."""
        return np.repeat(entries, self.counts)

    def messages(
        self,
        first_positions: Int64s,
        skips: Int64s,
        named: tuple[tuple[str, ...], Int64s | None],
        with_values: bool,
    ) -> MessageBatch | None:
        """All messages but the skipped ones; None if there are no others."""
        topic_names, topic_index = self.topics()
        whole = MessageBatch(
            self.spread(first_positions) + self.within,
            self.timestamps_ns(),
            self.numbers(),
            *named,
            topic_names,
            topic_index,
            self.value_offsets() if with_values else np.zeros(len(self.within) + 1, np.int32),
            self.values() if with_values else _NO_VALUES,
        )
        if not skips.any():
            return whole
        kept = self.within >= self.spread(skips)
        return whole.select(kept) if kept.any() else None

    def numbers(self) -> Int64s:
        return self.spread(self.longs[(self.starts + 24) // 8]) + self.within

    def value_offsets(self) -> npt.NDArray[np.int32]:
        words, offsets_at = self.words, self.offsets_at // 4
        places = self.spread(offsets_at) + self.within
        ends = words[places + 1]
        if (
            words[offsets_at].any()
            or (words[offsets_at + self.counts] != self.values_bytes).any()
            or (ends < words[places]).any()
        ):
            raise BadBatch(_BAD_OFFSETS)
        offsets = np.zeros(len(ends) + 1, np.int32)
        offsets[1:] = ends + self.spread(np.cumsum(self.values_bytes) - self.values_bytes)
        return offsets

    def values(self) -> memoryview:
        """The values of all batches, behind each other: small ones are gathered in words, as they lie."""
        sizes, total = self.values_bytes, int(self.values_bytes.sum())
        if total <= _GATHERED_MEAN_BYTES_MAX * len(sizes) and not (sizes & 7).any():
            words = sizes // 8
            places = np.arange(total // 8) + np.repeat(self.values_at // 8 - np.cumsum(words) + words, words)
            return self.longs[places].view(np.uint8).data
        ends = (self.values_at + sizes).tolist()
        starts = self.values_at.tolist()
        return memoryview(b"".join([self.view[a:b] for a, b in zip(starts, ends, strict=True)]))

    def timestamps_ns(self) -> Int64s:
        stamps: Int64s = self.longs[self.spread(self.timestamps_at // 8) + self.within]
        lows = np.minimum.reduceat(stamps, self.firsts) == self.longs[(self.starts + 32) // 8]
        highs = np.maximum.reduceat(stamps, self.firsts) == self.longs[(self.starts + 40) // 8]
        if not (lows.all() and highs.all()):
            raise BadBatch(_BAD_TIMES)
        return stamps

    def topics(self) -> tuple[tuple[str, ...], Int64s | None]:
        """One dictionary for all the batches, and each message's place in it.

        Most batches bring the same few dictionaries: each of them is read once.
        """
        if (topic := self._one_topic()) is not None:
            return (topic,), None
        places: dict[str, int] = {}
        known: dict[tuple[int, bytes], int] = {}
        dictionaries: list[int] = []
        dictionary_at: list[int] = []
        sections = (self.topics_at.tolist(), self.columns_end.tolist(), self.topic_counts.tolist())
        for start, end, count in zip(*sections, strict=True):
            raw = bytes(self.view[start:end])
            at = known.get((count, raw))
            if at is None:
                at = known[count, raw] = len(dictionaries)
                dictionaries += [places.setdefault(name, len(places)) for name in _read_topics(raw, count)]
            dictionary_at.append(at)
        index = self.spread(np.array(dictionary_at, np.int64))
        if (self.topic_counts > 1).any():
            topic_counts = self.spread(self.topic_counts)
            many = topic_counts > 1
            own = self.halves[(self.spread(self.index_at // 2) + self.within)[many]]
            if (own >= topic_counts[many]).any():
                raise BadBatch(_BAD_TOPIC_INDEX)
            index[many] += own
        return tuple(places), None if len(places) == 1 else np.array(dictionaries, np.int64)[index]

    def _one_topic(self) -> str | None:
        """The topic of all messages, if all batches have the very same one."""
        sizes = self.columns_end - self.topics_at
        size = int(sizes[0])
        if len(sizes) < _TOPICS_TOGETHER_MIN or (self.topic_counts != 1).any() or (sizes != size).any():
            return None
        raw = self.buffer[self.topics_at[:, None] + np.arange(size)]
        if (raw != raw[0]).any():
            return None
        return _read_topics(raw[0].tobytes(), 1)[0]

    def named(
        self, session_ids: Sequence[int], sessions: dict[int, str]
    ) -> tuple[tuple[str, ...], Int64s | None]:
        """The sessions of the batches, and each message's place among them."""
        places: dict[int, int] = {}
        index = [places.setdefault(session_id, len(places)) for session_id in session_ids]
        names = tuple(sessions[session_id] for session_id in places)
        return names, None if len(names) == 1 else self.spread(np.array(index, np.int64))


def _read_topics(raw: bytes, count: int) -> Sequence[str]:
    """The `count` topics in the last part of the columns: their offsets, then their bytes to the very end.

    Most batches of a log name the same few, which are read once.
    """
    return _few_topics(raw, count) if len(raw) <= _FEW_TOPICS_BYTES_MAX else _topics_in(raw, count)


@lru_cache(maxsize=256)
def _few_topics(raw: bytes, count: int) -> tuple[str, ...]:
    return tuple(_topics_in(raw, count))


def _topics_in(raw: bytes, count: int) -> list[str]:
    offsets = np.frombuffer(raw, np.int32, count + 1)
    text = raw[4 * (count + 1) :]
    if offsets[0] != 0 or offsets[-1] != len(text) or (offsets[1:] < offsets[:-1]).any():
        raise BadBatch("topic offsets do not rise from 0 to the end of the topics")
    if len(text) > TOPIC_BYTES_MAX and np.diff(offsets).max() > TOPIC_BYTES_MAX:
        raise BadBatch(f"a topic above {TOPIC_BYTES_MAX} bytes")
    try:
        return [text[start:end].decode() for start, end in pairwise(offsets.tolist())]
    except UnicodeDecodeError as error:
        raise BadBatch(f"a topic is not UTF-8: {error}") from error

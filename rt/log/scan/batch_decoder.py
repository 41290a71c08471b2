"""Decode batches into messages in columns.

A large batch is not copied: its columns are views of the bytes that were read. Many small batches are decoded
together, with a fixed number of numpy calls for all.

Invariants:
- Every offset and index is checked before use. Hostile contents with a valid checksum raise `BadBatch` and
  never cause an access outside a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rt.log.format.batch import BATCH_HEADER_BYTES, HEADER, BadBatch, BatchHeader, Int64s, expand
from rt.log.format.constants import TOPIC_BYTES_MAX, padded
from rt.log.scan.message_batch import Message, MessageBatch

__all__ = [
    "Bytes",
    "Message",
    "MessageBatch",
    "PlacedBatch",
    "PlacedRun",
    "decode",
    "decode_runs",
    "groups",
    "topics_of",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

_GROUP_BATCH_BYTES_MAX = 64 * 1024
"""Larger batches get views of their own. Decoding a smaller one alone would cost more than its bytes."""
_GROUP_BYTES_MAX = 16 * 2**20
"""Limit of the decompressed size of small batches that are decoded together."""

_FEW_TOPICS_BYTES_MAX = 512
"""Up to this size, decoded topics are cached."""
_TOPICS_TOGETHER_MIN = 32
"""From this many batches on, first check whether all have the same topic."""
_GATHERED_MEAN_BYTES_MAX = 512
"""Up to this mean size, one gather costs less than a slice for each batch."""
_NO_VALUES = memoryview(b"")

_BAD_OFFSETS = "value offsets do not rise from 0 to the end of the values"
_BAD_TOPIC_INDEX = "a topic index is not below the number of topics"
_BAD_TIMES = "the time range in the header differs from the messages"


class PlacedBatch(NamedTuple):
    """A batch with valid header and checksums, at its place in a buffer and in its log.

    `start` is a multiple of 8: frames have such sizes, and buffers start with one. `first_position` is the
    position of the batch's message 0 if it were not skipped; the first `skip` messages are not part of the
    log (dedup).
    """

    start: int
    header: BatchHeader
    first_position: int
    skip: int
    session_id: int
    run: int
    """The run of the source segment."""
    offset: int


class PlacedRun(NamedTuple):
    """Many small batches of one block, verified, uncompressed. Arrays have one entry per batch, as in
    `PlacedBatch`.
    """

    starts: Int64s
    counts: Int64s
    first_positions: Int64s
    skips: Int64s
    session_id: int
    run: int
    log_offset: int
    """Offset in the log minus offset in the buffer."""
    end: int
    """The end of the last batch."""

    def between(self, start: int, end: int) -> PlacedRun | None:
        """The batches with messages from position `start` to `end` (exclusive); None if there are none."""
        keep = (self.first_positions < end) & (self.first_positions + self.counts > start)
        if keep.all():
            return self
        if not keep.any():
            return None
        arrays = (self.starts[keep], self.counts[keep], self.first_positions[keep], self.skips[keep])
        return PlacedRun(*arrays, *self[4:])

    def placed(self, data: memoryview) -> list[PlacedBatch]:
        """The batches one by one."""
        rows = zip(self.starts.tolist(), self.first_positions.tolist(), self.skips.tolist(), strict=True)
        return [
            PlacedBatch(
                start,
                BatchHeader(*HEADER.unpack_from(data, start)),
                first,
                skip,
                self.session_id,
                self.run,
                start + self.log_offset,
            )
            for start, first, skip in rows
        ]


def groups(batches: Sequence[PlacedBatch]) -> Iterator[Sequence[PlacedBatch]]:
    """Split batches into groups to decode together, in order: large ones alone, small ones up to a limit."""
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
    buffer: Bytes, batches: Sequence[PlacedBatch], sessions: dict[int, str], *, values: bool = True
) -> MessageBatch | None:
    """Decode `batches`, one of the `groups`, from `buffer`; None if all their messages are skipped.

    Without `values` the buffer need not hold them, and the messages' values are empty. Raises `BadBatch` for
    contents that no rt writer produces.
    """
    if any(batch.header.flags for batch in batches):
        buffer, batches = _expanded(buffer, batches, values)
    if len(batches) == 1:
        return _decode_one(buffer, batches[0], sessions, values)
    return _decode_many(buffer, batches, sessions, values)


def topics_of(data: memoryview, at: int, header: BatchHeader) -> list[str] | None:
    """The topics of the batch at `at`, whose columns verify; None if they cannot be read here."""
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


def _expanded(buffer: Bytes, batches: Sequence[PlacedBatch], values: bool) -> tuple[Bytes, list[PlacedBatch]]:
    plain, headers = expand(buffer.data, [(batch.start, batch.header) for batch in batches], values=values)
    moved, start = [], 0
    for batch, header in zip(batches, headers, strict=True):
        moved.append(batch._replace(start=start, header=header))
        start += header.total_bytes
    return np.frombuffer(plain, np.uint8), moved


def _decode_one(
    buffer: Bytes, batch: PlacedBatch, sessions: dict[int, str], with_values: bool
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
        (batch.run,),
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
    buffer: Bytes, batches: Sequence[PlacedBatch], sessions: dict[int, str], with_values: bool
) -> MessageBatch | None:
    """The results of `_decode_one` for `batches`, joined."""
    starts, _, first_positions, skips, session_ids, runs, _ = zip(*batches, strict=True)
    group = _Group(buffer, np.array(starts, np.int64))
    positions, skipped = np.array(first_positions, np.int64), np.array(skips, np.int64)
    return group.messages(positions, skipped, group.named(session_ids, runs, sessions), with_values)


def decode_runs(
    buffer: Bytes, runs: Sequence[PlacedRun], sessions: dict[int, str], *, values: bool = True
) -> MessageBatch | None:
    """The results of `decode` for all batches of `runs`, joined."""
    starts, counts, first_positions, skips, session_ids, source_runs, _, _ = zip(*runs, strict=True)
    group = _Group(buffer, np.concatenate(starts))
    dictionary, index = _dictionary(session_ids, source_runs, sessions)
    messages = [int(each.sum()) for each in counts]
    named = *dictionary, None if index is None else np.repeat(index, messages)
    return group.messages(np.concatenate(first_positions), np.concatenate(skips), named, values)


class _Group:
    """Batches in a buffer, read together. Arrays have one entry per batch; `within` has one per message.

    Counts and sizes are read from the headers, at the offsets of the header's diagram.
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
        """Repeat each batch's entry for each of its messages."""
        return np.repeat(entries, self.counts)

    def messages(
        self,
        first_positions: Int64s,
        skips: Int64s,
        named: tuple[tuple[str, ...], tuple[int, ...], Int64s | None],
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
        """The values of all batches, joined: small ones are gathered in words."""
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
        """One dictionary for all batches, and each message's index in it.

        Most batches have the same few dictionaries, so each is read once.
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
        """The topic of all messages, if all batches have the same single one."""
        sizes = self.columns_end - self.topics_at
        size = int(sizes[0])
        if len(sizes) < _TOPICS_TOGETHER_MIN or (self.topic_counts != 1).any() or (sizes != size).any():
            return None
        raw = self.buffer[self.topics_at[:, None] + np.arange(size)]
        if (raw != raw[0]).any():
            return None
        return _read_topics(raw[0].tobytes(), 1)[0]

    def named(
        self, session_ids: Sequence[int], runs: Sequence[int], sessions: dict[int, str]
    ) -> tuple[tuple[str, ...], tuple[int, ...], Int64s | None]:
        """The sessions and runs of the batches, and each message's index among them."""
        dictionary, index = _dictionary(session_ids, runs, sessions)
        return *dictionary, None if index is None else self.spread(index)


def _dictionary(
    session_ids: Sequence[int], runs: Sequence[int], sessions: dict[int, str]
) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], Int64s | None]:
    """The distinct names and runs, and the index of each pair among them; None if there is only one."""
    places: dict[tuple[int, int], int] = {}
    index = [places.setdefault(pair, len(places)) for pair in zip(session_ids, runs, strict=True)]
    names = tuple(sessions[session_id] for session_id, _ in places)
    dictionary = names, tuple(run for _, run in places)
    return dictionary, None if len(names) == 1 else np.array(index, np.int64)


def _read_topics(raw: bytes, count: int) -> Sequence[str]:
    """The `count` topics in the last part of the columns: their offsets, then their bytes up to the end.

    Most batches of a log have the same few, which are read once.
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

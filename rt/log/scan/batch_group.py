"""Decode many small batches together, with a fixed number of numpy calls for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rt.log.format.batch import BATCH_HEADER_BYTES, BadBatch
from rt.log.format.constants import TOPIC_BYTES_MAX, Int64s
from rt.log.scan.message_batch import MessageBatch

Bytes: TypeAlias = npt.NDArray[np.uint8]

_FEW_TOPICS_BYTES_MAX = 512
"""Up to this size, decoded topics are cached."""
_TOPICS_TOGETHER_MIN = 32
"""From this many batches on, first check whether all have the same topic."""
_GATHERED_MEAN_BYTES_MAX = 512
"""Up to this mean size, one gather costs less than a slice for each batch."""

NO_VALUES: Final = memoryview(b"")
BAD_OFFSETS: Final = "value offsets do not rise from 0 to the end of the values"
BAD_TOPIC_INDEX: Final = "a topic index is not below the number of topics"
BAD_TIMES: Final = "the time range in the header differs from the messages"


class BatchGroup:
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
        """The ordinal in the group of each batch's first message. `within` is the ordinal of a message in its
        batch.
        """
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
        """All messages except the skipped ones; None if all are skipped."""
        topic_names, topic_index = self.topics()
        whole = MessageBatch(
            self.spread(first_positions) + self.within,
            self.timestamps_ns(),
            self.numbers(),
            *named,
            topic_names,
            topic_index,
            self.value_offsets() if with_values else np.zeros(len(self.within) + 1, np.int32),
            self.values() if with_values else NO_VALUES,
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
            raise BadBatch(BAD_OFFSETS)
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
            raise BadBatch(BAD_TIMES)
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
                dictionaries += [places.setdefault(name, len(places)) for name in read_topics(raw, count)]
            dictionary_at.append(at)
        index = self.spread(np.array(dictionary_at, np.int64))
        if (self.topic_counts > 1).any():
            topic_counts = self.spread(self.topic_counts)
            many = topic_counts > 1
            own = self.halves[(self.spread(self.index_at // 2) + self.within)[many]]
            if (own >= topic_counts[many]).any():
                raise BadBatch(BAD_TOPIC_INDEX)
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
        return read_topics(raw[0].tobytes(), 1)[0]


def read_topics(raw: bytes, count: int) -> Sequence[str]:
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

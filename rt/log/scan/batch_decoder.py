"""Decode batches into messages in columns.

A large batch is not copied: its columns are views of the bytes that were read. Small ones are decoded
together (`rt.log.scan.batch_group`). Only `_decode_one` reads headers, because `groups` puts each batch that
has headers into a group of its own.

Invariant: every offset and index is checked before use. Hostile contents with a valid checksum raise
`BadBatch` and never cause an access outside a buffer.

`sessions` has the names of the sessions, by the id that batches use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rt.log.format.batch import BATCH_HEADER_BYTES, HEADERS_FLAG, BadBatch, BatchHeader, expand
from rt.log.format.constants import Int64s, padded
from rt.log.scan.batch_group import (
    BAD_OFFSETS,
    BAD_TIMES,
    BAD_TOPIC_INDEX,
    NO_VALUES,
    BatchGroup,
    Bytes,
    read_topics,
)
from rt.log.scan.header_table import headers_start, read_headers
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.placed_batches import PlacedBatch, PlacedRun


def decode(
    buffer: Bytes, batches: Sequence[PlacedBatch], sessions: dict[int, str], *, values: bool = True
) -> MessageBatch | None:
    """Decode `batches`, one of the `groups`, from `buffer`; None if all their messages are skipped.

    Without `values` the buffer need not hold them. Then the messages have empty values and no headers. Raises
    `BadBatch` for contents that no rt writer produces.
    """
    if any(batch.header.flags & ~HEADERS_FLAG for batch in batches):
        buffer, batches = _expanded(buffer, batches, values)
    if len(batches) == 1:
        return _decode_one(buffer, batches[0], sessions, values)
    return _decode_many(buffer, batches, sessions, values)


class UndecodableBatch(NamedTuple):
    """The messages at positions `start` to `end` (exclusive) are stored as published, but cannot be decoded.

    Their batch is at `offset` in its segment.
    """

    start: int
    end: int
    offset: int
    reason: str


def decode_each(
    buffer: Bytes, group: Sequence[PlacedBatch], sessions: dict[int, str], *, values: bool = True
) -> Iterator[MessageBatch | UndecodableBatch]:
    """`decode` a group. If a batch in it is bad, decode one at a time, and yield the bad ones as such."""
    try:
        batch = decode(buffer, group, sessions, values=values)
    except BadBatch as reason:
        if len(group) > 1:
            for placed in group:
                yield from decode_each(buffer, [placed], sessions, values=values)
            return
        _, header, first, skip, _, _, offset = group[0]
        yield UndecodableBatch(first + skip, first + header.message_count, offset, str(reason))
        return
    if batch is not None:
        yield batch


def topics_of(data: memoryview, at: int, header: BatchHeader) -> list[str] | None:
    """The topics of the batch at `at`, whose columns verify; None if it is compressed or they are bad."""
    if header.flags & ~HEADERS_FLAG:
        return None
    count, columns_end = header.message_count, at + BATCH_HEADER_BYTES + header.columns_bytes
    start = at + BATCH_HEADER_BYTES + padded(4 * (count + 1)) + 8 * count
    if header.topic_count > 1:
        start += padded(2 * count)
    try:
        return [*read_topics(bytes(data[start:columns_end]), header.topic_count)]
    except BadBatch:
        return None


def _expanded(buffer: Bytes, batches: Sequence[PlacedBatch], values: bool) -> tuple[Bytes, list[PlacedBatch]]:
    """The batches without compression, one after the other in a new buffer."""
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
    has_headers = with_values and header.flags & HEADERS_FLAG
    if not with_values:
        offsets = np.zeros(count + 1, np.int32)
    elif (
        offsets[0] != 0
        or (offsets[-1] > header.values_bytes if has_headers else offsets[-1] != header.values_bytes)
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise BadBatch(BAD_OFFSETS)
    at += padded(4 * (count + 1))
    timestamps_ns = buffer[at : at + 8 * count].view(np.int64)
    if timestamps_ns.min() != header.timestamp_low_ns or timestamps_ns.max() != header.timestamp_high_ns:
        raise BadBatch(BAD_TIMES)
    at += 8 * count
    topic_index = None
    if header.topic_count > 1:
        topic_index = buffer[at : at + 2 * count].view(np.uint16)
        if topic_index.max() >= header.topic_count:
            raise BadBatch(BAD_TOPIC_INDEX)
        at += padded(2 * count)
    topics = read_topics(buffer[at:columns_end].tobytes(), header.topic_count)
    values = batch.start + BATCH_HEADER_BYTES + padded(header.columns_bytes)
    values_end, headers, header_index = header.values_bytes, None, None
    if has_headers:
        values_end = int(offsets[-1])
        start = values + headers_start(header, values_end)
        section = buffer.data[start : values + header.values_bytes]
        headers, header_index = read_headers(section, count)
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
        buffer.data[values : values + values_end] if with_values else NO_VALUES,
        headers,
        header_index,
    )
    if batch.skip >= count:
        return None
    return whole.slice(batch.skip, count) if batch.skip else whole


def _decode_many(
    buffer: Bytes, batches: Sequence[PlacedBatch], sessions: dict[int, str], with_values: bool
) -> MessageBatch | None:
    """The joined results of `_decode_one` for each of `batches`. None of the batches has headers."""
    starts, _, first_positions, skips, session_ids, runs, _ = zip(*batches, strict=True)
    group = BatchGroup(buffer, np.array(starts, np.int64))
    positions, skipped = np.array(first_positions, np.int64), np.array(skips, np.int64)
    dictionary, index = _dictionary(session_ids, runs, sessions)
    named = *dictionary, None if index is None else group.spread(index)
    return group.messages(positions, skipped, named, with_values)


def decode_runs(
    buffer: Bytes, runs: Sequence[PlacedRun], sessions: dict[int, str], *, values: bool = True
) -> MessageBatch | None:
    """The result of `decode` for all batches of `runs`, joined. None of the batches has headers or is
    compressed.
    """
    starts, counts, first_positions, skips, session_ids, source_runs, _, _ = zip(*runs, strict=True)
    group = BatchGroup(buffer, np.concatenate(starts))
    dictionary, index = _dictionary(session_ids, source_runs, sessions)
    message_counts = [int(each.sum()) for each in counts]
    named = *dictionary, None if index is None else np.repeat(index, message_counts)
    return group.messages(np.concatenate(first_positions), np.concatenate(skips), named, values)


def _dictionary(
    session_ids: Sequence[int], runs: Sequence[int], sessions: dict[int, str]
) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], Int64s | None]:
    """The distinct pairs of session name and run, as two columns, and for each input the index of its pair.

    The index is None if there is only one pair.
    """
    places: dict[tuple[int, int], int] = {}
    index = [places.setdefault(pair, len(places)) for pair in zip(session_ids, runs, strict=True)]
    names = tuple(sessions[session_id] for session_id, _ in places)
    dictionary = names, tuple(run for _, run in places)
    return dictionary, None if len(names) == 1 else np.array(index, np.int64)

"""Checks that the columns of a batch with valid checksums can be decoded, without decoding its messages.

Invariant: every reader can decode a batch that passes these checks. The table in `rt.log.format.batch` lists
each field and the code that checks it. Checksums and the header's own sums are checked before.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from rt.log.format.batch import (
    CODEC_NONE,
    HEADERS_FLAG,
    BadBatch,
    BatchHeader,
    UnknownCodec,
    check_values,
    expand_columns,
)
from rt.log.format.constants import TOPIC_BYTES_MAX, Buffer, padded
from rt.log.scan.header_table import headers_start, read_headers

_FEW: Final = 16  # Up to this number of messages plain Python is faster than numpy.
QUICK_BYTES_MAX: Final = 2**20  # Uncompressed bytes that a check may expand in an event loop.


class BadColumns(ValueError):
    """A batch has valid checksums, but cannot be decoded. The text of the error is the reason."""


def columns_of(header: BatchHeader, batch: memoryview) -> Buffer | None:
    """The uncompressed columns of a whole batch; None if its codec is not known. `BadColumns`."""
    try:
        return expand_columns(header, batch)
    except UnknownCodec:
        return None
    except BadBatch as error:
        raise BadColumns(str(error)) from error


def dictionary_of(header: BatchHeader, columns: Buffer) -> bytes:
    """The part of the columns that holds the topics."""
    count = header.message_count
    at = padded(4 * (count + 1)) + 8 * count
    if header.topic_count > 1:
        at += padded(2 * count)
    return bytes(columns[at : header.columns_bytes])


@lru_cache(maxsize=4096)
def topics_in(dictionary: bytes, count: int) -> tuple[bytes, ...]:
    """The `count` topics of a dictionary, as UTF-8. Results are cached, because most batches have one of a
    few dictionaries. `BadColumns`.
    """
    ends = np.frombuffer(dictionary, "<i4", count + 1).tolist()
    text = dictionary[4 * (count + 1) :]
    if ends[0] != 0 or ends[-1] != len(text) or any(end < start for start, end in pairwise(ends)):
        raise BadColumns("topic offsets do not rise from 0 to the end of the topics")
    topics = tuple(text[start:end] for start, end in pairwise(ends))
    if len(max(topics, key=len)) > TOPIC_BYTES_MAX:
        raise BadColumns(f"a topic above {TOPIC_BYTES_MAX} bytes")
    try:
        for topic in topics:
            topic.decode()
    except UnicodeDecodeError as error:
        raise BadColumns("a topic is not UTF-8") from error
    return topics


def expanded_bytes(header: BatchHeader) -> int:
    """How many bytes `check_columns` expands of the batch: 0 if it is not compressed and has no headers."""
    return 0 if header.flags == CODEC_NONE else header.columns_bytes + header.values_bytes


def check_columns(header: BatchHeader, batch: memoryview) -> None:
    """Raise `BadColumns` unless every reader can decode the whole batch.

    Do not call it in an event loop if `expanded_bytes` is above `QUICK_BYTES_MAX`.
    """
    try:
        columns = expand_columns(header, batch)
        values_end = _check_plain(header, columns)
        if header.flags & HEADERS_FLAG:
            section = check_values(header, batch, headers_start(header, values_end))
            read_headers(memoryview(section), header.message_count)
        elif header.flags != CODEC_NONE:
            check_values(header, batch)
    except BadBatch as error:
        raise BadColumns(str(error)) from error


def _check_plain(header: BatchHeader, columns: Buffer) -> int:
    """Check the columns; return where the messages' values end."""
    count = header.message_count
    view = memoryview(columns)
    offsets = view[: 4 * (count + 1)]
    at = padded(4 * (count + 1))
    timestamps = view[at : at + 8 * count]
    if count <= _FEW:
        ends = offsets.cast("i").tolist()
        rises = all(start <= end for start, end in pairwise(ends))
        first, last = ends[0], ends[-1]
        stamps = timestamps.cast("q").tolist()
        low_ns, high_ns = min(stamps), max(stamps)
    else:
        array = np.frombuffer(offsets, "<i4")
        rises = bool((array[1:] >= array[:-1]).all())
        first, last = int(array[0]), int(array[-1])
        times = np.frombuffer(timestamps, "<i8")
        low_ns, high_ns = int(times.min()), int(times.max())
    ends_well = last <= header.values_bytes if header.flags & HEADERS_FLAG else last == header.values_bytes
    if first != 0 or not ends_well or not rises:
        raise BadColumns("value offsets do not rise from 0 to the end of the values")
    if (low_ns, high_ns) != (header.timestamp_low_ns, header.timestamp_high_ns):
        raise BadColumns("the time range in the header differs from that of the messages")
    topics_in(dictionary_of(header, columns), header.topic_count)
    if header.topic_count > 1:
        at += 8 * count
        if int(np.frombuffer(view[at : at + 2 * count], "<u2").max()) >= header.topic_count:
            raise BadColumns("a topic index is not below the number of topics")
    return last

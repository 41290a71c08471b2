"""What the columns of a batch say, looked at without decoding its messages.

Law: a batch that passes here has value offsets, topic offsets and topic indexes in bounds, and topics that
are text, so that nobody who merges or reads it meets one that has not. Checksums are looked at before; a
codec that is not known is carried unseen.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
import zstandard

from rt.log.batch import BATCH_HEADER_BYTES, CODEC_NONE, CODEC_ZSTD, BatchHeader
from rt.log.layout import TOPIC_BYTES_MAX, Buffer, padded

_FEW: Final = 16
"""Up to so many messages plain Python is quicker than calling numpy."""
_WINDOW_BYTES_MAX: Final = 2**27


class BadColumns(ValueError):
    """What is wrong with a batch whose checksums hold, in words."""


def columns_of(header: BatchHeader, batch: memoryview) -> Buffer | None:
    """The uncompressed columns of a whole batch; None if its codec is not known. `BadColumns`."""
    stored = batch[BATCH_HEADER_BYTES : BATCH_HEADER_BYTES + header.columns_stored]
    if header.flags == CODEC_NONE:
        return stored
    if header.flags != CODEC_ZSTD:
        return None
    values_at = BATCH_HEADER_BYTES + padded(header.columns_stored)
    values = batch[values_at : values_at + header.values_stored]
    try:
        # The frames' own claims first, for zstd would allocate what they say.
        sizes = [zstandard.get_frame_parameters(data).content_size for data in (stored, values)]
        if sizes != [header.columns_bytes, header.values_bytes]:
            raise BadColumns(f"frames of {sizes} bytes, other than announced")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
        columns = decompressor.decompress(
            stored, max_output_size=header.columns_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise BadColumns(f"zstd: {error}") from error
    return columns


def dictionary_of(header: BatchHeader, columns: Buffer) -> bytes:
    """The part of the columns that holds the topics."""
    count = header.message_count
    at = padded(4 * (count + 1)) + 8 * count
    if header.topic_count > 1:
        at += padded(2 * count)
    return bytes(columns[at : header.columns_bytes])


@lru_cache(maxsize=4096)
def topics_in(dictionary: bytes, count: int) -> tuple[bytes, ...]:
    """The `count` topics of a dictionary, as UTF-8; most batches bring one of a few. `BadColumns`."""
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


def check_columns(header: BatchHeader, batch: memoryview) -> None:
    """`BadColumns` unless the columns of a whole batch say what they must."""
    columns = columns_of(header, batch)
    if columns is None:
        return
    count = header.message_count
    view = memoryview(columns)
    offsets = view[: 4 * (count + 1)]
    if count <= _FEW:
        ends = offsets.cast("i").tolist()
        rises = all(start <= end for start, end in pairwise(ends))
        first, last = ends[0], ends[-1]
    else:
        array = np.frombuffer(offsets, "<i4")
        rises = bool((array[1:] >= array[:-1]).all())
        first, last = int(array[0]), int(array[-1])
    if first != 0 or last != header.values_bytes or not rises:
        raise BadColumns("value offsets do not rise from 0 to the end of the values")
    topics_in(dictionary_of(header, columns), header.topic_count)
    if header.topic_count > 1:
        at = padded(4 * (count + 1)) + 8 * count
        if int(np.frombuffer(view[at : at + 2 * count], "<u2").max()) >= header.topic_count:
            raise BadColumns("a topic index is not below the number of topics")

"""The headers of a batch in the form that readers use, and the check that nodes run on them.

Invariant: nodes and readers use the same function, so every reader can read the headers that a node accepts.
Every offset and index is checked before use; hostile contents raise `BadBatch`.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from rt.log.format.batch import BadBatch, BatchHeader
from rt.log.format.constants import padded
from rt.log.format.headers import (
    COPIES_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    PAIR_COST_BYTES,
    SECTION_BYTES_MAX,
    SETS_MAX,
    Headers,
)

_COUNTS: Final = struct.Struct("<III")

Int32s = npt.NDArray[np.int32]


class HeaderTable:
    """The different headers of a batch's messages, in columns; the layout is in `rt.log.format.headers`."""

    def __init__(
        self,
        set_offsets: Int32s,
        keys: tuple[str, ...],
        key_index: npt.NDArray[np.uint16],
        value_offsets: Int32s,
        value_bytes: memoryview,
    ) -> None:
        self.set_offsets = set_offsets
        self.keys = keys
        self.key_index = key_index
        self.value_offsets = value_offsets
        self.value_bytes = value_bytes
        self._sets: list[Headers] | None = None

    @property
    def sets(self) -> list[Headers]:
        """Each set as pairs. The sets are made at the first use; messages share them."""
        if self._sets is None:
            data = bytes(self.value_bytes)
            values = [data[start:end] for start, end in pairwise(self.value_offsets.tolist())]
            keys = [self.keys[index] for index in self.key_index.tolist()]
            pairs = list(zip(keys, values, strict=True))
            self._sets = [tuple(pairs[start:end]) for start, end in pairwise(self.set_offsets.tolist())]
        return self._sets


def headers_start(header: BatchHeader, values_end: int) -> int:
    """The offset in the batch's values at which the headers start. The messages' own values end at
    `values_end`.
    """
    start = padded(values_end)
    if not _COUNTS.size <= header.values_bytes - start <= SECTION_BYTES_MAX:
        raise BadBatch(f"headers of {header.values_bytes - start} bytes")
    return start


def read_headers(section: memoryview, count: int) -> tuple[HeaderTable, npt.NDArray[np.uint16] | None]:
    """The headers of `count` messages, and the index of each message's set; None if there is one set. Raises
    `BadBatch`.
    """
    sets, pairs, keys = _COUNTS.unpack_from(section)
    is_possible = 1 <= sets <= SETS_MAX and keys <= pairs <= SETS_MAX and (keys > 0) == (pairs > 0)
    if not is_possible:
        raise BadBatch(f"{sets} sets of headers with {pairs} pairs of {keys} keys")
    index_at = _COUNTS.size + 4 * (sets + keys + pairs + 3)
    key_index_at = index_at + (2 * count if sets > 1 else 0)
    keys_at = key_index_at + (2 * pairs if keys > 1 else 0)
    if keys_at > len(section):
        raise BadBatch(f"headers of {len(section)} bytes are too short for their counts")
    words = np.frombuffer(section, np.int32, sets + keys + pairs + 3, _COUNTS.size)
    set_offsets, key_offsets, value_offsets = np.split(words, [sets + 1, sets + keys + 2])
    for offsets in (set_offsets, key_offsets, value_offsets):
        if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            raise BadBatch("offsets of the headers do not rise from 0")
    values_at = keys_at + int(key_offsets[-1])
    if set_offsets[-1] != pairs or values_at + int(value_offsets[-1]) != len(section):
        raise BadBatch("offsets of the headers do not end with them")
    index = np.frombuffer(section, np.uint16, count, index_at) if sets > 1 else None
    if index is not None and index.max() >= sets:
        raise BadBatch("a header index is not below the number of sets")
    key_index = np.zeros(pairs, np.uint16)
    if keys > 1:
        key_index = np.frombuffer(section, np.uint16, pairs, key_index_at)
        if key_index.max() >= keys:
            raise BadBatch("a key index is not below the number of keys")
    _check_sizes(np.diff(set_offsets), set_offsets, key_offsets, key_index, value_offsets, index, count)
    names = _keys_in(bytes(section[keys_at:values_at]), key_offsets)
    return HeaderTable(set_offsets, names, key_index, value_offsets, section[values_at:]), index


def _check_sizes(
    set_pairs: Int32s,
    set_offsets: Int32s,
    key_offsets: Int32s,
    key_index: npt.NDArray[np.uint16],
    value_offsets: Int32s,
    index: npt.NDArray[np.uint16] | None,
    count: int,
) -> None:
    ends = np.zeros(len(key_index) + 1, np.int64)
    np.cumsum(np.diff(key_offsets)[key_index].astype(np.int64) + np.diff(value_offsets), out=ends[1:])
    set_bytes = ends[set_offsets[1:]] - ends[set_offsets[:-1]]
    if set_pairs.max() > HEADERS_MAX or set_bytes.max() > HEADERS_BYTES_MAX:
        raise BadBatch(f"a message with {set_pairs.max()} headers of up to {set_bytes.max()} bytes")
    copies = set_bytes + PAIR_COST_BYTES * set_pairs
    copied = int(copies[0]) * count if index is None else int(copies[index].sum())
    # Arrow copies the keys of every pair, even if no message has its set.
    copied = max(copied, int(copies.sum()))
    if copied > COPIES_BYTES_MAX:
        raise BadBatch(f"headers of {copied} bytes if each message has its own, above {COPIES_BYTES_MAX}")


def _keys_in(text: bytes, offsets: Int32s) -> tuple[str, ...]:
    if (offsets[1:] == offsets[:-1]).any():
        raise BadBatch("a header has an empty key")
    try:
        return tuple([text[start:end].decode() for start, end in pairwise(offsets.tolist())])
    except UnicodeDecodeError as error:
        raise BadBatch(f"a header's key is not UTF-8: {error}") from error

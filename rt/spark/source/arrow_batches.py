"""Collects messages into Arrow record batches.

Invariant: a record batch has `ROWS_MIN` rows and `BYTES_MIN` bytes, or `BYTES_MAX` bytes, unless it is the
last one or holds one huge message. So the cost of passing a record batch to the JVM is shared by thousands of
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from rt.log.format.constants import Int64s
from rt.log.format.headers import PAIR_COST_BYTES
from rt.log.scan.message_batch import MessageBatch
from rt.spark.source.arrow_columns import record_batch, schema_of

ROWS_MIN: Final = 10_000
BYTES_MIN: Final = 4 * 2**20
BYTES_MAX: Final = 16 * 2**20

_ROW_BYTES: Final = 48
"""The approximate size of a row besides its value and headers."""


def gather(batches: Iterable[MessageBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Record batches of `columns`, in the types of `schema_of`."""
    schema, has_headers = schema_of(columns), "headers" in columns
    pending: list[MessageBatch] = []
    rows = size = 0
    for batch in batches:
        for piece, piece_bytes in _pieces(batch, has_headers):
            if pending and size + piece_bytes > BYTES_MAX:
                yield record_batch(pending, columns, schema)
                pending, rows, size = [], 0, 0
            pending.append(piece)
            rows += len(piece)
            size += piece_bytes
            if rows >= ROWS_MIN and size >= BYTES_MIN:
                yield record_batch(pending, columns, schema)
                pending, rows, size = [], 0, 0
    if pending:
        yield record_batch(pending, columns, schema)


def _pieces(batch: MessageBatch, has_headers: bool) -> Iterator[tuple[MessageBatch, int]]:
    """The batch and its size, split if it exceeds `BYTES_MAX`. A message is never split.

    A piece keeps the headers of its whole batch in memory, also of messages that a filter left out.
    """
    table = batch.header_table if has_headers else None
    own = None if table is None else _header_bytes(batch)
    least = 0 if table is None else len(table.value_bytes)
    while len(batch):
        size = int(batch.value_offsets[-1] - batch.value_offsets[0]) + _ROW_BYTES * len(batch)
        if own is not None:
            size += int(own.sum())
        if size <= BYTES_MAX or len(batch) == 1:
            yield batch, max(size, least)
            return
        ends = batch.value_offsets[1:] - batch.value_offsets[0] + _ROW_BYTES * np.arange(1, len(batch) + 1)
        if own is not None:
            ends += np.cumsum(own)
        stop = max(int(np.searchsorted(ends, BYTES_MAX, "right")), 1)
        yield batch.slice(0, stop), max(int(ends[stop - 1]), least)
        batch, own = batch.slice(stop, len(batch)), None if own is None else own[stop:]


def _header_bytes(batch: MessageBatch) -> Int64s:
    """The approximate size of the headers of each message."""
    table = batch.header_table
    assert table is not None
    keys = np.array([len(key.encode()) + PAIR_COST_BYTES for key in table.keys], np.int64)
    ends = np.zeros(len(table.key_index) + 1, np.int64)
    np.cumsum(keys[table.key_index] + np.diff(table.value_offsets), out=ends[1:])
    of_sets = ends[table.set_offsets[1:]] - ends[table.set_offsets[:-1]]
    index = batch.header_index
    return of_sets.repeat(len(batch)) if index is None else of_sets[index]

"""Collects messages into Arrow record batches.

Invariants:
- A record batch has `ROWS_MIN` rows and `BYTES_MIN` bytes, or `BYTES_MAX` bytes, unless it is the last one or
  holds one huge message. So the cost of passing a record batch to the JVM is shared by thousands of rows.
- No work is done per message. Columns are joined, and a single part is not copied.

Arrays are made from buffers: `pa.array` and `pa.scalar` import pandas, if installed, in each Spark worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rt.log.scan.message_batch import Indices, MessageBatch

ROWS_MIN: Final = 10_000
BYTES_MIN: Final = 4 * 2**20
BYTES_MAX: Final = 16 * 2**20

_TYPES: Final = {
    "timestamp": pa.timestamp("us", tz="UTC"),
    "session": pa.string(),
    "topic": pa.string(),
    "value": pa.binary(),
}
_INT64: Final = pa.int64()
_ROW_BYTES: Final = 48
"""The approximate size of a row besides its value."""
_RUNS_MAX: Final = 100
"""Up to this number of runs of one text each, joining runs is cheaper than looking up each row's text."""
_CONSTANT_ROWS_MIN: Final = 2**14
_CONSTANT_TEXT_MAX: Final = 2**20
"""A text repeated for many rows is cached if it has at most this many characters in total."""


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """The schema of `columns`, with the only types that Spark accepts for them. All are nullable."""
    return pa.schema([(name, _TYPES.get(name, pa.int64())) for name in columns])


def gather(batches: Iterable[MessageBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Record batches of `columns`, in the types of `schema_of`."""
    schema = schema_of(columns)
    pending: list[MessageBatch] = []
    rows = size = 0
    for batch in batches:
        for piece in _pieces(batch):
            piece_bytes = _size(piece)
            if pending and size + piece_bytes > BYTES_MAX:
                yield _record_batch(pending, columns, schema)
                pending, rows, size = [], 0, 0
            pending.append(piece)
            rows += len(piece)
            size += piece_bytes
            if rows >= ROWS_MIN and size >= BYTES_MIN:
                yield _record_batch(pending, columns, schema)
                pending, rows, size = [], 0, 0
    if pending:
        yield _record_batch(pending, columns, schema)


def _size(batch: MessageBatch) -> int:
    return int(batch.value_offsets[-1] - batch.value_offsets[0]) + _ROW_BYTES * len(batch)


def _pieces(batch: MessageBatch) -> Iterator[MessageBatch]:
    """The batch, split if it exceeds `BYTES_MAX`. A message is never split."""
    start = 0
    while _size(batch) > BYTES_MAX and len(batch) > 1:
        ends = batch.value_offsets[1:] - batch.value_offsets[0] + _ROW_BYTES * np.arange(1, len(batch) + 1)
        start = max(int(np.searchsorted(ends, BYTES_MAX, "right")), 1)
        yield batch.slice(0, start)
        batch = batch.slice(start, len(batch))
    if len(batch):
        yield batch


def _record_batch(
    pieces: Sequence[MessageBatch], columns: Sequence[str], schema: pa.Schema
) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([_COLUMNS[name](pieces) for name in columns], schema=schema)


def _integer_column(name: str) -> Callable[[Sequence[MessageBatch]], pa.Array]:
    """How to make a column from the attribute `name` of batches."""
    return lambda pieces: _integers(_joined([getattr(piece, name) for piece in pieces]))


def _timestamps(pieces: Sequence[MessageBatch]) -> pa.Array:
    microseconds = _joined([piece.timestamps_ns for piece in pieces]) // 1000
    return _integers(microseconds, _TYPES["timestamp"])


def _sessions(pieces: Sequence[MessageBatch]) -> pa.Array:
    return _texts([(piece.session_names, piece.session_index, len(piece)) for piece in pieces])


def _topics(pieces: Sequence[MessageBatch]) -> pa.Array:
    return _texts([(piece.topic_names, piece.topic_index, len(piece)) for piece in pieces])


def _values(pieces: Sequence[MessageBatch]) -> pa.Array:
    rows = sum(map(len, pieces))
    bounds = [(int(piece.value_offsets[0]), int(piece.value_offsets[-1])) for piece in pieces]
    if len(pieces) == 1:
        start, end = bounds[0]
        offsets = pieces[0].value_offsets - start if start else np.ascontiguousarray(pieces[0].value_offsets)
        data = pa.py_buffer(pieces[0].value_bytes[start:end])
    else:
        offsets = np.zeros(rows + 1, np.int32)
        # Use Arrow's pool, which keeps freed memory. Other allocators return it, and it must be faulted in
        # again.
        data = pa.allocate_buffer(sum(end - start for start, end in bounds))
        target = memoryview(data).cast("B")
        row = at = 0
        for piece, (start, end) in zip(pieces, bounds, strict=True):
            target[at : at + end - start] = piece.value_bytes[start:end]
            np.add(piece.value_offsets[1:], at - start, out=offsets[row + 1 : row + len(piece) + 1])
            row += len(piece)
            at += end - start
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])


def _joined(parts: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _texts(parts: Sequence[tuple[Sequence[str], Indices | None, int]]) -> pa.Array:
    """The text of each row. Each part has its own dictionary."""
    if all(own is None for _, own, _ in parts):
        runs = [
            (name, sum(count for _, _, count in run)) for name, run in groupby(parts, lambda part: part[0][0])
        ]
        if len(runs) <= _RUNS_MAX:
            return _joined_texts([_constant(name, count) for name, count in runs])
    places: dict[str, int] = {}
    tables = [[places.setdefault(name, len(places)) for name in names] for names, _, _ in parts]
    index = np.concatenate(
        [
            np.full(count, table[0], np.int32) if own is None else np.array(table, np.int32)[own]
            for table, (_, own, count) in zip(tables, parts, strict=True)
        ]
    )
    return _strings(list(places)).take(_integers(index, pa.int32()))


def _joined_texts(runs: Sequence[pa.Array]) -> pa.Array:
    return runs[0] if len(runs) == 1 else pa.concat_arrays(runs)


def _constant(text: str, count: int) -> pa.Array:
    """`text` repeated `count` times; usually a slice of a cached array."""
    rows = max(1 << (count - 1).bit_length(), _CONSTANT_ROWS_MIN)
    if rows * len(text) > _CONSTANT_TEXT_MAX:
        return _repeated(text, count)
    return _constants(text, rows)[:count]


@lru_cache(maxsize=16)
def _constants(text: str, count: int) -> pa.Array:
    return _repeated(text, count)


def _repeated(text: str, count: int) -> pa.Array:
    encoded = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(encoded))
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(encoded * count)]
    )


def _integers(numbers: npt.NDArray[Any], kind: Any = _INT64) -> pa.Array:
    """The memory of `numbers`, as an array of a type of the same width."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def _strings(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    ends = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


_COLUMNS: Final[dict[str, Callable[[Sequence[MessageBatch]], Any]]] = {
    "position": _integer_column("positions"),
    "timestamp": _timestamps,
    "session": _sessions,
    "run": _integer_column("runs"),
    "number": _integer_column("numbers"),
    "topic": _topics,
    "value": _values,
    "timestamp_ns": _integer_column("timestamps_ns"),
}

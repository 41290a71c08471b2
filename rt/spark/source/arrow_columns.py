"""Makes the columns of a record batch from messages in columns.

Invariants:
- No work is done per message. Columns are joined, and a single part is not copied.
- Arrays are made from buffers: `pa.array` and `pa.scalar` import pandas, if installed, in each Spark worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rt.log.scan.message_batch import Indices, MessageBatch

_PAIR: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
_TYPES: Final = {
    "timestamp": pa.timestamp("us", tz="UTC"),
    "session": pa.string(),
    "topic": pa.string(),
    "value": pa.binary(),
    "headers": pa.list_(pa.field("element", _PAIR)),
}
_INT64: Final = pa.int64()
_INT32: Final = pa.int32()
_RUNS_MAX: Final = 100
"""Up to this number of runs of one text each, joining runs is cheaper than looking up each row's text."""
_CONSTANT_ROWS_MIN: Final = 2**14
_CONSTANT_TEXT_MAX: Final = 2**20
"""A text repeated for many rows is cached if it has at most this many characters in total."""


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """The schema of `columns`, with the only types that Spark accepts for them. All are nullable."""
    return pa.schema([(name, _TYPES.get(name, pa.int64())) for name in columns])


def record_batch(pieces: Sequence[MessageBatch], columns: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    """The rows of all `pieces`. `schema` is the schema of `columns`."""
    return pa.RecordBatch.from_arrays([_COLUMNS[name](pieces) for name in columns], schema=schema)


def _integer_column(name: str) -> Callable[[Sequence[MessageBatch]], pa.Array]:
    """A function that makes a column from the attribute `name` of batches."""
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
        # Use Arrow's memory pool, which keeps freed memory. Other allocators return it to the system, and
        # using it again causes page faults.
        data = pa.allocate_buffer(sum(end - start for start, end in bounds))
        target = memoryview(data).cast("B")
        row = at = 0
        for piece, (start, end) in zip(pieces, bounds, strict=True):
            target[at : at + end - start] = piece.value_bytes[start:end]
            np.add(piece.value_offsets[1:], at - start, out=offsets[row + 1 : row + len(piece) + 1])
            row += len(piece)
            at += end - start
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])


def _headers(pieces: Sequence[MessageBatch]) -> pa.Array:
    """The headers of each row; null if it has none."""
    rows = sum(map(len, pieces))
    if all(piece.header_table is None for piece in pieces):
        return pa.nulls(rows, _TYPES["headers"])
    counts, firsts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    keys, key_index, values, sizes = list[str](), [], [], []
    row = pairs = 0
    for piece in pieces:
        stop, table = row + len(piece), piece.header_table
        if table is not None:
            index = 0 if piece.header_index is None else piece.header_index
            counts[row:stop] = np.diff(table.set_offsets)[index]
            firsts[row:stop] = table.set_offsets[:-1][index] + np.int32(pairs)
            key_index.append(table.key_index.astype(np.int32) + np.int32(len(keys)))
            sizes.append(np.diff(table.value_offsets))
            keys += table.keys
            values.append(table.value_bytes)
            pairs += len(table.key_index)
        row = stop
    ends = _ends(counts)
    own = np.arange(ends[-1], dtype=np.int32) + np.repeat(firsts - ends[:-1], counts)
    known = [None, pa.py_buffer(_ends(np.concatenate(sizes))), pa.py_buffer(b"".join(values))]
    children = [
        _strings(keys).take(_integers(np.concatenate(key_index)[own], _INT32)),
        pa.Array.from_buffers(pa.binary(), pairs, known).take(_integers(own, _INT32)),
    ]
    each = pa.Array.from_buffers(_PAIR, len(own), [None], children=children)
    validity = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    return pa.Array.from_buffers(_TYPES["headers"], rows, [validity, pa.py_buffer(ends)], children=[each])


def _ends(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Offsets from 0 of parts with these lengths."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends


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
    return _strings(list(places)).take(_integers(index, _INT32))


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
    ends = _ends(np.array([len(text) for text in encoded], np.int32))
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
    "headers": _headers,
    "timestamp_ns": _integer_column("timestamps_ns"),
}

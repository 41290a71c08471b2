"""Message batches as Arrow record batches, without copying values, offsets or timestamps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rt.errors import RtError

if TYPE_CHECKING:
    from rt.log.scan.message_batch import Indices, MessageBatch

try:
    import pyarrow as pa
except ModuleNotFoundError as error:
    raise RtError("pyarrow is not installed", hint="pip install 'rt-transport[arrow]'") from error

SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ns", tz="UTC"), nullable=False),
        pa.field("session", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("run", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("topic", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field(
            "headers",
            pa.list_(
                pa.struct(
                    [
                        pa.field("key", pa.string(), nullable=False),
                        pa.field("value", pa.binary(), nullable=False),
                    ]
                )
            ),
            nullable=False,
        ),
    ]
)


def record_batch(batch: MessageBatch) -> pa.RecordBatch:
    """`batch` with the columns of `SCHEMA`."""
    offsets = np.ascontiguousarray(batch.value_offsets)
    columns = [
        pa.array(batch.positions),
        pa.Array.from_buffers(SCHEMA[1].type, len(batch), [None, pa.py_buffer(batch.timestamps_ns)]),
        _dictionary(batch.session_names, batch.session_index, len(batch)),
        pa.array(batch.runs),
        pa.array(batch.numbers),
        _dictionary(batch.topic_names, batch.topic_index, len(batch)),
        pa.Array.from_buffers(
            pa.binary(), len(batch), [None, pa.py_buffer(offsets), pa.py_buffer(batch.value_bytes)]
        ),
        _headers(batch),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(batch: MessageBatch) -> Any:
    kind, count = SCHEMA[7].type, len(batch)
    ends = np.zeros(count + 1, np.int32)
    if batch.header_table is None:
        pairs = pa.array([], kind.value_type)
        return pa.ListArray.from_arrays(pa.array(ends), pairs, type=kind)
    table = batch.header_table
    values = pa.Array.from_buffers(
        pa.binary(),
        len(table.key_index),
        [None, pa.py_buffer(np.ascontiguousarray(table.value_offsets)), pa.py_buffer(table.value_bytes)],
    )
    keys = pa.array(table.keys, pa.string()).take(pa.array(table.key_index))
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(kind.value_type))
    offsets = pa.array(table.set_offsets)
    sets = pa.ListArray.from_arrays(offsets, pairs, type=kind)
    index = np.zeros(count, np.uint16) if batch.header_index is None else batch.header_index
    return sets.take(pa.array(np.ascontiguousarray(index)))


def _dictionary(names: tuple[str, ...], index: Indices | None, count: int) -> Any:
    places = np.zeros(count, np.int32) if index is None else index.astype(np.int32)
    if len(set(names)) < len(names):  # A session has one entry for each of its runs.
        known = {name: at for at, name in enumerate(dict.fromkeys(names))}
        places = np.array([known[name] for name in names], np.int32)[places]
        names = tuple(known)
    return pa.DictionaryArray.from_arrays(pa.array(places), pa.array(names, pa.string()))

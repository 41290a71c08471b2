"""The rows of one partition on their way out of Spark: checked, digested, and spooled to the local disk.

All rows are read before the first is published; see `rt.spark.sink.row_order`. They are stored in an unnamed
file, which is deleted when the process ends. Memory holds 16 bytes per row.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rt.errors import InvalidMessage, InvalidOption
from rt.log.disk import storage_errors
from rt.log.format.constants import MESSAGE_BYTES_MAX, TOPIC_BYTES_MAX
from rt.log.format.headers import Headers
from rt.log.write.batcher import check_size, check_topic
from rt.spark.sink.packed_headers import pack_headers, unpack_headers
from rt.spark.sink.row_order import DIGEST_BYTES, digests_of
from rt.spark.source.columns import HEADERS_KIND

_KINDS: Final = {
    "value": ("binary", "string"),
    "topic": ("string",),
    "timestamp": ("timestamp",),
    "timestamp_ns": ("bigint",),
    "headers": (HEADERS_KIND,),
}
_HINT: Final = 'Select what is published: df.select("value", "topic", "timestamp").'
_HEADERS_HINT: Final = (
    "Make it with map_entries(map('key', cast(… AS binary))), or with array(struct('key' AS key, cast(… AS "
    "binary) AS value))."
)
_SPOOLED: Final = pa.schema(
    [("value", pa.binary()), ("topic", pa.string()), ("timestamp_ns", pa.int64()), ("headers", pa.binary())]
)
"""`headers` are packed."""
_HEADERS_COST_MAX: Final = 2**20
"""An upper bound: the headers of a message always add less to its size."""
_MICROSECONDS_MAX: Final = (2**63 - 1) // 1000
_CHUNK: Final = 1024
"""The number of rows that are reordered at once."""


class SpooledRow(NamedTuple):
    """A message to publish. `timestamp_ns` None: the time of publishing."""

    value: bytes
    topic: str
    timestamp_ns: int | None
    headers: Headers = ()


def check_written_columns(fields: Sequence[tuple[str, str]], *, topic: str | None) -> None:
    """`rt.InvalidOption` unless `fields`, pairs of a name and Spark's type name, can be published."""
    names = [name for name, _ in fields]
    known = ", ".join(f"{name} {' or '.join(kinds)}" for name, kinds in _KINDS.items())
    for name, kind in fields:
        if name not in _KINDS:
            raise InvalidOption(
                f"column {name!r} cannot be published", hint=f"The columns are {known}. {_HINT}"
            )
        if kind not in _KINDS[name]:
            raise InvalidOption(
                f"column {name} has the wrong type",
                got=kind,
                expected=" or ".join(_KINDS[name]),
                hint=_HEADERS_HINT if name == "headers" else None,
            )
    if "value" not in names or len(set(names)) != len(names):
        raise InvalidOption("the column value is missing, or a column is duplicated", hint=_HINT)
    if {"timestamp", "timestamp_ns"} <= set(names):
        raise InvalidOption("the columns timestamp and timestamp_ns exclude each other", hint=_HINT)
    if topic is not None and "topic" in names:
        raise InvalidOption("the option topic and the column topic exclude each other", hint="Give one.")


class Spool:
    """The rows of a partition, in a file in `directory`. `topic` applies to all rows if there is no topic
    column.
    """

    def __init__(self, directory: str, topic: str | None) -> None:
        self.digests = bytearray()
        """One per row, in order of arrival."""
        self._directory = directory
        self._topic = topic or ""
        with storage_errors(directory, "making a file for rows"):
            os.makedirs(directory, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, prefix="rows-")  # noqa: SIM115

    def fill(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Read all rows. Raises storage errors, and `rt.InvalidMessage` with the number of a row that cannot
        be published. Rows are numbered from 0.
        """
        with storage_errors(self._directory, "spooling rows"):
            with pa.ipc.new_stream(self._file, _SPOOLED) as out:
                for batch in batches:
                    prepared = self._prepare(batch)
                    values, topics, stamps, headers = prepared.columns
                    self.digests += digests_of(
                        values.to_pylist(),
                        topics.cast(pa.binary()).to_pylist(),
                        stamps.to_pylist(),
                        () if headers.null_count == len(headers) else headers.to_pylist(),
                    )
                    out.write_batch(prepared)
            self._file.flush()

    def rows(self, order: NDArray[np.int64] | None) -> Iterator[SpooledRow]:
        """The rows in the given order; None: in order of arrival."""
        size = self._file.tell()
        # The mapping is safe: the file is private and unnamed, so no other process can truncate it.
        return _mapped_rows(mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ), order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _prepare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns as they are spooled; missing timestamps and headers are null."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        first_row = len(self.digests) // DIGEST_BYTES
        for name, column in columns.items():
            if column.null_count and name != "headers":
                row = column.is_null().index(True).as_py()
                raise InvalidMessage(
                    f"a row has no {name}",
                    where=f"row {first_row + row}",
                    expected="no null",
                    hint=f"Filter, or coalesce({name}, ...): a message has no nulls.",
                )
        count = batch.num_rows
        topics, stamps, headers = (columns.get(name) for name in ("topic", "timestamp_ns", "headers"))
        if "timestamp" in columns:
            stamps = _nanoseconds(columns["timestamp"], first_row)
        prepared = pa.record_batch(
            [
                columns["value"].cast(pa.binary()),
                pa.repeat(pa.scalar(self._topic), count) if topics is None else topics.cast(pa.string()),
                pa.nulls(count, pa.int64()) if stamps is None else stamps.cast(pa.int64()),
                pa.nulls(count, pa.binary()) if headers is None else pack_headers(headers, first_row),
            ],
            schema=_SPOOLED,
        )
        _check_values(prepared, first_row)
        if topics is not None:
            _check_topics(prepared["topic"], first_row)
        return prepared


def _check_values(rows: pa.RecordBatch, first_row: int) -> None:
    """`rt.MessageTooLarge`. `first_row` is the index of the first row in its partition."""
    sizes = pc.binary_length(rows["value"]).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(sizes > MESSAGE_BYTES_MAX - _HEADERS_COST_MAX).tolist():
        where = f"row {first_row + row}"
        check_size(int(sizes[row]), unpack_headers(rows["headers"][row].as_py()), where=where)


def _check_topics(topics: pa.Array, first_row: int) -> None:
    """`rt.TopicTooLong`, `rt.InvalidMessage`. Spark does not check that its strings are UTF-8."""
    try:
        topics.validate(full=True)
    except pa.ArrowInvalid:
        for row, topic in enumerate(topics.cast(pa.binary()).to_pylist()):
            try:
                topic.decode()
            except UnicodeDecodeError:
                raise InvalidMessage(
                    "a topic is not UTF-8",
                    where=f"row {first_row + row}",
                    got=repr(topic)[:200],
                    expected="text",
                ) from None
        raise
    sizes = pc.binary_length(topics).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(sizes > TOPIC_BYTES_MAX).tolist():
        check_topic(topics[row].as_py(), where=f"row {first_row + row}")


def _nanoseconds(stamps: pa.Array, first_row: int) -> pa.Array:
    try:
        return stamps.cast(pa.timestamp("ns", tz="UTC"))
    except pa.ArrowInvalid:
        microseconds = stamps.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_numpy()
        row = first_row + int(np.flatnonzero(np.abs(microseconds.astype(float)) > _MICROSECONDS_MAX)[0])
        raise InvalidMessage(
            "a timestamp is out of range", where=f"row {row}", expected="a year between 1678 and 2262"
        ) from None


def _mapped_rows(mapped: mmap.mmap, order: NDArray[np.int64] | None) -> Iterator[SpooledRow]:
    with pa.ipc.open_stream(pa.py_buffer(mapped)) as stream:
        if order is None:
            for batch in stream:
                yield from _rows(batch)
            return
        batches = [batch for batch in stream if batch.num_rows]
    ends = np.cumsum([batch.num_rows for batch in batches])
    for start in range(0, len(order), _CHUNK):
        for row in order[start : start + _CHUNK].tolist():
            batch_index = int(ends.searchsorted(row, "right"))
            at = row - (int(ends[batch_index - 1]) if batch_index else 0)
            value, topic, stamp, packed = (column[at].as_py() for column in batches[batch_index].columns)
            yield SpooledRow(value, topic, stamp, unpack_headers(packed))


def _rows(batch: pa.RecordBatch) -> Iterator[SpooledRow]:
    values, topics, stamps, packed = batch.columns
    times = repeat(None) if stamps.null_count else stamps.to_pylist()
    if packed.null_count == len(packed):
        return map(SpooledRow, values.to_pylist(), topics.to_pylist(), times)
    headers = map(unpack_headers, packed.to_pylist())
    return map(SpooledRow, values.to_pylist(), topics.to_pylist(), times, headers)

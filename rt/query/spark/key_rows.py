"""Runs in Spark's Python workers: finds the key and the time of each message, and makes messages from
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rt.log.scan.message_batch import Message
from rt.query.core.clock import TIME_END_NS
from rt.query.core.errors import BadTime
from rt.query.spark.job import MESSAGE, SparkJob

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYED: Final = f"{MESSAGE}, key string, time_ns long"
"""The fields of a message, its key, and its event time."""


def add_keys(job: SparkJob, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The messages with their keys and event times.

    Messages that the query leaves out are dropped, except the latest in each batch, which has no key. It
    moves the clock, as in the engine.
    """
    plan, time_of = job.plan(), job.time_of
    for batch in batches:
        kept: list[tuple[int, str | None, int | None]] = []
        latest: tuple[int, int] | None = None
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        for index, row in enumerate(rows):
            message = message_of(row)
            time_ns = None if time_of is None else _checked(time_of(message), plan.source, message)
            key = plan.key_text(message)
            if key is not None:
                kept.append((index, key, time_ns))
            elif time_ns is not None:
                latest = max(latest or (time_ns, index), (time_ns, index))
        if latest is not None:
            kept.append((latest[1], None, latest[0]))
        columns = batch.take(pa.array([each[0] for each in kept], pa.int64())).columns
        keys = pa.array([each[1] for each in kept], pa.string())
        times = pa.array([each[2] for each in kept], pa.int64())
        yield pa.RecordBatch.from_arrays(
            [*columns, keys, times], names=[*batch.schema.names, "key", "time_ns"]
        )


def message_of(row: Sequence[Any]) -> Message:
    """The message of a row, whose first columns are those of MESSAGE."""
    position, timestamp_ns, session, run, number, topic, value, headers = row[:8]
    pairs = tuple((each["key"], bytes(each["value"])) for each in headers or ())
    return Message(position, timestamp_ns, session, run, number, topic, bytes(value), pairs)


def _checked(time_ns: Any, source: str, message: Message) -> int:
    if type(time_ns) is not int or not 0 <= time_ns < TIME_END_NS:
        raise BadTime(source, message.position, message, time_ns)
    return time_ns

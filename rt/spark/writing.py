"""Writing to a stream, in batch writes and as a sink of streaming queries.

The driver makes a writer, executors get copies of it, and what has been written is committed by a copy in
another process of the driver: what they have in common is the ledger.

Traps that this avoids. A sink is told neither the query's id nor, where rows are written, the batch's number:
both are in the task's properties. Spark commits a batch again if it was killed just behind that; it runs a
batch again under its number if it was killed before. A retried task may have its rows in another order, or
run beside the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from rt.errors import InvalidOption, RtError, WriteConflict
from rt.spark.ledger import Done, Ledger, Order
from rt.spark.row_order import order_of
from rt.spark.sink_options import WriteOptions
from rt.spark.workers import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger("rt.spark")

BATCH_WRITES: Final = "batch writes"
"""Stands for the query's id in a series of batch writes."""


@dataclass
class Written(WriterCommitMessage):
    """What a task has published, all of it merged."""

    query: str
    partition: int
    first: int
    end: int


class _Writer:
    """What batch writes and streams share. `schema` is that of the rows."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        from rt.spark.rows import check_written_columns

        if overwrite:
            raise InvalidOption(
                "messages cannot be overwritten", hint='Use mode("append"), or outputMode("append").'
            )
        fields = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        check_written_columns(fields, topic=options.topic)
        self.options = options

    @property
    def ledger(self) -> Ledger:
        """What was written under this name."""
        return Ledger(self.options.ledger, self.options.name)

    def write_part(self, query: str, batch: int, batches: Iterator[pa.RecordBatch]) -> Written:
        """Publish the rows of this task's partition; all of them are merged on return."""
        from rt.net.tls import TLS
        from rt.spark.delivering import check_untouched, deliver, place_of, spool_directory
        from rt.spark.rows import Spool

        freeze_modules()
        options, nodes, ledger = self.options, self.options.nodes, self.ledger
        partition = _context().partitionId()
        tls = TLS(ca=nodes.ca, cert=nodes.cert, key=nodes.key)
        place = place_of(options, tls, partition)
        where = f"partition {partition} of batch {batch} of {options.name}"
        with Spool(spool_directory(options), options.topic) as spool:
            spool.fill(batches)
            order = ledger.order(batch, partition)
            if order is None:
                first = next_number(ledger, query, batch, partition)
                try:
                    check_untouched(options, tls, place, first)
                except WriteConflict:
                    if ledger.order(batch, partition) is None:  # Else another attempt has just begun.
                        raise
                order, _ = ledger.claim(batch, partition, Order(query, first, bytes(spool.digests)))
            if order.query != query:
                raise other_query(ledger, order.query, query)
            permutation = order_of(order.digests, spool.digests, where=where)
            if permutation is not None:
                logger.warning("rows_came_in_another_order where=%r", where)
            deliver(options, tls, place, order, spool.rows(permutation))
        return Written(query, partition, order.first, order.end)

    def finish(self, batch: int, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks of a batch are done."""
        parts = [message for message in messages if isinstance(message, Written)]
        done, ledger = self.ledger.done(), self.ledger
        if len(parts) != len(messages) or not parts:
            raise RtError("a task did not say what it has written", where=f"batch {batch}")
        begun = ledger.partitions(batch)
        if begun != {part.partition for part in parts}:
            raise WriteConflict(
                f"batch {batch} was cut into other partitions when it was written before",
                where=ledger.path,
                got=f"{len(parts)} partitions",
                wanted=f"{len(begun)}, as the first time",
                hint="Write it with as many partitions as before, or go on under another name.",
            )
        ends = {**done.ends, **{part.partition: part.end for part in parts}}
        ledger.finish(Done(parts[0].query, batch, ends))


class RtWriter(_Writer, DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self.batch = version_of(self.ledger, options.version)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """The rows of a partition, on an executor."""
        return self.write_part(BATCH_WRITES, self.batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self.finish(self.batch, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """What was published of it stays; the write is to be made again."""
        logger.warning("write_failed name=%s version=%d", self.options.name, self.batch)


class RtStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The sink of a streaming query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """The rows of a partition of a micro-batch, on an executor."""
        query, batch = (
            _context().getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId")
        )
        if not query or batch is None:
            raise RtError("Spark does not say which micro-batch this is", wanted="PySpark 4.2 or newer")
        return self.write_part(query, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a micro-batch are done."""
        self.finish(batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """What was published of it stays; Spark makes the batch again."""
        logger.warning("batch_failed name=%s batch=%d", self.options.name, batchId)


def version_of(ledger: Ledger, wanted: int | None) -> int:
    """The number of a batch write. `rt.WriteConflict` unless it can be made, or made again, now."""
    done, begun = ledger.done(), ledger.begun()
    if wanted is None:
        wanted = done.batch + 1
        if begun:
            raise WriteConflict(
                f"write {begun[0]} was begun and is not finished",
                where=ledger.path,
                hint=f"Make it again, with version={begun[0]} and the same rows, or take another name.",
            )
    _check_turn(ledger, done, begun, wanted)
    return wanted


def next_number(ledger: Ledger, query: str, batch: int, partition: int) -> int:
    """The first number of a partition in a batch that it is not begun in. `rt.WriteConflict`."""
    done, begun = ledger.done(), ledger.begun()
    if done.query not in {"", query}:
        raise other_query(ledger, done.query, query)
    _check_turn(ledger, done, begun, batch)
    if batch == done.batch:
        raise WriteConflict(
            f"batch {batch} is done already, without a partition {partition}",
            where=ledger.path,
            hint="Cut it into as many partitions as the first time, or go on under another name.",
        )
    return done.ends.get(partition, 0)


def other_query(ledger: Ledger, known: str, query: str) -> WriteConflict:
    """Two queries, or a query and batch writes, under one name."""
    return WriteConflict(
        "another query writes, or has written, under that name",
        where=ledger.path,
        got=query,
        wanted=known,
        hint="Give each its own name. A query with a new checkpoint is another one: it publishes from its "
        "beginning.",
    )


def _check_turn(ledger: Ledger, done: Done, begun: list[int], batch: int) -> None:
    if batch < done.batch:
        raise WriteConflict(
            f"batch {batch} comes behind batch {done.batch}, which is done",
            where=ledger.path,
            hint="Was the checkpoint set back? Go on under another name, or with a higher version.",
        )
    if begun and begun != [batch]:
        raise WriteConflict(
            f"batch {begun[0]} was begun and is not finished",
            where=ledger.path,
            got=f"batch {batch}",
            hint="Make that one again, with the same rows, or go on under another name.",
        )


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "rows are written by tasks"
    return context

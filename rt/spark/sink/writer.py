"""Writes to a stream, in batch writes and as a sink of streaming queries.

The driver makes a writer and executors get copies of it. A copy in another process of the driver commits.
They share the ledger.

Spark's pitfalls handled here:
- Spark gives a sink neither the query's id nor, on executors, the batch number. Both are read from the task's
  properties.
- If Spark was killed just after a commit, it commits the batch again. If it was killed before, it runs the
  batch again under the same number.
- A retried task may have its rows in another order, or run in parallel with the first one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass  # noqa: TID251
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from rt.errors import InvalidMessage, InvalidOption, RtError, WriteConflict
from rt.spark.python_workers import freeze_modules, plain_errors
from rt.spark.sink.ledger import CompletedBatch, Ledger, PartitionSpan, listed
from rt.spark.sink.options import WriteOptions
from rt.spark.sink.row_order import order_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger("rt.spark")

BATCH_WRITES: Final = "batch writes"
"""The query's id in a series of batch writes."""


@dataclass
class PartitionWritten(WriterCommitMessage):
    """The rows that a task has published. All of them are merged."""

    query: str
    partition: int
    first: int
    end: int


class _Writer:
    """The common part of batch writes and streams. `schema` is the schema of the rows."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        from rt.spark.sink.spool import check_written_columns

        if overwrite:
            raise InvalidOption(
                "messages cannot be overwritten", hint='Use mode("append"), or outputMode("append").'
            )
        fields = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        check_written_columns(fields, topic=options.topic)
        self.options = options

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.options.ledger, self.options.name)

    def check_nodes(self) -> None:
        """`rt.RtError` if no node answers the driver, or its certificate cannot be used to write.

        Not checked if the files of the certificate are on the executors only.
        """
        from rt.net.tls import TLS
        from rt.spark.sink.partition_publisher import PartitionPublisher

        nodes = self.options.nodes
        if all(map(os.path.exists, (nodes.ca, nodes.cert, nodes.key))):
            tls = TLS(ca=nodes.ca, cert=nodes.cert, key=nodes.key)
            PartitionPublisher(self.options, tls, 0).check_reachable()

    def write_part(self, query: str, batch: int, batches: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """Publish the rows of this task's partition. All are merged on return."""
        from rt.net.tls import TLS
        from rt.spark.sink.partition_publisher import PartitionPublisher, spool_directory
        from rt.spark.sink.spool import Spool

        freeze_modules()
        options, nodes, ledger = self.options, self.options.nodes, self.ledger
        partition = _context().partitionId()
        tls = TLS(ca=nodes.ca, cert=nodes.cert, key=nodes.key)
        publisher = PartitionPublisher(options, tls, partition)
        where = f"partition {partition} of batch {batch} of {options.name}"
        with Spool(spool_directory(options), options.topic) as spool:
            try:
                spool.fill(batches)
            except InvalidMessage as error:
                raise self._refused(error, batch, where) from None
            order = ledger.order(batch, partition)
            if order is None:
                first = ledger.next_number(query, batch, partition)
                try:
                    publisher.check_untouched(first)
                except WriteConflict:
                    if ledger.order(batch, partition) is None:  # Otherwise another attempt has just started.
                        raise
                order = ledger.claim(batch, partition, PartitionSpan(query, first, bytes(spool.digests)))
            if order.query != query:
                raise ledger.other_query(order.query, query)
            permutation = order_of(order.digests, spool.digests, where=where)
            if permutation is not None:
                logger.warning("rows_reordered where=%r", where)
            publisher.deliver(order, spool.rows(permutation))
        return PartitionWritten(query, partition, order.first, order.end)

    def _refused(self, error: InvalidMessage, batch: int, where: str) -> InvalidMessage:
        """Return `error` with a hint what to do: rows of other partitions may be published already."""
        error.where = f"{error.where} of {where}"
        hints = [error.hint, "Nothing of this partition is published.", self._how_to_repeat(batch)]
        if started := self.ledger.partitions(batch):
            hints.append(f"Partitions {listed(started)} may be published: keep their rows.")
        error.hint = " ".join(filter(None, hints))
        return error

    def _how_to_repeat(self, batch: int) -> str:
        """The hint how to repeat the write with a corrected row."""
        raise NotImplementedError

    def finish(self, batch: int, messages: list[WriterCommitMessage | None]) -> None:
        """Record that all tasks of a batch are done."""
        parts = [message for message in messages if isinstance(message, PartitionWritten)]
        done, ledger = self.ledger.done(), self.ledger
        if len(parts) != len(messages) or not parts:
            raise RtError("a task did not report what it has written", where=f"batch {batch}")
        started = ledger.partitions(batch)
        if started != {part.partition for part in parts}:
            raise WriteConflict(
                f"batch {batch} has another number of partitions than at its first write",
                where=ledger.path,
                got=f"{len(parts)} partitions",
                expected=f"{len(started)}",
                hint="Write it with the same number of partitions, or use another name.",
            )
        ends = {**done.ends, **{part.partition: part.end for part in parts}}
        ledger.finish(CompletedBatch(parts[0].query, batch, ends))


class RtWriter(_Writer, DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self.batch = self.ledger.choose_version(options.version)

    def _how_to_repeat(self, batch: int) -> str:
        return f"Correct the row, and write again with version={batch}."

    @plain_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        return self.write_part(BATCH_WRITES, self.batch, iterator)

    @plain_errors
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.finish(self.batch, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Published rows stay. The write must be repeated."""
        started = listed(self.ledger.partitions(self.batch))
        logger.warning("write_failed name=%s version=%d started=%r", self.options.name, self.batch, started)


class RtStreamWriter(_Writer, DataSourceStreamArrowWriter):
    @property
    def is_new(self) -> bool:
        """Whether nothing was written yet."""
        return self.ledger.done().batch < 0 and not self.ledger.started()

    def _how_to_repeat(self, batch: int) -> str:  # noqa: ARG002
        return "Correct the row in the query, and start it again with its checkpoint."

    @plain_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        query, batch = (
            _context().getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId")
        )
        if not query or batch is None:
            raise RtError(
                "Spark did not report the number of the micro-batch", expected="PySpark 4.2 or newer"
            )
        return self.write_part(query, int(batch), iterator)

    @plain_errors
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.finish(batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Published rows stay. Spark repeats the batch."""
        logger.warning("batch_failed name=%s batch=%d", self.options.name, batchId)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "rows are written by tasks"
    return context

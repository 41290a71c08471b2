"""Reads a log as a stream.

`rt.spark.source.offset` has the offsets.

Spark's pitfalls handled here:
- Spark does not record the start of a query. It asks for the start again after a restart, when the log may
  start or end elsewhere. So each offset has the start of the query, and a first batch that is repeated starts
  where it started before.
- After a restart Spark may ask for the end of the log before it names an offset. So the log is opened again
  for an offset of another line of epochs. Then the log raises `rt.Diverged`, or waits for nodes of that line.
  A directory knows no lines: there each offset is compared with the position of the forced reset.
- An end never goes back, and is never before a message that was read. It is after the last verified message,
  never the size of a file.
- The limits also apply to `Trigger.AvailableNow`, in micro-batches.

With `consumer` the nodes hold the messages that may be read again after a crash: from the start of a new
query, then from the end of the micro-batch before the last one. Spark reports that a micro-batch is done only
when it plans the next one. So a hold is always one micro-batch late, also while a query is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from rt.cluster_epoch import line_of
from rt.errors import RtError
from rt.events import SkipForward
from rt.log.read.log_source import LogSource
from rt.spark.options import ClusterSource
from rt.spark.python_workers import plain_errors
from rt.spark.source.batch_reader import RangesReader, resolve
from rt.spark.source.log_source import LocalLog, open_log
from rt.spark.source.offset import Offset, parse_offset
from rt.spark.source.options import ReadOptions
from rt.spark.source.partitioner import end_within

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger("rt.spark")


class RtStreamReader(RangesReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query: one object on the driver, with copies on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._log: LogSource | None = None
        self._first: Offset | None = None
        """Where the query starts, if it is new; set at the first request."""
        self._is_held = False
        self._last: int | None = None
        """The position at which the query ends, with `Trigger.AvailableNow`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None}

    @property
    def log(self) -> LogSource:
        if self._log is None:
            self._log = open_log(self.options.where, epoch=self.options.epoch)
        return self._log

    @plain_errors
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        if self._first is None:
            log = self.log
            low, high = log.bounds()
            position = resolve(self.options.start, log, self.options, low, high)
            self._first = Offset(position, log.epoch, position)
        return self._first.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit of one micro-batch. If both limits are set, `latestOffset` applies the second."""
        options = self.options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        return ReadAllAvailable()

    @plain_errors
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the query at the current end of the log."""
        self._last = self.log.bounds()[1]

    @plain_errors
    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """The end of the log, for monitoring the query's lag."""
        return {"position": self.log.bounds()[1]}

    @plain_errors
    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """The end of the next micro-batch, never before `start`."""
        before = _offset(start)
        first, log = before.position, self._log_of(before)
        low, high = log.bounds()
        if before == self._first and not self._is_held:
            self._hold(first)
            self._is_held = True
        end = high if self._last is None else min(high, self._last)
        if first > high:
            self.loss.on_beyond_end("the query", first, high)
            return before.to_json()
        if isinstance(limit, ReadMaxRows):
            end = min(end, max(first, low) + limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.max_bytes_per_trigger
        if bytes_max is not None and not isinstance(limit, ReadAllAvailable) and first < end:
            end = end_within(log.outline(first, end), first, end, bytes_max)
        if end <= first:
            return before.to_json()
        return Offset(end, log.epoch, before.first).to_json()

    @plain_errors
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        before, after = _offset(start), _offset(end)
        first, last = before.position, after.position
        if before.is_first:
            first = after.first  # After a restart, `start` is where a new query would start.
        log = self._log_of(after)
        low, high = log.bounds()
        if first > last:
            self.loss.on_loss(SkipForward(last, first, "the checkpoint goes back"))
            return []
        if last > high:
            self.loss.on_beyond_end("the checkpoint", last, high)
            last = max(first, high)
        if first < min(low, last):
            self.loss.on_loss(SkipForward(first, min(low, last), "trimmed"))
        return self.plan(log, max(first, low), last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.read_range(partition)

    @plain_errors
    def commit(self, end: dict[str, int]) -> None:
        """Move the hold to `end`: Spark will not ask again for messages before `end`.

        If no node can be reached, more messages are retained than needed; the next call moves the hold.
        """
        try:
            self._hold(_offset(end).position)
        except RtError as error:
            if not error.retriable:
                raise
            logger.warning("hold_not_moved consumer=%s error=%r", self.options.consumer, str(error))

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _log_of(self, offset: Offset) -> LogSource:
        """The log in which `offset` is right."""
        epoch = offset.epoch
        if epoch and isinstance(self.options.where, ClusterSource):
            known = 0 if self._log is None else self._log.epoch
            if not known or line_of(known) != line_of(epoch):
                self.stop()
                self._log = open_log(self.options.where, epoch=epoch)
        log = self.log
        if isinstance(log, LocalLog):
            log.check(offset.position, epoch)
        return log

    def _hold(self, position: int) -> None:
        if self.options.consumer is not None:
            self.log.hold(self.options.consumer, position)


class RefusedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises `error` at the first call. If `streamReader` itself raised it, Spark would report another
    error.
    """

    def __init__(self, error: RtError) -> None:
        self._error = error

    @plain_errors
    def _refuse(self) -> NoReturn:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._refuse()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        self._refuse()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: ARG002, N802
        self._refuse()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        self._refuse()


def _offset(offset: dict[str, int] | str) -> Offset:
    return parse_offset("the offset in the checkpoint", offset)

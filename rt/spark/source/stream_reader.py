"""Reads a log as a stream.

An offset is {"position": N}: everything before N was read. It has one key and one integer, so that its text
in a checkpoint, which Spark compares, is unique.

Spark's pitfalls handled here:
- The start of a query is not in its checkpoint before its first batch is done, and Spark asks for it again
  after a restart. A reader answers the same for its lifetime. But a query that starts with "latest" and fails
  in its first batch may start later after a restart. To avoid that, give a position (see
  `rt.spark.data_source.latest_position`).
- An end never goes back, nor before what was read. It is after the last verified message, never the size of a
  file.
- The limits also apply to `Trigger.AvailableNow`, in micro-batches.

With `consumer` the nodes hold what may be read again after a crash: from the start of a new query, then from
the end of the last micro-batch but one. Spark reports that a micro-batch is done only when it plans the next
one. So a hold is always one micro-batch late, also while a query is idle.
"""

from __future__ import annotations

import json
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

from rt.errors import RtError
from rt.events import SkipForward
from rt.log.read.log_source import LogSource
from rt.spark.python_workers import plain_errors
from rt.spark.source.batch_reader import RangesReader, resolve
from rt.spark.source.log_source import open_log
from rt.spark.source.options import ReadOptions, parse_position
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
        self._first: int | None = None
        """Where the query starts; set at the first request."""
        self._last: int | None = None
        """`Trigger.AvailableNow`: where it ends."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None}

    @property
    def log(self) -> LogSource:
        if self._log is None:
            self._log = open_log(self.options.where)
        return self._log

    @plain_errors
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        if self._first is None:
            low, high = self.log.bounds()
            first = resolve(self.options.start, self.log, self.options, low, high)
            self._hold(first)
            self._first = first
        return _offset(self._first)

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
        return _offset(self.log.bounds()[1])

    @plain_errors
    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Where the next micro-batch ends, never before `start`."""
        first = _position(start)
        low, high = self.log.bounds()
        end = high if self._last is None else min(high, self._last)
        if first > high:
            self.loss.on_beyond_end("the query", first, high)
            return _offset(first)
        if isinstance(limit, ReadMaxRows):
            end = min(end, max(first, low) + limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.max_bytes_per_trigger
        if bytes_max is not None and not isinstance(limit, ReadAllAvailable) and first < end:
            end = end_within(self.log.outline(first, end), first, end, bytes_max)
        return _offset(max(end, first))

    @plain_errors
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        first, last = _position(start), _position(end)
        low, high = self.log.bounds()
        if first > last:
            # After a restart, the new start may lie after the batch that is repeated.
            self.loss.on_loss(SkipForward(last, first, "the query restarted after it"))
            return []
        if last > high:
            self.loss.on_beyond_end("the checkpoint", last, high)
            last = max(first, high)
        if first < min(low, last):
            self.loss.on_loss(SkipForward(first, min(low, last), "trimmed"))
        return self.plan(self.log, max(first, low), last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.read_range(partition)

    @plain_errors
    def commit(self, end: dict[str, int]) -> None:
        """Spark will not ask again for messages before `end`.

        If no node can be reached, more is retained than needed; the next call moves the hold.
        """
        try:
            self._hold(_position(end))
        except RtError as error:
            if not error.retriable:
                raise
            logger.warning("hold_not_moved consumer=%s error=%r", self.options.consumer, str(error))

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _hold(self, position: int) -> None:
        if self.options.consumer is not None:
            self.log.hold(self.options.consumer, position)


class RefusedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises `error` at the first call. If `streamReader` itself raises, Spark reports another error."""

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


def _offset(position: int) -> dict[str, int]:
    return {"position": position}


def _position(offset: dict[str, int] | str) -> int:
    parsed = json.loads(offset) if isinstance(offset, str) else offset
    return parse_position("the offset in the checkpoint", parsed)

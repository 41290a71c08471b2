"""Reads a range of a log in a batch query, and what batch and streaming share.

The driver plans in short-lived processes, executors read in others, and readers are pickled in between. So
they hold options and plans, never files or connections.

Spark's pitfalls handled here:
- Spark rejects a reader that overrides `pushFilters` while spark.sql.python.filterPushdown.enabled is off,
  the default. It compares the method, so ours is an object that compares equal to the base class's.
- Spark prunes no columns; a user's schema does.
- With no partitions Spark calls `read` with nothing to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceReader, InputPartition

from rt.errors import InvalidOption
from rt.events import SkipForward
from rt.log.read.projection import Projection
from rt.spark.source.columns import check_columns
from rt.spark.source.data_loss import beyond_end, loss_handler
from rt.spark.source.filter_pushdown import PushedFilters, push_filters
from rt.spark.source.log_source import LogSource, open_log
from rt.spark.source.options import AtTime, Bound, ReadOptions
from rt.spark.source.partitioner import plan_parts
from rt.spark.source.python_workers import freeze_modules
from rt.spark.source.timestamp_seek import first_at

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

logger = logging.getLogger("rt.spark")


class RtPartition(InputPartition):
    """Positions from `start` up to, not including, `end`."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__((start, end))
        self.start = start
        self.end = end


class RangesReader:
    """Plans ranges on the driver, and reads them on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.columns = check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields])
        self.interest = Projection(values="value" in self.columns, topics=options.topics)

    def on_loss(self, event: Any) -> None:
        """Raise or log, as `failOnDataLoss` says."""
        loss_handler(self.options.where, fail=self.options.fail_on_data_loss)(event)

    def beyond_end(self, what: str, position: int, end: int) -> None:
        """Raise or log, as `failOnDataLoss` says, for a position after the end of the log."""
        beyond_end(what, position, end, self.options.where, fail=self.options.fail_on_data_loss)

    def plan(self, log: LogSource, start: int, end: int) -> list[InputPartition]:
        """Partitions of the range from `start` to `end`, without trimmed messages."""
        options = self.options
        if start >= end:
            return []
        parts = plan_parts(
            list(log.outline(start, end)),
            start,
            end,
            min_parts=options.min_partitions,
            max_part_bytes=options.max_partition_bytes,
        )
        return [RtPartition(*part) for part in parts]

    def read_range(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The record batches of a partition; none for anything else."""
        from rt.spark.source.arrow_batches import gather

        if not isinstance(partition, RtPartition):
            return
        log = open_log(self.options.where)
        freeze_modules()
        try:
            batches = log.read(partition.start, partition.end, self.interest, self.on_loss)
            yield from gather(batches, self.columns)
        finally:
            log.close()


class RtReader(RangesReader, DataSourceReader):
    """A batch query. Its bounds are resolved once, when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.pushed = PushedFilters(interest=self.interest)
        self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        options, pushed = self.options, self.pushed
        if options.max_offsets_per_trigger or options.max_bytes_per_trigger:
            logger.warning("maxOffsetsPerTrigger and maxBytesPerTrigger have no effect in a batch query")
        self.interest = pushed.interest
        log = open_log(options.where)
        freeze_modules()
        try:
            low, high = log.bounds()
            start = resolve(options.start, log, options, low, high)
            end = resolve(options.end, log, options, low, high)
            for what, position in (("startingOffsets", start), ("endingOffsets", end)):
                if position > high:
                    self.beyond_end(what, position, high)
            # Trimmed positions that a filter excludes are no loss.
            start, end = max(start, pushed.start), min(end, pushed.end, high)
            if start < min(low, end):
                self.on_loss(SkipForward(start, min(low, end), "trimmed"))
            return self.plan(log, max(start, low), end)
        finally:
            log.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, on an executor."""
        return self.read_range(partition)


class _PushFilters:
    """The `pushFilters` of a reader. Compares equal to the base class's, so that Spark's override check does
    not reject it; PySpark before 4.1 has none.
    """

    __func__ = staticmethod(cast("Callable[..., Any]", getattr(DataSourceReader, "pushFilters", None)))

    def __init__(self, reader: RtReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Record what need not be read. Returns the filters that Spark has to apply."""
        self._reader.pushed, left = push_filters(filters, self._reader.pushed)
        return left


def resolve(bound: Bound, log: LogSource, options: ReadOptions, low: int, high: int) -> int:
    """The current position of a bound, in a log with positions `low` to `high`."""
    match bound:
        case "earliest":
            return low
        case "latest":
            return high
        case AtTime(timestamp_ns, option):
            position = first_at(log, low, high, timestamp_ns, _ignore)
            if position >= high and option == "startingTimestamp" and not options.latest_if_no_time:
                raise InvalidOption(
                    "no message has a timestamp at or after startingTimestamp",
                    where=options.where,
                    hint="Set startingOffsetsByTimestampStrategy=latest to start at the end.",
                )
            return position
        case _:
            return bound


def _ignore(event: object) -> None:
    """Missing messages have no timestamp. The query reports them when it reads there."""

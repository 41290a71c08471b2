"""Reading a range of a log in batch, and what batch and streaming share.

The driver plans in short-lived processes of its own, executors read in others: what goes from one to the
other is pickled, so readers hold options and plans, never files or connections.

Traps that this avoids. Spark refuses a reader that overrides `pushFilters` while its switch for that
(spark.sql.python.filterPushdown.enabled) is off, as it is by default: it looks at the method, so ours is an
object that looks like the base class's. It prunes no columns: a user's schema does. Partitions may be none,
then `read` is called with nothing to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceReader, InputPartition

from rt.errors import InvalidOption
from rt.events import SkipForward
from rt.log.interest import Interest
from rt.spark.columns import check_columns
from rt.spark.filters import Pushed, push_filters
from rt.spark.log_source import LogSource, open_log
from rt.spark.losses import beyond_end, loss_handler
from rt.spark.options import AtTime, Bound, ReadOptions
from rt.spark.planning import plan_parts
from rt.spark.times import first_at
from rt.spark.workers import freeze_modules

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
        self.interest = Interest(values="value" in self.columns, topics=options.topics)

    def on_loss(self, event: Any) -> None:
        """As `failOnDataLoss` says."""
        loss_handler(self.options.where, fail=self.options.fail_on_data_loss)(event)

    def beyond_end(self, what: str, position: int, end: int) -> None:
        """As `failOnDataLoss` says, of a position that the log has not reached."""
        beyond_end(what, position, end, self.options.where, fail=self.options.fail_on_data_loss)

    def plan(self, log: LogSource, start: int, end: int) -> list[InputPartition]:
        """Partitions from `start` to `end`, of which the log has all that is not trimmed."""
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
        """The record batches of a partition; of what is no partition of ours, none."""
        from rt.spark.gathering import gather

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
    """A batch query: bounds are resolved once, when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.pushed = Pushed(interest=self.interest)
        self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        """What to read in parallel."""
        options, pushed = self.options, self.pushed
        if options.max_offsets_per_trigger or options.max_bytes_per_trigger:
            logger.warning("maxOffsetsPerTrigger and maxBytesPerTrigger mean nothing in a batch query")
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
            # What a filter leaves out anyway is not missed.
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
    """`pushFilters` of a reader. To Spark's check whether it is overridden it says no; PySpark before 4.1 has
    none.
    """

    __func__ = staticmethod(cast("Callable[..., Any]", getattr(DataSourceReader, "pushFilters", None)))

    def __init__(self, reader: RtReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Note what need not be read; what Spark has to apply by itself."""
        self._reader.pushed, left = push_filters(filters, self._reader.pushed)
        return left


def resolve(bound: Bound, log: LogSource, options: ReadOptions, low: int, high: int) -> int:
    """The position that a bound stands for now, in a log that goes from `low` to `high`."""
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
                    hint="Set startingOffsetsByTimestampStrategy=latest to begin at the end then.",
                )
            return position
        case _:
            return bound


def _ignore(event: object) -> None:
    """What is missing has no timestamp; the query is told when it reads there."""

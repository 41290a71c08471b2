"""Reads a range of a log in a batch query. Also the common part of batch and streaming queries.

The driver plans in short-lived processes, executors read in others, and readers are pickled in between. So
readers hold options and plans, never files or connections.

Spark's pitfalls handled here:
- Spark rejects a reader that overrides `pushFilters` while spark.sql.python.filterPushdown.enabled is off,
  the default. Spark compares the methods. So the method here is an object that compares equal to the method
  of the base class.
- Spark does not prune columns. Only a user's schema does.
- If there are no partitions, Spark still calls `read`, with nothing to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import Struct
from pyspark.sql.datasource import DataSourceReader, InputPartition

from rt.errors import Gap, InvalidOption, RtError
from rt.events import BadMessage, SkipForward
from rt.log.read.log_source import LogSource
from rt.log.read.projection import Projection
from rt.spark.python_workers import freeze_modules, hide_trace, plain_errors, quiet_end
from rt.spark.source.columns import HEADERS_KIND, check_columns
from rt.spark.source.filter_pushdown import PushedFilters, push_filters
from rt.spark.source.log_source import LocalLog, open_log
from rt.spark.source.offset import Offset
from rt.spark.source.options import AtTime, Bound, ReadOptions
from rt.spark.source.partitioner import plan_parts

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

logger = logging.getLogger("rt.spark")

_LOSS_HINT: Final = "Set failOnDataLoss=false to continue without them."


class LossPolicy(Struct, frozen=True):
    """Reports messages that a query requested and that are missing in the log `where`. No loss is silent.

    If `fail`, the option failOnDataLoss, is set, `rt.Gap` is raised; otherwise a warning is logged.
    """

    where: object
    fail: bool

    def on_loss(self, event: SkipForward | BadMessage) -> None:
        if self.fail:
            raise _gap(event, self.where)
        logger.warning("data_loss where=%s event=%s", self.where, event)

    def on_beyond_end(self, what: str, position: int, end: int) -> None:
        """Report that `what` is at `position`, after the end of the log."""
        event = SkipForward(end, position, "not there")
        if self.fail:
            raise Gap(
                f"{what} is at position {position}, but the log ends with {end}",
                event=event,
                where=self.where,
                hint=f"Is it another log, or a copy that lags? {_LOSS_HINT}",
            )
        logger.warning("data_loss where=%s event=%s", self.where, event)


def _gap(event: SkipForward | BadMessage, where: object) -> Gap:
    if isinstance(event, BadMessage):
        what = f"messages {event.start} to {event.end - 1} cannot be decoded: {event.reason}"
        return Gap(what, event=event, where=f"{event.path}, offset {event.offset}", hint=_LOSS_HINT)
    count = event.resumed - event.wanted
    return Gap(
        f"the query needs position {event.wanted}, but the log starts again at position {event.resumed}: "
        f"{count} messages are missing ({event.reason})",
        event=event,
        where=where,
        hint=_LOSS_HINT,
    )


class RtPartition(InputPartition):
    """Positions from `start` up to, not including, `end`, as nodes in `epoch` have them."""

    def __init__(self, start: int, end: int, epoch: int = 0) -> None:
        super().__init__((start, end))
        self.start = start
        self.end = end
        self.epoch = epoch


class RangesReader:
    """Plans ranges on the driver, and reads them on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.columns = check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields])
        if strict := [field.name for field in schema.fields if not field.nullable]:
            raise InvalidOption(
                f"the schema has columns that are NOT NULL: {', '.join(strict)}",
                hint="Leave that out: Spark expects nullable columns of a source.",
            )
        if options.include_headers and "headers" not in self.columns:
            raise InvalidOption(
                "includeHeaders is true, but the schema has no column headers",
                hint=f"Add headers {HEADERS_KIND} to it, or leave the option out. A table must be "
                "created with it.",
            )
        needs_values = not {"value", "headers"}.isdisjoint(self.columns)
        self.interest = Projection(values=needs_values, topics=options.topics)
        self.loss = LossPolicy(options.where, options.fail_on_data_loss)

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
        return [RtPartition(*part, log.epoch) for part in parts]

    def read_range(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The record batches of a partition; no batches if `partition` is anything else."""
        from rt.spark.source.arrow_batches import gather

        if not isinstance(partition, RtPartition):
            return
        try:
            where, epoch = self.options.where, partition.epoch
            end = partition.end
            with closing(open_log(where, is_planned=True, epoch=epoch, position=end)) as log:
                freeze_modules()
                batches = log.read(partition.start, partition.end, self.interest, self.loss.on_loss)
                for batch in gather(batches, self.columns):
                    with quiet_end():
                        yield batch
        except RtError:
            hide_trace()
            raise


class RtReader(RangesReader, DataSourceReader):
    """A batch query. Its bounds are resolved once, when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.pushed = PushedFilters(interest=self.interest)
        self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    @plain_errors
    def partitions(self) -> list[InputPartition]:
        options, pushed = self.options, self.pushed
        if options.max_offsets_per_trigger or options.max_bytes_per_trigger:
            logger.warning("maxOffsetsPerTrigger and maxBytesPerTrigger have no effect in a batch query")
        self.interest = pushed.interest
        with closing(open_log(options.where, epoch=options.epoch)) as log:
            freeze_modules()
            low, high = log.bounds()
            start = resolve(options.start, log, options, low, high)
            end = resolve(options.end, log, options, low, high)
            for what, position in (("startingOffsets", start), ("endingOffsets", end)):
                if position > high:
                    self.loss.on_beyond_end(what, position, high)
            # Trimmed positions that a filter excludes are no loss.
            start, end = max(start, pushed.start), min(end, pushed.end, high)
            if start < min(low, end):
                self.loss.on_loss(SkipForward(start, min(low, end), "trimmed"))
            return self.plan(log, max(start, low), end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.read_range(partition)


class _PushFilters:
    """The `pushFilters` of a reader. It compares equal to the method of the base class, so that Spark's
    override check does not reject it. PySpark before 4.1 has no such method.
    """

    __func__ = staticmethod(cast("Callable[..., Any]", getattr(DataSourceReader, "pushFilters", None)))

    def __init__(self, reader: RtReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Record which messages need not be read. Returns the filters that Spark has to apply."""
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
            position = log.find_time(low, high, timestamp_ns)
            if position >= high and option == "startingTimestamp" and not options.latest_if_no_time:
                raise InvalidOption(
                    "no message has a timestamp at or after startingTimestamp",
                    where=options.where,
                    hint="Set startingOffsetsByTimestampStrategy=latest to start at the end.",
                )
            return position
        case Offset(position, epoch):
            if isinstance(log, LocalLog):
                log.check(position, epoch)
            return position

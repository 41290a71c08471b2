"""Reading a log as a stream.

An offset is {"position": N}: everything before N was read. It is one key with one whole number, so that the
text in a checkpoint, which Spark compares as text, is always the same for the same place.

Traps that this avoids. Where a query begins is not in its checkpoint before its first batch is done, and
Spark asks for it again after a restart: one answer is kept for the life of a reader, but a query that begins
with "latest" and fails in its first batch may begin later when it is started again; who minds gives a
position (`rt.spark.source.latest_position` says which). An end never goes back, nor behind what was read; it
is behind the last message that verifies, never the size of a file. What is limited is limited also when
Spark asks for all there is now, in micro-batches (`Trigger.AvailableNow`), and only then.

With `consumer` the nodes hold back what may be read again after a crash: from the start of a new query on,
then from the end of the last micro-batch but one. Spark tells that a micro-batch is done only when it plans
the next one, so that a hold is always one behind, also while a query rests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from rt.spark.log_source import LogSource, open_log
from rt.spark.options import ReadOptions, parse_position
from rt.spark.planning import end_within
from rt.spark.reading import RangesReader, resolve

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger("rt.spark")


class RtStreamReader(RangesReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query: one object on the driver for its life, copies of it on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._log: LogSource | None = None
        self._first: int | None = None
        """Where the query begins, once it was asked for."""
        self._last: int | None = None
        """`Trigger.AvailableNow`: where it ends."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None}

    @property
    def log(self) -> LogSource:
        """The log, opened when it is needed first."""
        if self._log is None:
            self._log = open_log(self.options.where)
        return self._log

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Where a new query begins."""
        if self._first is None:
            low, high = self.log.bounds()
            first = resolve(self.options.start, self.log, self.options, low, high)
            self._hold(first)
            self._first = first
        return _offset(self._first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What one micro-batch may hold; with both limits, `latestOffset` applies the second."""
        options = self.options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query ends with what is there now."""
        self._last = self.log.bounds()[1]

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """The end of the log, for whoever watches how far a query is behind."""
        return _offset(self.log.bounds()[1])

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Where the next micro-batch ends, never before `start`."""
        first = _position(start)
        low, high = self.log.bounds()
        end = high if self._last is None else min(high, self._last)
        if first > high:
            self.beyond_end("the query", first, high)
            return _offset(first)
        if isinstance(limit, ReadMaxRows):
            end = min(end, max(first, low) + limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.max_bytes_per_trigger
        if bytes_max is not None and not isinstance(limit, ReadAllAvailable) and first < end:
            end = end_within(self.log.outline(first, end), first, end, bytes_max)
        return _offset(max(end, first))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """What to read in parallel of a micro-batch."""
        first, last = _position(start), _position(end)
        low, high = self.log.bounds()
        if first > last:
            # The start was asked for anew after a restart, and lies behind the batch that is made again.
            self.on_loss(SkipForward(last, first, "the query began again behind it"))
            return []
        if last > high:
            self.beyond_end("the checkpoint", last, high)
            last = max(first, high)
        if first < min(low, last):
            self.on_loss(SkipForward(first, min(low, last), "trimmed"))
        return self.plan(self.log, max(first, low), last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, on an executor."""
        return self.read_range(partition)

    def commit(self, end: dict[str, int]) -> None:
        """Spark will not ask again for what is before `end`.

        While no node hears it, more is kept than is needed: the next call says so again.
        """
        try:
            self._hold(_position(end))
        except RtError as error:
            if not error.retriable:
                raise
            logger.warning("hold_not_moved consumer=%s error=%r", self.options.consumer, str(error))

    def stop(self) -> None:
        """Release files and connections."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _hold(self, position: int) -> None:
        if self.options.consumer is not None:
            self.log.hold(self.options.consumer, position)


def _offset(position: int) -> dict[str, int]:
    return {"position": position}


def _position(offset: dict[str, int] | str) -> int:
    said = json.loads(offset) if isinstance(offset, str) else offset
    return parse_position("the offset in the checkpoint", said)

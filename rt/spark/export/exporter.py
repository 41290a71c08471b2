"""Exports a merged log to Parquet: part by part, each once, before it is trimmed.

Invariants:
- A part is a range of positions that follows the previous part. Spark reads it from the log, verified, and
  writes it to staging. It is accepted if it has one row per position.
- All parts are of one log: after a forced reset, positions may have other messages.
- `ExportTarget` then publishes the part exactly once. The nodes' hold is moved only after that.
- Unreadable messages raise an error that names them. With `skip_lost` they are logged in a line instead.

Columns: those of `format("rt")`, headers, timestamp_ns and run. Directories: `date` (of the timestamp, UTC)
and `topic`. In directory names an empty topic reads as null. A topic that cannot name a directory (longer
than 80 bytes, with a NUL, or the name that means null) is cut and made unique by a hash. `full_topic` in the
files is the published topic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from rt.errors import Corrupt, Gap, LogNotFound, WriteConflict
from rt.events import SkipForward
from rt.log.disk import REAL, storage_errors
from rt.log.format.segment import LogKind
from rt.log.read.log_source import LogSource
from rt.log.scan.directory import read_identity
from rt.spark.export.target import ExportedPart, ExportTarget
from rt.spark.options import ClusterSource
from rt.spark.source.columns import HEADERS_KIND
from rt.spark.source.log_source import open_log
from rt.spark.source.offset import offset_text
from rt.spark.source.options import DirectorySource
from rt.spark.source.partitioner import end_within

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("rt.spark")

PART_BYTES: Final = 256 * 2**20
TOPIC_BYTES_MAX: Final = 80
"""An escaped topic may be three times as long, and the name of a directory has at most 255 bytes."""
SCHEMA: Final = (
    "position bigint, timestamp timestamp, timestamp_ns bigint, session string, run bigint, number bigint, "
    f"topic string, value binary, headers {HEADERS_KIND}"
)
_POLL_SECONDS: Final = 1.0
_DAY_NS: Final = 86_400_000_000_000
_DATE: Final = (
    f"date_from_unix_date(cast(timestamp_ns div {_DAY_NS} - if(timestamp_ns % {_DAY_NS} < 0, 1, 0) as int))"
)
"""Calculated in whole numbers: `/` would round the last nanoseconds of a day up to the next day."""
_IS_NAME: Final = (
    f"octet_length(topic) <= {TOPIC_BYTES_MAX} and topic <> '__HIVE_DEFAULT_PARTITION__' "
    "and not contains(topic, char(0))"
)
_DIRECTORY: Final = (
    f"if({_IS_NAME}, topic, concat(replace(left(topic, 20), char(0), ''), '~', sha2(topic, 256)))"
)


class ExportSettings(Struct, frozen=True):
    """Where to start, and the size of the parts. `part_bytes` is the approximate size in the log.
    `linger_seconds` is how long a smaller part waits for more. `hold` is the name under which the nodes
    retain what is not exported.
    """

    where: DirectorySource | ClusterSource
    hold: str | None = None
    part_bytes: int = PART_BYTES
    linger_seconds: float = 60.0
    skip_lost: bool = False


class Exporter:
    """One export. `wait` is called to sleep some seconds. If it raises, the export ends between parts."""

    def __init__(
        self,
        settings: ExportSettings,
        target: ExportTarget,
        spark: SparkSession,
        *,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._target = target
        self._spark = spark
        self._wait = wait

    def parts(self, *, once: bool) -> Iterator[ExportedPart]:
        """Export part by part, and yield each when it is complete. With `once`, up to the current end of the
        log.
        """
        stream = self._stream()
        if (part := self._target.last()) is not None and part.stream not in {"", stream}:
            raise WriteConflict(
                "the target has the export of another stream",
                where=self._target.storage.url(""),
                got=stream,
                expected=part.stream,
                hint="Use one target per stream.",
            )
        epoch, reached = (0, 0) if part is None else (part.epoch, part.end)
        with closing(open_log(self._settings.where, epoch=epoch, position=reached)) as log:
            part = self._target.open()
            low, high = log.bounds()
            position = low if part is None else part.end
            self._hold(log, position)
            if position > high:
                raise Gap(
                    f"the export has reached position {position}, but the log ends with {high}",
                    event=SkipForward(high, position, "not there"),
                    where=self._settings.where,
                    hint="Is it another log? Use one target per log.",
                )
            last = high if once else None
            while (end := self._next_end(log, position, last)) is not None:
                yield (part := self._export(log, stream, position, end))
                position = part.end
                self._hold(log, position)

    def _next_end(self, log: LogSource, position: int, last: int | None) -> int | None:
        """Wait until the next part is large enough, and return its end; None if `last` is exported."""
        settings = self._settings
        due: float | None = None
        while last is None or position < last:
            low, high = log.bounds()
            end = high if last is None else last
            start = max(position, low)
            if start >= end and last is not None:
                return last  # The rest was trimmed meanwhile.
            if start < end:
                within = end_within(log.outline(start, end), start, end, settings.part_bytes)
                due = time.monotonic() + settings.linger_seconds if due is None else due
                if within < end or last is not None or time.monotonic() >= due:
                    return within
            self._wait(_POLL_SECONDS)
        return None

    def _stream(self) -> str:
        """The name of the stream. `rt.LogNotFound` for a filtered copy, which is incomplete by design."""
        where = self._settings.where
        if isinstance(where, ClusterSource):
            return where.stream
        with storage_errors(where.path, "opening a log"):
            identity = read_identity(REAL, where.path)
        if identity.kind is LogKind.FILTERED and not self._settings.skip_lost:
            raise LogNotFound(
                "the directory holds a copy of some topics only",
                where=where.path,
                hint="Export from the nodes, or from a copy of all topics.",
            )
        return identity.name

    def _export(self, log: LogSource, stream: str, start: int, end: int) -> ExportedPart:
        """Export the positions from `start` to `end`, or those that are not trimmed."""
        low, high = log.bounds()
        if start < low:
            self._report_loss(start, min(low, end))
        target = self._target
        epoch = log.epoch
        rows = self._stage(log, max(start, low), end) if low < end else 0
        return target.commit(
            start, end, rows=rows, log_end=high, time_ns=time.time_ns(), stream=stream, epoch=epoch
        )

    def _stage(self, log: LogSource, start: int, end: int) -> int:
        """Write the positions to staging, and return their number."""
        url = self._target.storage.url(self._target.staging)
        frame = self._rows(start, end, log.epoch)
        frame.write.mode("overwrite").partitionBy("date", "topic").option("compression", "zstd").parquet(url)
        return self._check(log, url, start, end)

    def _rows(self, start: int, end: int, epoch: int) -> DataFrame:
        where = self._settings.where
        if isinstance(where, DirectorySource):
            options = {"path": where.path}
        else:
            files = {"ca": where.ca, "cert": where.cert, "key": where.key}
            options = {"endpoints": ",".join(where.endpoints), "stream": where.stream, **files}
        options |= {
            "startingOffsets": offset_text(start, epoch),
            "endingOffsets": str(end),
            "failOnDataLoss": "false" if self._settings.skip_lost else "true",
        }
        return (
            self._spark.read.format("rt")
            .schema(SCHEMA)
            .options(**options)
            .load()
            .selectExpr(
                *("position", "timestamp", "timestamp_ns", "session", "run", "number", "value", "headers"),
                *(f"{_DATE} date", f"{_DIRECTORY} topic", "topic full_topic"),
            )
            .sortWithinPartitions("date", "topic", "position")
        )

    def _check(self, log: LogSource, url: str, start: int, end: int) -> int:
        """Returns the number of written rows. `rt.Corrupt` unless there is one per position.

        With `skip_lost`, positions may be missing that are no longer in the log. A directory may lack any of
        them. The nodes trim from the start.
        """
        first_left = start
        if self._settings.skip_lost:
            is_directory = isinstance(self._settings.where, DirectorySource)
            first_left = end if is_directory else min(max(log.bounds()[0], start), end)
        (found,) = (
            self._spark.read.schema("position bigint")
            .option("recursiveFileLookup", "true")
            .parquet(url)
            .selectExpr(
                *("count(position)", "min(position)", "max(position)", "count(distinct position)"),
                f"count_if(position >= {first_left})",
            )
            .collect()
        )
        rows, first, last, distinct, left = found
        is_within = not rows or start <= first <= last < end
        if rows != distinct or left != end - first_left or not is_within:
            raise Corrupt(
                "the written rows differ from the log",
                path=url,
                offset=0,
                got=f"{rows} rows of {distinct} positions from {first} to {last}",
                expected=f"each position from {first_left if first_left < end else start} to {end - 1} once",
                hint="The part was not exported. Try again.",
            )
        if rows < end - start:
            logger.warning("rows_missing path=%s got=%d expected=%d", url, rows, end - start)
        return int(rows)

    def _hold(self, log: LogSource, position: int) -> None:
        if self._settings.hold is not None:
            log.hold(self._settings.hold, position)

    def _report_loss(self, start: int, end: int) -> None:
        event = SkipForward(start, end, "trimmed")
        if not self._settings.skip_lost:
            raise Gap(
                f"positions {start} to {end - 1} were trimmed before they were exported",
                event=event,
                where=self._settings.where,
                hint="Use --skip-lost to continue without them. hold-bytes-max limits how much nodes retain.",
            )
        logger.warning("data_loss where=%s event=%s", self._settings.where, event)

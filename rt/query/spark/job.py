"""A keyed query as a job of Spark: its options, and how Spark runs it.

Spark reads `format("rt")`, finds the key of each message, runs the query with `transformWithState` for each
key, and writes `format("rt")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from rt.errors import InvalidOption
from rt.query.core.observable import Observable
from rt.query.core.scheduler import TICKS_MAX, Duration, duration_ns
from rt.query.messages import as_message
from rt.query.spark.keyed_plan import KeyedPlan, keyed_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MESSAGE: Final = (
    "position long, timestamp_ns long, session string, run long, number long, topic string, value binary, "
    "headers array<struct<key: string, value: binary>>"
)
"""The fields of `rt.Message`, as `format("rt")` reads them."""

RESULTS: Final = "value binary, topic string, timestamp_ns long"
"""The columns that `format("rt")` writes."""

_PROVIDER: Final = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class SparkJob(Struct, frozen=True):
    """A keyed query. `source` and `sink`: the options of `format("rt")`, as in docs/spark.md.

    `time_of` and `max_out_of_orderness_s` are those of `add_source`. Without `time_of` the clock is the
    processing time of the micro-batch. `encode` makes the message of a result, as that of `add_sink`. A
    message without a time gets that of the key's clock. `late_outputs`: the names that operators use as
    `late`; these values go to the same sink, also through `encode`. `trigger_s`: seconds from the start of a
    micro-batch to the next. `ticks_max`: see `VirtualScheduler`.

    `NotOnSpark` if Spark cannot run the query.
    """

    query: Observable[Any]
    source: Mapping[str, str]
    sink: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    time_of: Callable[[Any], int] | None = None
    max_out_of_orderness_s: Duration = 0
    encode: Callable[[Any], tuple[bytes, str, int | None]] = as_message
    late_outputs: tuple[str, ...] = ()
    trigger_s: float = 1.0
    ticks_max: int = TICKS_MAX

    def __post_init__(self) -> None:
        self.plan()
        if self.time_of is None and self.delay_ns:
            raise InvalidOption("max_out_of_orderness_s needs time_of")

    def plan(self) -> KeyedPlan:
        return keyed_plan(self.query, self.late_outputs)

    @property
    def delay_ns(self) -> int:
        return duration_ns(self.max_out_of_orderness_s)


def results(job: SparkJob, spark: SparkSession) -> DataFrame:
    """The results of a job, with the columns of RESULTS: for a sink of your own."""
    from rt.query.spark.key_rows import KEYED, add_keys
    from rt.query.spark.processor import KeyProcessor

    if not str(spark.conf.get(_PROVIDER)).endswith("RocksDBStateStoreProvider"):
        spark.conf.set(_PROVIDER, _ROCKSDB)  # transformWithState works with this provider only
    messages = spark.readStream.format("rt").schema(MESSAGE).options(**job.source).load()
    keyed = messages.mapInArrow(partial(add_keys, job), KEYED)
    if job.time_of is None:
        keyed = keyed.where("key IS NOT NULL")
    else:
        delay = f"{-(-job.delay_ns // 1_000_000)} milliseconds"
        times = keyed.selectExpr("*", "timestamp_micros(time_ns div 1000) AS event_time")
        # A predicate without event_time would be applied before Spark sees the times.
        marked = times.withWatermark("event_time", delay)
        marked = marked.where("(key IS NOT NULL) = (event_time IS NOT NULL)")
        # Without the column Spark does not drop late rows: the operators decide what is late.
        keyed = marked.drop("event_time")
    time_mode = "ProcessingTime" if job.time_of is None else "EventTime"
    return keyed.groupBy("key").transformWithState(KeyProcessor(job), RESULTS, "Append", time_mode)


def start(job: SparkJob, spark: SparkSession, *, once: bool = False) -> StreamingQuery:
    """Start a job, with the sink `format("rt")`. It continues where its checkpoint ends.

    `once`: end when everything that is in the source now is processed.
    """
    if not job.checkpoint:
        raise InvalidOption("checkpoint is missing", hint="SparkJob(…, checkpoint='/shared/jobs/totals').")
    writer = results(job, spark).writeStream.format("rt").options(**job.sink).outputMode("append")
    writer = writer.option("checkpointLocation", job.checkpoint)
    if once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(job.trigger_s * 1000)} milliseconds").start()

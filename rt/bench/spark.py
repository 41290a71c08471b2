"""The speed of `format("rt")` in a local Spark session, compared with Parquet files of the same rows.

Two cores, warm page cache, checksums verified. Each round reads each log once, after warm-up scans: a JVM
that still compiles takes twice as long. Another figure is the speed of a source whose rows are ready, the
upper limit for any Python source. At the end, a growing log is read as a stream. It grows at a steady rate
from the first micro-batch on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from rt.bench.measure import Figure, ratios
from rt.bench.merged_logs import make_log
from rt.bench.processes import CpuUsage, measure_descendants
from rt.errors import RtError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "localhost",
    "spark.log.level": "ERROR",
    # Data go to the JVM over a socket, and this is the faster setting.
    "spark.python.unix.domain.socket.enabled": "true",
}

STREAM_MB: Final = 50
WARM_UPS: Final = 10
"""After this many scans the JVM needs half the CPU time of the first ones, and improves little later."""


class SparkBench(Struct, frozen=True):
    """Reads logs of `size_bytes` of values, after `warm_ups` scans, and a stream for `stream_seconds`.

    All files are in the directory `root`.
    """

    root: str
    rounds: int
    size_bytes: int
    stream_seconds: float = 30.0
    warm_ups: int = WARM_UPS

    def figures(self) -> Generator[Figure, None, None]:
        spark = self._session()
        try:
            yield from self.figures_of(spark)
        finally:
            spark.stop()

    def _session(self) -> SparkSession:
        from pyspark.sql import SparkSession

        # Set before the JVM starts: otherwise workers use the first python3 in the path.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        builder: Any = SparkSession.builder
        settings = {**SETTINGS, "spark.local.dir": os.path.join(self.root, "local")}
        session: SparkSession = (
            builder.master("local[2]").appName("rt bench spark").config(map=settings).getOrCreate()
        )
        return session

    def figures_of(self, spark: SparkSession) -> Iterator[Figure]:
        """Measure in a Spark session that the caller has started."""
        from rt.bench.spark_ceiling import SparkCeiling

        spark.dataSource.register(SparkCeiling)
        for value_bytes, unit, goal in ((1024, "MB/s", 600.0), (128, "rows/s", 2_500_000.0)):
            count = self.size_bytes // value_bytes
            log = make_log(self.root, f"of-{value_bytes}", count=count, value_bytes=value_bytes)
            parquet = os.path.join(self.root, f"parquet-{value_bytes}")
            _read(spark, log).write.parquet(parquet)
            whole, narrow, parquet_scan, ceiling = self._rounds_of(
                partial(_scan, spark, log),
                partial(_narrow, spark, log),
                partial(_aggregate, spark.read.parquet(parquet)),
                partial(_aggregate, spark.read.format("rt-ceiling").option("rows", count).load(log)),
            )
            size = "1 KiB" if value_bytes == 1024 else f"{value_bytes} B"
            megabytes = count * value_bytes / 1e6
            amount = megabytes if unit == "MB/s" else float(count)
            yield Figure(f"{size}: all columns", _rates(amount, whole), unit, goal)
            yield Figure(f"{size}: position and timestamp", _rates(amount, narrow), unit)
            yield Figure(f"{size}: these over all columns", _wall_ratios(whole, narrow), "x", 2.0)
            yield Figure(f"{size}: the same rows from Parquet", _rates(amount, parquet_scan), unit)
            yield Figure(f"{size}: ours over Parquet", _wall_ratios(parquet_scan, whole), "x", 0.5)
            yield Figure(f"{size}: rows that were ready", _rates(amount, ceiling), unit)
            for what, taken in (
                ("all columns", whole),
                ("Parquet", parquet_scan),
                ("rows that were ready", ceiling),
            ):
                per_gb = tuple(each.cpu_s * 1000 / megabytes for each in taken)
                yield Figure(f"{size}: processor for {what}", per_gb, "s/GB")
            in_python = tuple(each.others_s * 1000 / megabytes for each in whole)
            yield Figure(f"{size}: of that for all columns, Python", in_python, "s/GB")
        count = self.size_bytes // 1024
        log = make_log(self.root, "one-each", count=count, value_bytes=128, one_each=True)
        (single,) = self._rounds_of(partial(_scan, spark, log))
        yield Figure("128 B, a batch each: all columns", _rates(count, single), "rows/s", 300_000)
        delays = tuple(self._delays(spark))
        yield Figure(f"a stream of {STREAM_MB} MB/s: delay of the oldest message", delays, "s", 2.0)

    def _delays(self, spark: SparkSession) -> list[float]:
        """The age of the oldest message of each micro-batch when it was counted, in seconds."""
        from pyspark.sql import functions as F  # noqa: N812

        delays: list[float] = []

        def take(batch: DataFrame, _: int) -> None:
            oldest, _ = batch.agg(F.min("timestamp_ns"), F.sum(F.length("value"))).collect()[0]
            if oldest is not None:
                delays.append(time.time() - oldest / 1e9)

        root = os.path.join(self.root, "growing")
        module = "rt.bench.paced_publisher"
        command = [sys.executable, "-m", module, root, str(STREAM_MB), str(self.stream_seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as publisher:
            assert publisher.stdin is not None
            assert publisher.stdout is not None
            publisher.stdout.readline()
            frame = spark.readStream.format("rt").schema("timestamp_ns long, value binary")
            writer = frame.load(os.path.join(root, "merged")).writeStream.foreachBatch(take)
            query = writer.option("checkpointLocation", os.path.join(root, "checkpoint")).start()
            query.processAllAvailable()
            delays.clear()
            publisher.stdin.write(b"\n")
            publisher.stdin.close()
        query.processAllAvailable()
        query.stop()
        if publisher.returncode:
            raise RtError(
                "the paced publisher has failed", where=module, got=f"status {publisher.returncode}"
            )
        return delays

    def _rounds_of(self, *works: Callable[[], object]) -> Sequence[list[CpuUsage]]:
        """The time that each of `works` uses in each round."""
        taken: list[list[CpuUsage]] = [[] for _ in works]
        for _ in range(self.warm_ups + self.rounds):
            for work, rounds in zip(works, taken, strict=True):
                rounds.append(measure_descendants(work))
        return [rounds[self.warm_ups :] for rounds in taken]


def _read(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.format("rt").load(path)


def _scan(spark: SparkSession, path: str) -> object:
    return _aggregate(_read(spark, path))


def _narrow(spark: SparkSession, path: str) -> object:
    from pyspark.sql import functions as F  # noqa: N812

    frame = spark.read.format("rt").schema("position long, timestamp timestamp").load(path)
    return frame.agg(F.sum("position"), F.max("timestamp")).collect()


def _aggregate(frame: DataFrame) -> object:
    """An aggregation over all columns."""
    from pyspark.sql import functions as F  # noqa: N812

    lengths = [F.sum(F.length(name)) for name in ("session", "topic", "value")]
    return frame.agg(F.sum("position"), F.max("timestamp"), F.bit_xor("number"), *lengths).collect()


def _wall_ratios(ours: Sequence[CpuUsage], theirs: Sequence[CpuUsage]) -> tuple[float, ...]:
    return ratios([each.wall_s for each in ours], [each.wall_s for each in theirs])


def _rates(amount: float, taken: Sequence[CpuUsage]) -> tuple[float, ...]:
    return tuple(amount / each.wall_s for each in taken)

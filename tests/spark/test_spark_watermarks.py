"""Watermarks of Spark over logs: late messages, idle streams, and restarts from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECOND = 10**9
BASE = 1_700_000_000
"""A multiple of ten seconds since 1970."""


def publish(feeds: Feeds, *seconds: int, topic: str = "t") -> None:
    """Publish a message at each of these seconds after `BASE`."""
    for second in seconds:
        feeds.publish("a", [b"v"], topic, [(BASE + second) * SECOND])
    feeds.merge()


def source(spark: SparkSession, feeds: Feeds, **options: str) -> DataFrame:
    return spark.readStream.format("rt").options(**options).load(feeds.path)


def seconds(column: str) -> str:
    return f"unix_timestamp({column}) - {BASE}"


class Run:
    """One query with its checkpoint. Each call runs it up to the end of the log."""

    def __init__(self, spark: SparkSession, root: Path, frame: Callable[[], DataFrame]) -> None:
        self._spark, self._root, self._frame = spark, root, frame

    def __call__(self) -> list[dict[str, Any]]:
        """Run the query, and return the progress of its micro-batches."""
        writer = self._frame().writeStream.format("parquet").outputMode("append")
        writer = writer.option("checkpointLocation", f"{self._root}/checkpoint")
        query = writer.trigger(availableNow=True).start(f"{self._root}/output")
        assert query.awaitTermination(600), "the query does not end"
        return [dict(each) for each in query.recentProgress]

    def rows(self) -> list[tuple[Any, ...]]:
        found = self._spark.read.parquet(f"{self._root}/output").collect()
        return sorted((tuple(row) for row in found), key=str)


def dropped(progress: list[dict[str, Any]]) -> int:
    return sum(one["numRowsDroppedByWatermark"] for each in progress for one in each["stateOperators"])


def test_late_messages_are_dropped_and_counted_after_restarts(spark: SparkSession, tmp_path: Path) -> None:
    def windows() -> DataFrame:
        frame = source(spark, feeds, maxOffsetsPerTrigger="3", topics="t")
        windows = frame.withWatermark("timestamp", "10 seconds").groupBy(F.window("timestamp", "10 seconds"))
        return windows.count().selectExpr(seconds("window.start"), "count")

    with closing(Feeds(tmp_path)) as feeds:
        run = Run(spark, tmp_path, windows)
        publish(feeds, 1, 4, 3, 12, 9)  # The watermark is 2 at the end.
        run()
        assert run.rows() == []
        publish(feeds, 31, 11)  # In one micro-batch, so 11 is in time; then the watermark is 21.
        run()
        assert run.rows() == [(0, 4), (10, 2)]
        publish(feeds, 19, 22)
        assert dropped(run()) == 1
        publish(feeds, 1000, topic="left out")
        run()
        assert run.rows() == [(0, 4), (10, 2)]
        publish(feeds, 60)
        run()
        assert run.rows() == [(0, 4), (10, 2), (20, 1), (30, 1)]


def test_joined_streams_wait_for_new_message_of_each_stream_after_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    def joined() -> DataFrame:
        one, other = (
            source(spark, feeds)
            .selectExpr(f"timestamp time_{name}", f"number number_{name}")
            .withWatermark(f"time_{name}", "10 seconds")
            for name, feeds in (("a", left), ("b", right))
        )
        pairs = "number_a = number_b AND time_b BETWEEN time_a AND time_a + interval 20 seconds"
        found = one.join(other, F.expr(pairs), "leftOuter")
        return found.selectExpr(f"{seconds('time_a')} a", f"{seconds('time_b')} b")

    with ExitStack() as opened:
        left, right = (opened.enter_context(closing(Feeds(tmp_path / name))) for name in "ab")
        run = Run(spark, tmp_path, joined)
        publish(left, 0, 10)
        publish(right, 5)
        run()
        assert run.rows() == [(0, 5)]
        for feeds in (left, right):  # Each source passes the end of the second pair, in its own run.
            publish(feeds, 100)
            run()
            assert run.rows() == [(0, 5)]
        publish(left, 101)
        publish(right, 101)
        run()
        assert run.rows() == [(0, 5), (10, None), (100, 101)]

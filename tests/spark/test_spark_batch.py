"""Batch queries on a merged log: rows, columns, filters, options, SQL, errors and trimmed messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import rt

pytestmark = [pytest.mark.slow]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feeds]:
    """Yield three segments with small batches from three sessions. One of the sessions is compressed."""
    made = Feeds(tmp_path_factory.mktemp("batch"))
    for segment in range(3):
        if segment:
            made.roll()
        made.fill(80)
    yield made
    made.close()


@pytest.fixture(scope="module")
def rows(feeds: Feeds) -> list[rt.Message]:
    return feeds.rows()


def load(spark: SparkSession, feeds: Feeds, **options: object) -> DataFrame:
    return (
        spark.read.format("rt")
        .options(**{name: str(value) for name, value in options.items()})
        .load(feeds.path)
    )


def positions(frame: DataFrame) -> list[int]:
    return [row.position for row in frame.select("position").collect()]


def test_run_column_is_read_if_schema_names_it(
    spark: SparkSession, feeds: Feeds, rows: list[rt.Message]
) -> None:
    frame = spark.read.format("rt").schema("session string, run bigint, number bigint").load(feeds.path)
    assert [tuple(row) for row in frame.collect()] == [(row.session, row.run, row.number) for row in rows]


def test_rows_are_read_once_in_order_from_several_partitions(
    spark: SparkSession, feeds: Feeds, rows: list[rt.Message]
) -> None:
    frame = load(spark, feeds, minPartitions=5)
    assert frame.dtypes == [
        ("position", "bigint"),
        ("timestamp", "timestamp"),
        ("session", "string"),
        ("number", "bigint"),
        ("topic", "string"),
        ("value", "binary"),
    ]
    assert frame.rdd.getNumPartitions() == 5
    got = frame.withColumn("timestamp", F.unix_micros("timestamp")).collect()
    assert [tuple(row) for row in got] == [
        (row.position, row.timestamp_ns // 1000, row.session, row.number, row.topic, row.value)
        for row in rows
    ]


def test_schema_selects_columns(spark: SparkSession, feeds: Feeds, rows: list[rt.Message]) -> None:
    frame = spark.read.format("rt").schema("topic string, timestamp_ns long").load(feeds.path)
    assert [tuple(row) for row in frame.collect()] == [(row.topic, row.timestamp_ns) for row in rows]


@pytest.mark.parametrize(
    ("condition", "passes"),
    [
        ("position >= 100 and position < 160", lambda row: 100 <= row.position < 160),
        ("session = 'b' and position > 40", lambda row: row.session == "b" and row.position > 40),
        ("topic in ('trade', 'ärger')", lambda row: row.topic in {"trade", "ärger"}),
        ("session = 'a' or topic = ''", lambda row: row.session == "a" or row.topic == ""),
        ("position < 0", lambda row: False),
    ],
)
def test_filters_return_same_rows_with_and_without_pushdown(
    spark: SparkSession, feeds: Feeds, rows: list[rt.Message], condition: str, passes: Any
) -> None:
    wanted = [row.position for row in rows if passes(row)]
    for switch in ("true", "false"):
        spark.conf.set(PUSHDOWN, switch)
        try:
            assert positions(load(spark, feeds).where(condition)) == wanted
        finally:
            spark.conf.unset(PUSHDOWN)


def test_timestamp_filter_is_exact_to_microsecond_and_position_filter_narrows_plan(
    spark: SparkSession, feeds: Feeds, rows: list[rt.Message]
) -> None:
    limit = sorted(row.timestamp_ns for row in rows)[len(rows) // 2] // 1000
    wanted = [row.position for row in rows if row.timestamp_ns // 1000 <= limit]
    spark.conf.set(PUSHDOWN, "true")
    try:
        frame = load(spark, feeds).where(f"timestamp <= timestamp_micros({limit})")
        assert positions(frame) == wanted
        few = load(spark, feeds, minPartitions=3).where("position < 3")
        assert few.rdd.getNumPartitions() == 3
        assert positions(few) == [0, 1, 2]
    finally:
        spark.conf.unset(PUSHDOWN)


def test_topics_option_selects_rows(spark: SparkSession, feeds: Feeds, rows: list[rt.Message]) -> None:
    wanted = [row.position for row in rows if row.topic in {"trade", ""}]
    assert positions(load(spark, feeds, topics='["trade", ""]')) == wanted


def test_sql_view_using_rt_reads_log(spark: SparkSession, feeds: Feeds, rows: list[rt.Message]) -> None:
    spark.sql(f"CREATE TEMPORARY VIEW log USING rt OPTIONS (path '{feeds.path}', minPartitions '2')")
    (row,) = spark.sql("SELECT count(*) AS n, sum(length(value)) AS size FROM log").collect()
    assert (row.n, row.size) == (len(rows), sum(len(message.value) for message in rows))
    assert [row.position for row in spark.sql("SELECT position FROM log LIMIT 3").collect()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffset": "5"}, "Did you mean startingOffsets? The options are"),
        ({"endingOffsets": "999999"}, "endingOffsets is at position 999999, but the log ends with"),
    ],
)
def test_invalid_option_error_reaches_user(
    spark: SparkSession, feeds: Feeds, options: dict[str, str], expected: str
) -> None:
    with pytest.raises(PySparkException) as error:
        spark.read.format("rt").options(**options).load(feeds.path).collect()
    assert expected in str(error.value)


def test_trimmed_messages_raise_error_with_both_positions_or_are_skipped(
    spark: SparkSession, tmp_path: Path
) -> None:
    feeds = Feeds(tmp_path)
    first = feeds.fill(20)
    feeds.roll()
    second = feeds.fill(20)
    careless = load(spark, feeds, startingOffsets=5, failOnDataLoss="false")
    planned = load(spark, feeds, startingOffsets=5).select("position").rdd
    assert planned.getNumPartitions() == 1
    feeds.trim(1)
    with pytest.raises(PySparkException) as error:
        load(spark, feeds, startingOffsets=5).collect()
    assert f"the query needs position 5, but the log starts again at position {first.stop}" in str(
        error.value
    )
    assert "Set failOnDataLoss=false" in str(error.value)
    with pytest.raises(Exception, match="are missing") as error:
        planned.collect()
    assert f"starts again at position {first.stop}: {first.stop - 5} messages are missing (time)" in str(
        error.value
    )
    assert positions(careless) == list(second)
    assert positions(load(spark, feeds)) == list(second)
    feeds.close()

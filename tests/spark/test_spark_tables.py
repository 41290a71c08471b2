"""Spark tables created USING rt or by the catalog: their rows, options, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feeds]:
    """Yield feeds in a directory with a name that is escaped in a URL."""
    made = Feeds(tmp_path_factory.mktemp("spark tables") / "with 100% space")
    made.fill(30)
    yield made
    made.close()


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    yield "log_table"
    spark.sql("DROP TABLE IF EXISTS log_table")


def positions(spark: SparkSession, table: str) -> list[int]:
    return [row.position for row in spark.table(table).select("position").orderBy("position").collect()]


@pytest.mark.parametrize(
    "how",
    [
        "OPTIONS (path '{path}')",
        "OPTIONS (log '{path}')",
        "LOCATION '{path}'",
        "OPTIONS (path '{path}') COMMENT 'trades' TBLPROPERTIES ('a' = 'b', 'subscribe' = 'x')",
    ],
)
def test_table_has_rows_of_its_log(spark: SparkSession, feeds: Feeds, table: str, how: str) -> None:
    spark.sql(f"CREATE TABLE {table} USING rt {how.format(path=feeds.path)}")
    assert positions(spark, table) == [row.position for row in feeds.rows()]


def test_catalog_table_keeps_its_options(spark: SparkSession, feeds: Feeds, table: str) -> None:
    spark.catalog.createTable(table, source="rt", path=feeds.path, startingOffsets="7", topics="trade,quote")
    expected = [row.position for row in feeds.rows(7) if row.topic in {"trade", "quote"}]
    assert positions(spark, table) == expected
    rows = spark.sql("SELECT position FROM log_table WITH ('startingOffsets' = '9')").collect()
    assert sorted(row.position for row in rows) == [one for one in expected if one >= 9]


def test_table_can_be_read_as_stream(spark: SparkSession, feeds: Feeds, table: str, tmp_path: Path) -> None:
    spark.sql(f"CREATE TABLE {table} USING rt OPTIONS (path '{feeds.path}', maxOffsetsPerTrigger '100')")
    query = (
        spark.readStream.table(table)
        .writeStream.format("memory")
        .queryName("of_table")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600), "the query does not end"
    assert positions(spark, "of_table") == [row.position for row in feeds.rows()]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("OPTIONS (path '{path}', startingOffset '3')", "'startingoffset'. Did you mean startingOffsets"),
        ("OPTIONS (path '{path}', subscribe 'x')", "subscribe → stream"),
        ("COMMENT 'x'", "neither path nor endpoints is given"),
    ],
)
def test_table_with_invalid_options_is_not_created(
    spark: SparkSession, feeds: Feeds, table: str, how: str, error: str
) -> None:
    with pytest.raises(PySparkException, match=error):
        spark.sql(f"CREATE TABLE {table} USING rt {how.format(path=feeds.path)}")
    assert not spark.catalog.tableExists(table)


def test_table_with_column_list_raises_error_when_read(spark: SparkSession, feeds: Feeds, table: str) -> None:
    spark.sql(f"CREATE TABLE {table} (position long) USING rt OPTIONS (path '{feeds.path}')")
    with pytest.raises(PySparkException, match="A table needs them in OPTIONS, and no list of columns"):
        positions(spark, table)

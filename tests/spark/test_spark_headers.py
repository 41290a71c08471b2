"""Message headers through Spark: batch queries, streams, tables, and exactly-once writes to a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from sink_nodes import Sink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KIND = "array<struct<key:string,value:binary>>"
COUNT = 600


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feeds]:
    made = Feeds(tmp_path_factory.mktemp("headers"))
    made.fill(5)
    own = [(("trace", b"\x00\xff"), ("trace", b"")), (), (("ärger", b"%d" % 7),)]
    made.publish("a", [b"%d" % n for n in range(90)], "t", range(90), own * 30)
    made.publish("b", [b"%d" % n for n in range(9)], "t", range(9), own[:1] * 9)
    made.merge()
    yield made
    made.close()


def expected(feeds: Feeds) -> list[tuple[int, list[tuple[str, bytes]] | None]]:
    return [(each.position, list(each.headers) or None) for each in feeds.rows()]


def read(frame: DataFrame) -> list[tuple[Any, ...]]:
    assert dict(frame.dtypes)["headers"] == KIND
    return [tuple(row) for row in frame.select("position", "headers").orderBy("position").collect()]


def test_batch_query_reads_headers_if_included(spark: SparkSession, feeds: Feeds) -> None:
    plain = spark.read.format("rt").load(feeds.path)
    assert "headers" not in plain.columns
    source = spark.read.format("rt").option("minPartitions", 3)
    frame = source.option("includeHeaders", True).load(feeds.path)
    assert frame.columns == [*plain.columns, "headers"]
    assert read(frame) == expected(feeds)
    chosen = spark.read.format("rt").schema(f"headers {KIND}, position long").load(feeds.path)
    assert read(chosen) == expected(feeds)
    wanted = [position for position, headers in expected(feeds) if headers is not None]
    for is_pushed in ("true", "false"):
        spark.conf.set("spark.sql.python.filterPushdown.enabled", is_pushed)
        found = frame.where("headers IS NOT NULL").select("position").collect()
        assert sorted(row.position for row in found) == wanted
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_stream_and_table_read_headers(spark: SparkSession, feeds: Feeds, tmp_path: Path) -> None:
    spark.sql(f"CREATE TABLE with_headers USING rt OPTIONS (path '{feeds.path}', includeHeaders true)")
    assert read(spark.table("with_headers")) == expected(feeds)
    source = spark.readStream.format("rt").option("includeHeaders", "true").load(feeds.path)
    for name, frame in (("of_source", source), ("of_table", spark.readStream.table("with_headers"))):
        query = (
            frame.writeStream.format("memory")
            .queryName(f"headers_{name}")
            .option("checkpointLocation", str(tmp_path / name))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(600), "the query does not end"
        assert read(spark.table(f"headers_{name}")) == expected(feeds)
    spark.sql("DROP TABLE with_headers")


def test_include_headers_on_table_created_without_headers_is_rejected(
    spark: SparkSession, feeds: Feeds
) -> None:
    spark.sql(f"CREATE TABLE without_headers USING rt OPTIONS (path '{feeds.path}')")
    with pytest.raises(PySparkException, match="A table must be created with it"):
        spark.sql("SELECT * FROM without_headers WITH ('includeHeaders' = 'true')").collect()
    spark.sql("DROP TABLE without_headers")


def rows(spark: SparkSession, key: str = "own") -> DataFrame:
    """Three partitions; the headers of every third row are null."""
    headers = (
        f"if(id % 3 = 0, null, array(struct('{key}' AS key, cast(concat('h', id) AS binary) AS value), "
        f"struct('{key}' AS key, X'FF00' AS value)))"
    )
    return spark.range(0, COUNT, 1, 3).selectExpr(
        "cast(concat('row ', id) AS binary) value", "'orders' topic", f"{headers} headers"
    )


def save(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("rt").options(**options).mode("append").save()


def test_headers_are_written_once_after_failed_attempt_and_read_back(
    spark: SparkSession, sink: Sink, tmp_path: Path
) -> None:
    options = sink.options("once-headers", version="1")
    marker = str(tmp_path / "failed")

    @F.udf("binary", useArrow=False)
    def fails_once(value: bytes) -> bytes:
        """Fail the first attempt of the last partition when an earlier partition is merged."""
        if value == b"row 500" and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("the first attempt fails")
        return value

    failing = rows(spark).withColumn("value", fails_once("value"))
    with pytest.raises(PySparkException, match="the first attempt fails"):
        save(failing, options)
    save(failing, options)
    save(rows(spark), options)
    with pytest.raises(PySparkException, match="the write was repeated with other rows"):
        save(rows(spark, "other"), options)

    assert len(sink.messages("once-headers", COUNT)) == COUNT
    from_node = sink.reading("reader") | {"endpoints": sink.nodes.endpoints[0]}  # This node has all rows.
    reading = spark.read.format("rt").options(**from_node, includeHeaders="true").load()
    found = reading.where("session LIKE 'sink~once-headers.%'").select("value", "topic", "headers").collect()
    assert sorted(found, key=lambda row: int(row.value.split()[1])) == rows(spark).collect()
    assert Row(key="own", value=b"h1") in [row.headers[0] for row in found if row.headers is not None]


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ("map('a', 'b')", "column headers has the wrong type: got map<string,string>.*map_entries"),
        ("array(struct(cast(null AS string) AS key, X'' AS value))", "a header's key is null .*row 0"),
        ("array(struct('a' AS key, cast(null AS binary) AS value))", "the value of header 'a' is null"),
        ("map_entries(map('', X''))", "a header has an empty key .*column headers, row 0"),
        ("map_entries(map(cast(X'FF' AS string), X''))", "is not UTF-8"),
        (
            "array_repeat(struct('a' AS key, X'' AS value), 129)",
            "too many headers .*got 129, expected at most 128",
        ),
        (
            "map_entries(map('a', cast(repeat('x', 65536) AS binary)))",
            "the headers are too large .*Put large",
        ),
    ],
)
def test_invalid_headers_are_rejected_with_hint_and_publish_no_messages(
    spark: SparkSession, sink: Sink, headers: str, error: str
) -> None:
    with pytest.raises(PySparkException, match=error):
        save(spark.sql(f"SELECT 'a' value, {headers} headers"), sink.options("refused-headers"))
    assert sink.messages("refused-headers") == []

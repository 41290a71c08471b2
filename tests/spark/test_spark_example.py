"""From real files through publishers, three nodes and Spark: query results match the files.

The input is a quarter of all flights from New York in 2013, as `rt demo` publishes them. If that package is
not installed, the input is a quarter of the sources of Python's library.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sink_nodes import Sink

from sequencer.demo.source import BUILTIN, DemoRecord, flights_directory, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PUBLISHERS = 3
FEEDS = [f"feed{index}" for index in range(PUBLISHERS)]


@pytest.fixture(scope="module")
def records() -> list[list[DemoRecord]]:
    """Return every fourth record, by publisher."""
    return [share(BUILTIN, index, PUBLISHERS)[::4] for index in range(PUBLISHERS)]


@pytest.fixture(scope="module")
def source(sink: Sink, records: list[list[DemoRecord]]) -> Sink:
    """Return nodes that have merged all records, among messages of other tests."""
    publishers = [sink.publisher(feed) for feed in FEEDS]
    for publisher, some in zip(publishers, records, strict=True):
        for record in some:
            publisher.publish(record.value, record.topic)
        publisher.flush()
    for publisher, some in zip(publishers, records, strict=True):
        publisher.wait(len(some) - 1, "merged", 300)
        publisher.close()
    return sink


def test_streaming_query_counts_and_sizes_match_source_files(
    spark: SparkSession, source: Sink, records: list[list[DemoRecord]], tmp_path: Path
) -> None:
    options = source.reading("counter") | {"consumer": "counter"}
    live = spark.readStream.format("rt").options(**options, maxOffsetsPerTrigger="60000").load()
    feeds = live.where("session like 'feed%'")
    fields = feeds.selectExpr("topic", "split(cast(value as string), ',') fields", "value")
    by_month = fields.selectExpr("topic", "get(fields, 1) month", "length(value) size").groupBy(
        "topic", "month"
    )
    query = (
        by_month.agg({"*": "count", "size": "sum"})
        .writeStream.format("memory")
        .queryName("flights")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600), "the query does not end"
    last_but_one = query.recentProgress[-1]["sources"][0]["startOffset"]
    held = json.loads(last_but_one)["position"]
    assert held >= 60_000
    source.nodes.wait(lambda: source.held("counter") == held, "what may be read again to be held")

    counts: Counter[tuple[str, str | None]] = Counter()
    sizes: Counter[tuple[str, str | None]] = Counter()
    for record in (each for some in records for each in some):
        columns = record.value.decode(errors="replace").split(",")
        key = record.topic, columns[1] if len(columns) > 1 else None
        counts[key] += 1
        sizes[key] += len(record.value)
    found = spark.sql("select topic, month, `count(1)`, `sum(size)` from flights").collect()
    assert {(row[0], row[1]): row[2] for row in found} == counts
    assert {(row[0], row[1]): row[3] for row in found} == sizes
    if flights_directory() is not None:
        assert sum(count for (topic, _), count in counts.items() if topic.startswith("flights.")) == 84_195

"""From real files through publishers, three nodes and Spark: what comes out is what the files say.

All flights from New York in 2013, as `rt demo` publishes them; where that package is not installed, the
sources of Python's library.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from sink_nodes import Sink, running_sink

import rt
from rt.net.rest import ask, check
from rt.spark.export_target import ExportTarget
from rt.spark.exporting import Exporter, ExportSettings
from rt.spark.options import Nodes
from rt.spark.storage import LocalStorage
from sequencer.demo.source import BUILTIN, Record, flights_directory, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PUBLISHERS = 3


@pytest.fixture(scope="module")
def records() -> list[list[Record]]:
    """By publisher."""
    return [share(BUILTIN, index, PUBLISHERS) for index in range(PUBLISHERS)]


@pytest.fixture(scope="module")
def sink(records: list[list[Record]]) -> Iterator[Sink]:
    """Nodes that have merged all of it."""
    with running_sink() as sink:
        publishers = [
            rt.Publisher(
                sink.nodes.root / "sources",
                sink.nodes.stream,
                publisher_id=f"feed{index}",
                endpoints=sink.nodes.endpoints,
                tls=sink.nodes.certificate("publisher", f"feed{index}"),
            )
            for index in range(PUBLISHERS)
        ]
        for publisher, some in zip(publishers, records, strict=True):
            for record in some:
                publisher.publish(record.value, record.topic)
            publisher.flush()
        for publisher, some in zip(publishers, records, strict=True):
            publisher.wait(len(some) - 1, "merged", 300)
            publisher.close()
        yield sink


def options_of(sink: Sink, name: str) -> dict[str, str]:
    """To read as the subscriber `name`."""
    tls = sink.nodes.certificate("subscriber", name)
    return {
        "endpoints": ",".join(sink.nodes.endpoints),
        "stream": sink.nodes.stream,
        "ca": str(tls.ca),
        "cert": str(tls.cert),
        "key": str(tls.key),
    }


def test_flights_are_counted_by_a_streaming_query_as_in_the_file(
    spark: SparkSession, sink: Sink, records: list[list[Record]], tmp_path: Path
) -> None:
    live = spark.readStream.format("rt").options(**options_of(sink, "counter"), maxOffsetsPerTrigger="200000")
    fields = live.load().selectExpr("topic", "split(cast(value as string), ',') fields", "value")
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
    assert query.awaitTermination(300), "the query does not end"

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
        assert sum(count for (topic, _), count in counts.items() if topic.startswith("flights.")) == 336_776


def test_flights_are_exported_from_the_nodes_and_held_until_they_are(
    spark: SparkSession, sink: Sink, records: list[list[Record]], tmp_path: Path
) -> None:
    said = options_of(sink, "archive")
    files = {name: said[name] for name in ("ca", "cert", "key")}
    where = Nodes(tuple(sink.nodes.endpoints), sink.nodes.stream, **files)
    settings = ExportSettings(where, hold="archive", part_bytes=16 * 2**20)
    target = ExportTarget(LocalStorage(str(tmp_path / "target")))
    total = sum(map(len, records))

    parts = list(Exporter(settings, target, spark).parts(once=True))

    assert (parts[0].start, parts[-1].end, sum(part.rows for part in parts)) == (0, total, total)
    columns = ["full_topic", "session", "number"]
    table = ds.dataset(tmp_path / "target", partitioning="hive").to_table(columns=columns)
    got = Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
    wanted = Counter(
        (record.topic, f"feed{index}", number)
        for index, some in enumerate(records)
        for number, record in enumerate(some)
    )
    assert got == wanted

    tls = rt.TLS(**files)

    def held() -> list[int]:
        answer = check(asyncio.run(ask(sink.nodes.endpoints, tls, "GET", "/holds")))
        return [hold["position"] for hold in json.loads(answer.body) if hold["name"] == "archive"]

    sink.nodes.wait(lambda: held() == [total], "the hold to be where the export is")

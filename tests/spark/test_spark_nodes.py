"""Spark reads from nodes, in batch and as a stream, and keeps private keys out of its plans."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType
from range_nodes import RangeNodes, range_nodes

import rt
from rt.cluster_epoch import epoch_of, forced_number
from rt.spark.export.exporter import Exporter, ExportSettings
from rt.spark.export.filesystem import LocalFilesystem
from rt.spark.export.target import ExportTarget
from rt.spark.options import ClusterSource
from rt.spark.source import arrow_batches, batch_reader
from rt.spark.source.batch_reader import RtPartition, RtReader
from rt.spark.source.log_source import open_log
from rt.spark.source.options import parse_options
from rt.spark.source.stream_reader import RtStreamReader

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark-nodes")


@pytest.fixture(scope="module")
def feeds(root: Path) -> Iterator[Feeds]:
    made = Feeds(root)
    made.fill(60)
    made.roll()
    made.fill(60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes(root: Path, feeds: Feeds) -> Iterator[RangeNodes]:
    with range_nodes(root) as running:
        yield running


def options(nodes: RangeNodes) -> dict[str, str]:
    return {"endpoints": ",".join(nodes.endpoints), "stream": "s", **nodes.files}


def in_epoch(nodes: RangeNodes, epoch: int) -> contextlib.AbstractContextManager[None]:
    return nodes.in_epochs(epoch, epoch)


def key_of(nodes: RangeNodes) -> list[str]:
    return [line for line in Path(nodes.files["key"]).read_text().splitlines() if "-" not in line]


def test_batch_query_reads_from_nodes_with_and_without_one_stopped(
    spark: SparkSession, feeds: Feeds, nodes: RangeNodes
) -> None:
    frame = spark.read.format("rt").options(minPartitions="3", **options(nodes)).load()
    rows = [(row.position, row.session, row.topic, row.value) for row in feeds.rows()]
    assert [tuple(row) for row in frame.select("position", "session", "topic", "value").collect()] == rows
    nodes.stop(0)
    try:
        assert frame.count() == len(rows)
    finally:
        nodes.start(0)


def test_task_continues_on_another_node_if_its_node_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Feeds(tmp_path)
    for _ in range(24):
        large.publish("a", [os.urandom(2**20)], "t", [1])
    end = large.merge().stop
    monkeypatch.setattr(arrow_batches, "BYTES_MAX", 2**20)
    opened: list[Any] = []

    def open_and_keep(where: ClusterSource, **options: Any) -> Any:
        opened.append(open_log(where, **options))
        return opened[-1]

    monkeypatch.setattr(batch_reader, "open_log", open_and_keep)
    with range_nodes(tmp_path) as nodes:
        reader = RtReader(
            parse_options(options(nodes)), StructType().add("position", "long").add("value", "binary")
        )
        rows = reader.read(RtPartition(0, end))
        got = [next(rows)]
        victim = nodes.asked(opened[0])
        nodes.stop(victim)
        got += rows
    assert nodes.asked(opened[0]) != victim
    messages = [(row["position"], row["value"]) for batch in got for row in batch.to_pylist()]
    assert messages == [(row.position, row.value) for row in large.rows()]
    large.close()


def test_task_planned_before_forced_reset_raises_diverged(feeds: Feeds, nodes: RangeNodes) -> None:
    reader = RtReader(parse_options(options(nodes)), StructType().add("position", "long"))
    with in_epoch(nodes, epoch_of(1, 0)):
        (planned,) = reader.partitions()
        assert sum(batch.num_rows for batch in reader.read(planned)) == len(feeds.rows())
        with (
            in_epoch(nodes, epoch_of(forced_number(1), 7)),
            pytest.raises(rt.Diverged, match="a forced reset gave positions of the log other messages"),
        ):
            list(reader.read(planned))


def test_checkpoint_raises_diverged_after_forced_reset_and_is_accepted_after_soft_reset(
    feeds: Feeds, nodes: RangeNodes
) -> None:
    def opened() -> RtStreamReader:
        given = {**options(nodes), "startingOffsets": "latest"}
        return RtStreamReader(parse_options(given, streaming=True), StructType().add("position", "long"))

    first = parse_options({**options(nodes), "startingOffsets": "0"}, streaming=True)
    stream = RtStreamReader(first, StructType().add("position", "long"))
    with in_epoch(nodes, epoch_of(1, 0)):
        end = stream.latestOffset(start := stream.initialOffset(), ReadMaxRows(5))
    stream.stop()
    assert (start["epoch"], end) == (1, {"position": 5, "epoch": 1, "first": 0})

    with in_epoch(nodes, epoch_of(2, 0)):
        soft = opened()
        assert soft.latestOffset(end, ReadMaxRows(1)) == {"position": 6, "epoch": 2, "first": 0}
        assert [part.value for part in soft.partitions(soft.initialOffset(), end)] == [(0, 5)]
        soft.stop()

    with in_epoch(nodes, epoch_of(forced_number(1), 7)):
        asks: list[Callable[[RtStreamReader], object]] = [
            lambda stream: stream.latestOffset(end, ReadMaxRows(5)),
            lambda stream: stream.partitions(stream.initialOffset(), end),
            lambda stream: (stream.prepareForTriggerAvailableNow(), stream.partitions(start, end)),
        ]
        for ask in asks:
            forced = opened()
            with pytest.raises(rt.Diverged, match="a forced reset gave positions of the log other messages"):
                ask(forced)
            forced.stop()
        given = {**options(nodes), "startingOffsets": json.dumps(end)}
        with pytest.raises(rt.Diverged):
            RtReader(parse_options(given), StructType().add("position", "long")).partitions()


def test_export_raises_diverged_after_forced_reset_of_cluster(
    spark: SparkSession, feeds: Feeds, nodes: RangeNodes, tmp_path: Path
) -> None:
    where = parse_options(options(nodes)).where
    target = ExportTarget(LocalFilesystem(str(tmp_path)))

    def exporter() -> Exporter:
        return Exporter(ExportSettings(where), target, spark)

    with in_epoch(nodes, epoch_of(1, 0)):
        (part,) = exporter().parts(once=True)
    assert (part.end, part.epoch) == (feeds.rows()[-1].position + 1, 1)
    with in_epoch(nodes, epoch_of(forced_number(1), 7)):
        with pytest.raises(rt.Diverged, match="a forced reset gave positions of the log other messages"):
            list(exporter().parts(once=True))
        with pytest.raises(PySparkException, match="a forced reset gave positions of the log"):
            exporter()._rows(0, 3, epoch=1).count()


@pytest.mark.parametrize("skip_lost", [False, True])
def test_export_rejects_part_without_row_that_nodes_have(
    spark: SparkSession, feeds: Feeds, nodes: RangeNodes, tmp_path: Path, *, skip_lost: bool
) -> None:
    """With `skip_lost`, only trimmed messages may be missing."""
    target = ExportTarget(LocalFilesystem(str(tmp_path)))
    exporter = Exporter(
        ExportSettings(parse_options(options(nodes)).where, skip_lost=skip_lost), target, spark
    )
    rows = exporter._rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "_rows", lambda *arguments: rows(*arguments).where("position != 3"))
        with pytest.raises(rt.Corrupt, match="the written rows differ from the log"):
            list(exporter.parts(once=True))
    (part,) = exporter.parts(once=True)
    assert part.rows == part.end == feeds.rows()[-1].position + 1


def test_query_plan_contains_neither_private_key_nor_its_path(
    spark: SparkSession, feeds: Feeds, nodes: RangeNodes
) -> None:
    frame = spark.read.format("rt").options(**options(nodes)).load().where("position > 3")
    frame.count()
    plan = frame._jdf.queryExecution().toString() + frame._jdf.queryExecution().logical().toJSON()
    assert "rt" in plan
    assert nodes.files["key"] not in plan
    assert not [line for line in key_of(nodes) if line in plan]


def test_stream_with_consumer_acknowledges_positions_it_no_longer_needs(
    spark: SparkSession, feeds: Feeds, nodes: RangeNodes, tmp_path: Path
) -> None:
    got: list[int] = []

    def take(batch: DataFrame, _: int) -> None:
        got.extend(row.position for row in batch.collect())

    end = feeds.rows()[-1].position + 1
    frame = spark.readStream.format("rt").schema("position long").options(**options(nodes), consumer="sub")
    query = (
        frame.option("maxOffsetsPerTrigger", str(end // 2 + 1))
        .load()
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600), "the query does not end"
    assert got == list(range(end))
    progress = "".join(str(each) for each in query.recentProgress)
    assert nodes.files["key"] not in progress
    held = sorted(position for node in nodes.nodes.values() for _, position in node.acknowledged)
    assert (held[0], held[-1]) == (0, end // 2 + 1), "from the start, then from behind the last batch but one"


def test_missing_key_file_raises_error_naming_it(
    spark: SparkSession, nodes: RangeNodes, tmp_path: Path
) -> None:
    wrong = options(nodes) | {"key": str(tmp_path / "none.key")}
    with pytest.raises(PySparkException, match=r"none\.key"):
        spark.read.format("rt").options(**wrong).load().count()


def test_endpoints_without_stream_raise_invalid_option_before_reading(nodes: RangeNodes) -> None:
    from rt.spark.data_source import RtDataSource

    source = RtDataSource({**options(nodes), "stream": ""})
    with pytest.raises(rt.InvalidOption, match="endpoints needs stream as well"):
        source.schema()

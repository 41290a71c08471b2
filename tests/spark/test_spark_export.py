"""Export to Parquet: each message is in the files once, on local and Hadoop file systems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import NoReturn

import pyarrow.dataset as ds
import pytest
from merged_logs import BASE_NS, CLUSTER, Feeds
from pyspark.sql import SparkSession
from sink_nodes import Sink

import rt
from rt.cluster_epoch import forced_number
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.spark.data_source import latest_position
from rt.spark.export import exporter
from rt.spark.export.exporter import Exporter, ExportSettings
from rt.spark.export.filesystem import Filesystem, HadoopFilesystem, LocalFilesystem, open_storage
from rt.spark.export.target import ExportedPart, ExportTarget
from rt.spark.options import ClusterSource
from rt.spark.source.options import DirectorySource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COLUMNS = ["position", "timestamp_ns", "session", "run", "number", "full_topic", "value", "headers"]


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    made = Feeds(tmp_path)
    made.fill(80)
    yield made
    made.close()


def exported(target: Path) -> list[tuple[object, ...]]:
    """Return the rows that a reader without rt or Spark finds, sorted by position."""
    table = ds.dataset(target, format="parquet", partitioning="hive").to_table(columns=COLUMNS)
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))


def truth(messages: Sequence[rt.Message]) -> list[tuple[object, ...]]:
    return [
        (
            *(m.position, m.timestamp_ns, m.session, m.run, m.number, m.topic, m.value),
            [{"key": key, "value": value} for key, value in m.headers] or None,
        )
        for m in messages
    ]


def export(
    feeds: Feeds, spark: SparkSession, storage: Filesystem, part_bytes: int = 2**30
) -> list[ExportedPart]:
    settings = ExportSettings(DirectorySource(feeds.path), part_bytes=part_bytes)
    return list(Exporter(settings, ExportTarget(storage), spark).parts(once=True))


def mounted(spark: SparkSession, directory: Path) -> str:
    """Return the URL of a directory in a file system that only Hadoop knows."""
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    conf.set(f"fs.viewfs.mounttable.rt{os.getpid()}.link./data", f"file://{directory}")
    return f"viewfs://rt{os.getpid()}/data"


@pytest.mark.parametrize("kind", ["local", "hadoop"])
def test_export_writes_each_message_once_and_next_export_continues_after_it(
    spark: SparkSession, feeds: Feeds, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "a target"
    root = f"file://{tmp_path}" if kind == "local" else mounted(spark, tmp_path)

    def storage() -> Filesystem:
        found = open_storage(f"{root}/a target", spark)
        assert isinstance(found, LocalFilesystem if kind == "local" else HadoopFilesystem)
        return found

    end = feeds.rows()[-1].position + 1
    parts = export(feeds, spark, storage(), part_bytes=60_000)
    assert len(parts) > 1
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == parts[-1].log_end == end
    assert exported(target) == truth(feeds.rows())
    assert export(feeds, spark, storage()) == []
    assert not storage().create(f"_rt/part-{parts[-1].start:020d}.json", b"of another export")

    feeds.fill(20)
    export(feeds, spark, storage())
    assert exported(target) == truth(feeds.rows())
    topics = {path.name for path in target.glob("date=2023-11-14/*")}
    assert topics == {"topic=trade", "topic=quote", "topic=ärger", "topic=__HIVE_DEFAULT_PARTITION__"}
    rows = spark.read.parquet(str(target)).select(COLUMNS).orderBy("position").collect()
    assert [tuple(row) for row in rows] == truth(feeds.rows())


def test_export_writes_headers(spark: SparkSession, tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    feeds.publish("a", [b"1", b"2"], "t", [1, 2], [(("k", b"\xff"), ("k", b"")), ()])
    feeds.merge()
    export(feeds, spark, LocalFilesystem(str(tmp_path / "target")))
    assert exported(tmp_path / "target") == truth(feeds.rows())
    feeds.close()


def test_topics_invalid_as_directory_names_get_distinct_directories(
    spark: SparkSession, tmp_path: Path
) -> None:
    feeds = Feeds(tmp_path)
    topics = ["a/b", "..", "a=b%", "1", "t" * 1024, "t" * 1023 + "u", "é" * 512]
    topics += ["", "__HIVE_DEFAULT_PARTITION__", "\0", "a\0b", "ab"]
    for number, topic in enumerate(topics):
        feeds.publish("a", [b"%d" % number], topic, [number])
    feeds.merge()
    export(feeds, spark, LocalFilesystem(str(tmp_path / "target")))
    assert exported(tmp_path / "target") == truth(feeds.rows())
    assert len(list((tmp_path / "target" / "date=1970-01-01").iterdir())) == len(topics)
    feeds.close()


def test_date_column_matches_timestamp_to_nanosecond(spark: SparkSession, tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    day_ns = 86_400 * 10**9
    stamps = [20_000 * day_ns - 1, 20_000 * day_ns, 0, -1, -day_ns, -day_ns - 1, -(2**63), 2**63 - 1]
    feeds.publish("a", [b""] * len(stamps), "t", stamps)
    feeds.merge()
    export(feeds, spark, LocalFilesystem(str(tmp_path / "target")))
    read = spark.read.parquet(str(tmp_path / "target")).orderBy("position")
    assert [row.date for row in read.select("date").collect()] == [
        date(1970, 1, 1) + timedelta(days=stamp // day_ns) for stamp in stamps
    ]
    feeds.close()


def test_messages_trimmed_before_export_raise_gap_or_are_skipped(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    storage = LocalFilesystem(str(tmp_path / "target"))
    exported_end = export(feeds, spark, storage)[-1].end
    feeds.roll()
    feeds.fill(10)
    feeds.roll()
    low = feeds.fill(10).start
    feeds.trim(2)
    with pytest.raises(rt.Gap, match=f"positions {exported_end} to {low - 1} were trimmed before"):
        export(feeds, spark, storage)
    settings = ExportSettings(DirectorySource(feeds.path), skip_lost=True)
    (part,) = Exporter(settings, ExportTarget(storage), spark).parts(once=True)
    assert (part.start, part.end - part.start - part.rows) == (exported_end, low - exported_end)
    assert [row[0] for row in exported(tmp_path / "target")] == [*range(exported_end), *range(low, part.end)]


def test_export_of_directory_warns_of_missing_rows_with_skip_lost(
    spark: SparkSession,
    feeds: Feeds,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A copy of some topics, or one that passed over trimmed messages, lacks messages anywhere."""
    target = ExportTarget(LocalFilesystem(str(tmp_path / "target")))
    exporter = Exporter(ExportSettings(DirectorySource(feeds.path), skip_lost=True), target, spark)
    rows = exporter._rows
    monkeypatch.setattr(exporter, "_rows", lambda *arguments: rows(*arguments).where("position != 3"))
    (part,) = exporter.parts(once=True)
    assert part.rows == part.end - 1
    assert f"got={part.rows} expected={part.end}" in caplog.text


def test_export_of_completely_trimmed_log_ends_without_waiting(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    def wait(_: float) -> NoReturn:
        pytest.fail("it waits for positions that are trimmed")

    target = ExportTarget(LocalFilesystem(str(tmp_path / "target")))
    target.open()
    target.commit(0, 10, rows=10, log_end=10, time_ns=0)
    feeds.roll()
    feeds.trim(1)
    end = feeds.log.position
    where = DirectorySource(feeds.path)
    with pytest.raises(rt.Gap, match=f"positions 10 to {end - 1} were trimmed before"):
        list(Exporter(ExportSettings(where), target, spark, wait=wait).parts(once=True))
    settings = ExportSettings(where, skip_lost=True)
    (part,) = Exporter(settings, target, spark, wait=wait).parts(once=True)
    assert (part.start, part.end, part.rows, part.moves) == (10, end, 0, ())
    assert list(Exporter(settings, target, spark, wait=wait).parts(once=True)) == []


def test_export_of_another_log_or_stream_to_same_target_is_rejected(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    storage = LocalFilesystem(str(tmp_path / "target"))
    export(feeds, spark, storage)
    other = Feeds(tmp_path / "other")
    other.fill(2)
    with pytest.raises(rt.Gap, match=r"the export has reached position .* but the log ends with"):
        export(other, spark, storage)
    other.close()
    target = ExportTarget(storage)
    end = feeds.log.position
    target.open()
    target.commit(end, end, rows=0, log_end=end, time_ns=0, stream="quotes")
    feeds.fill(2)
    with pytest.raises(rt.WriteConflict, match=r"the export of another stream .*: got s, expected quotes"):
        export(feeds, spark, storage)


def test_export_raises_diverged_if_forced_reset_replaced_exported_messages_of_directory(
    spark: SparkSession, tmp_path: Path
) -> None:
    logs = []
    for name, before in (("first", 5), ("same", 5), ("other", 4)):
        logs.append(log := Feeds(tmp_path / name, names=("a",)))
        log.publish("a", [b"%d" % number for number in range(before)], "t", [BASE_NS] * before)
        log.merge()
    first, same, other = logs
    storage = LocalFilesystem(str(tmp_path / "target"))
    assert [part.end for part in export(first, spark, storage)] == [5]
    for log in (same, other):
        log.log.roll(forced_number(1))
        log.publish("a", [b"new"] * 3, "t", [BASE_NS] * 3)
        log.merge()
    with pytest.raises(rt.Diverged, match="Start again at position 4,"):
        export(other, spark, storage)
    assert [(part.start, part.end) for part in export(same, spark, storage)] == [(5, 8)]
    for log in logs:
        log.close()


def test_export_of_copy_filtered_by_topic_raises_log_not_found(
    spark: SparkSession, feeds: Feeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtered = LogIdentity(LogKind.FILTERED, CLUSTER, "s")
    monkeypatch.setattr(exporter, "read_identity", lambda *_: filtered)
    with pytest.raises(rt.LogNotFound, match="the directory holds a copy of some topics only"):
        export(feeds, spark, LocalFilesystem(str(tmp_path / "target")))
    assert not (tmp_path / "target").exists()


def test_export_from_cluster_moves_hold_to_exported_position(
    spark: SparkSession, sink: Sink, tmp_path: Path
) -> None:
    files = {name: path for name, path in sink.reading("archive").items() if name in {"ca", "cert", "key"}}
    where = ClusterSource(tuple(sink.nodes.endpoints), sink.nodes.stream, **files)
    target = ExportTarget(LocalFilesystem(str(tmp_path / "target")))
    start = latest_position(**sink.reading("archive"))
    if start:  # Mark the messages of other tests as exported.
        target.open()
        target.commit(0, start, rows=0, log_end=start, time_ns=0)
    with sink.publisher("exported") as publisher:
        numbers = publisher.publish_many([b"%d" % number for number in range(300)], topic="trade")
        publisher.wait(numbers[-1], "merged", 300)
    sink.nodes.wait_merged(start + 300)  # Now every node has written the messages, too.

    (part,) = Exporter(ExportSettings(where, hold="archive"), target, spark).parts(once=True)

    assert (part.start, part.rows) == (start, part.end - start)
    got = [(row[2], row[4], row[6]) for row in exported(tmp_path / "target") if row[2] == "exported"]
    assert got == [("exported", number, b"%d" % number) for number in range(300)]
    sink.nodes.wait(lambda: sink.held("archive") == part.end, "the hold to be where the export is")

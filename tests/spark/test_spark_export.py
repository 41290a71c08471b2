"""`rt export`: each message is in the files once, whatever was killed, on any file system of Hadoop."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from merged_logs import Feeds
from pyspark.sql import SparkSession

import rt
from rt.spark.export_target import STATE, ExportTarget, Part
from rt.spark.exporting import Exporter, ExportSettings
from rt.spark.options import Directory
from rt.spark.storage import HadoopStorage, LocalStorage, Storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COLUMNS = ["position", "timestamp_ns", "session", "number", "full_topic", "value"]


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    made = Feeds(tmp_path)
    made.fill(80)
    yield made
    made.close()


def exported(target: Path) -> list[tuple[object, ...]]:
    """As a reader that knows nothing of rt or Spark finds it, sorted by position."""
    table = ds.dataset(target, format="parquet", partitioning="hive").to_table(columns=COLUMNS)
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))


def truth(messages: Sequence[rt.Message]) -> list[tuple[object, ...]]:
    return [(m.position, m.timestamp_ns, m.session, m.number, m.topic, m.value) for m in messages]


def export(feeds: Feeds, spark: SparkSession, storage: Storage, part_bytes: int = 2**30) -> list[Part]:
    settings = ExportSettings(Directory(feeds.path), part_bytes=part_bytes)
    return list(Exporter(settings, ExportTarget(storage), spark).parts(once=True))


@pytest.mark.parametrize("kind", ["local", "hadoop"])
def test_every_message_is_exported_once_and_the_next_run_goes_on_behind_it(
    spark: SparkSession, feeds: Feeds, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "a target"

    def storage() -> Storage:
        return LocalStorage(str(target)) if kind == "local" else HadoopStorage(f"file://{target}", spark)

    end = feeds.rows()[-1].position + 1
    parts = export(feeds, spark, storage(), part_bytes=60_000)
    assert len(parts) > 1
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == parts[-1].log_end == end
    assert exported(target) == truth(feeds.rows())
    assert export(feeds, spark, storage()) == []

    feeds.fill(20)
    export(feeds, spark, storage())
    assert exported(target) == truth(feeds.rows())
    topics = {path.name for path in target.glob("date=2023-11-14/*")}
    assert topics == {"topic=trade", "topic=quote", "topic=ärger", "topic=__HIVE_DEFAULT_PARTITION__"}
    rows = spark.read.parquet(str(target)).select(COLUMNS).orderBy("position").collect()
    assert [tuple(row) for row in rows] == truth(feeds.rows())


def test_topics_that_are_no_names_of_directories_are_told_apart(spark: SparkSession, tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    topics = ["a/b", "..", "a=b%", "1", "t" * 1024, "t" * 1023 + "u", "é" * 512]
    for number, topic in enumerate(topics):
        feeds.publish("a", [b"%d" % number], topic, [number])
    feeds.merge()
    export(feeds, spark, LocalStorage(str(tmp_path / "target")))
    assert exported(tmp_path / "target") == truth(feeds.rows())
    assert len(list((tmp_path / "target" / "date=1970-01-01").iterdir())) == len(topics)
    feeds.close()


def test_what_was_trimmed_before_it_was_exported_is_an_error_or_left_out(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    storage = LocalStorage(str(tmp_path / "target"))
    exported_end = export(feeds, spark, storage)[-1].end
    feeds.roll()
    feeds.fill(10)
    feeds.roll()
    low = feeds.fill(10).start
    feeds.trim(2)
    with pytest.raises(rt.Gap, match=f"positions {exported_end} to {low - 1} were trimmed before"):
        export(feeds, spark, storage)
    settings = ExportSettings(Directory(feeds.path), skip_lost=True)
    (part,) = Exporter(settings, ExportTarget(storage), spark).parts(once=True)
    assert (part.start, part.end - part.start - part.rows) == (exported_end, low - exported_end)
    assert [row[0] for row in exported(tmp_path / "target")] == [*range(exported_end), *range(low, part.end)]


def test_the_log_of_another_stream_is_refused(spark: SparkSession, feeds: Feeds, tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "target"))
    export(feeds, spark, storage)
    other = Feeds(tmp_path / "other")
    other.fill(2)
    with pytest.raises(rt.Gap, match=r"exported is up to position .* but the log ends with"):
        export(other, spark, storage)
    other.close()


def rt_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rt", *arguments]


def test_an_export_that_is_killed_is_finished_by_the_next_one(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    draw = random.Random(seed := random.randrange(2**32))
    command = rt_command(
        "export", str(target), "--path", feeds.path, "--linger-seconds", "0", "--master", "local[2]"
    )
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    try:
        deadline, seen = time.monotonic() + 480, -1
        wanted, place = draw.randint(1, 2), draw.choice(["part-*.json", "part-*.moved", "staging/*"])
        while len(list((target / STATE).glob("part-*.moved"))) < wanted or not [
            *(target / STATE).glob(place)
        ]:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "the export makes no progress"
            if seen < (seen := len(list((target / STATE).glob("part-*.json")))):
                feeds.fill(5)  # There is always more to export.
            time.sleep(0.002)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    export(feeds, spark, LocalStorage(str(target)))
    assert exported(target) == truth(feeds.rows()), f"seed {seed}"

    said = subprocess.run(
        rt_command("export", str(target), "--status", "--json"), capture_output=True, text=True, check=True
    )
    status = json.loads(said.stdout)
    assert (status["end"], status["lag"], status["is_moved"]) == (feeds.rows()[-1].position + 1, 0, True)

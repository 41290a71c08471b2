"""`format("rt")` as a sink: rows are merged once each, whatever is killed while they are written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from sink_driver import PARTITIONS, into_nodes
from sink_nodes import Sink, running_sink

from rt.spark.ledger import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with running_sink() as sink:
        yield sink


def save(frame: DataFrame, options: dict[str, str], mode: str = "append") -> None:
    frame.write.format("rt").options(**options).mode(mode).save()


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr(
        "cast(concat('row ', id) as binary) value",
        "concat('t', id % 3) topic",
        "timestamp_micros(id) timestamp",
    )


def test_a_batch_write_is_merged_when_it_returns_and_made_twice_adds_nothing(
    spark: SparkSession, sink: Sink
) -> None:
    options = sink.options("batch")
    save(numbers(spark, 500), {**options, "version": "7"})

    wanted = [(b"row %d" % n, f"t{n % 3}", n * 1000) for n in range(500)]
    assert sink.written("batch", 0) + sink.written("batch", 1) == wanted
    save(numbers(spark, 500), {**options, "version": "7"})
    save(numbers(spark, 10).coalesce(1), options)
    assert sink.written("batch", 0) == wanted[:250] + wanted[:10]
    assert sink.written("batch", 1) == wanted[250:]
    with pytest.raises(PySparkException, match="batch 7 comes behind batch 8"):
        save(numbers(spark, 5), {**options, "version": "7"})


@pytest.mark.parametrize(
    ("query", "more", "error"),
    [
        ("select cast(null as binary) value", {}, "a row has no value.*coalesce"),
        ("select 'a' value, 2 position", {}, "a column 'position' cannot be published"),
        ("select 'a' value", {"nmae": "x"}, "Did you mean name"),
        ("select 'a' value", {"key": "/none.key"}, "/none.key"),
    ],
)
def test_what_cannot_be_published_is_refused_with_a_word_that_helps(
    spark: SparkSession, sink: Sink, query: str, more: dict[str, str], error: str
) -> None:
    with pytest.raises(PySparkException, match=error):
        save(spark.sql(query), sink.options("refused", **more))
    assert sink.messages("refused") == []


def test_messages_cannot_be_overwritten(spark: SparkSession, sink: Sink) -> None:
    with pytest.raises(PySparkException, match="messages cannot be overwritten"):
        save(numbers(spark, 1), sink.options("refused"), "overwrite")


def until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "the driver ended by itself; its directory has its log"
        assert time.monotonic() < deadline, "the driver makes no progress"
        time.sleep(0.002)


def workers(driver: int) -> list[int]:
    """The Python workers of a driver: they run in its process group, forked from a daemon."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent, group = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1:3]
            command = Path("/proc", entry, "cmdline").read_bytes()
            above = Path("/proc", parent, "cmdline").read_bytes()
            if int(group) == driver and b"pyspark.daemon" in command and b"pyspark.daemon" in above:
                found.append(int(entry))
    return found


@contextlib.contextmanager
def driver(arguments: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Killed -9 with all that it started, at the end."""
    directory.mkdir()
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, SUPPORT / "sink_driver.py", *arguments, str(directory)],
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_each_row_is_merged_once_whenever_the_driver_or_a_worker_is_killed(
    spark: SparkSession, sink: Sink, tmp_path: Path
) -> None:
    draw = random.Random(seed := random.randrange(2**32))
    feeds = Feeds(tmp_path)
    end = feeds.fill(120).stop
    options, checkpoint = sink.options("stream"), str(tmp_path / "checkpoint")
    del options["ledger"]
    ledger = Ledger(f"{checkpoint}/rt", "stream")
    arguments = [feeds.path, checkpoint, json.dumps(options)]
    with driver(arguments, tmp_path / "life") as process:
        until(ledger.begun, process)
        for pid in draw.sample(found := workers(process.pid), min(1, len(found))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        batch = draw.randint(0, 1)
        until(lambda: ledger.done().batch >= batch, process)
        # Killed while one is begun, half done, or just done.
        some = draw.randint(0, PARTITIONS)
        until(lambda: len(ledger.partitions(ledger.done().batch + 1)) >= some, process)

    query: Any = into_nodes(spark, feeds.path, checkpoint, options, 250, availableNow=True)
    assert query.awaitTermination(300), "the query does not end"

    wanted = Counter((row.value, row.topic, row.timestamp_ns // 1000 * 1000) for row in feeds.rows())
    got = Counter((row.value, row.topic, row.timestamp_ns) for row in sink.messages("stream"))
    assert wanted.total() == end
    assert got == wanted, f"seed {seed}"
    feeds.close()

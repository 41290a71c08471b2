"""After a Spark driver is killed, the next driver completes its work with each message once.

One driver does all work that can be interrupted, and is killed in the middle of it. Before that it is paused,
and the files on disk at that moment are copied. A kill at that moment would have left the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from frozen import descendants, frozen
from merged_logs import Feeds
from pyspark.sql import SparkSession
from sink_nodes import Sink
from spark_victim import PARTITIONS, into_nodes, into_parquet

from rt.spark.export.exporter import Exporter, ExportSettings
from rt.spark.export.filesystem import LocalFilesystem
from rt.spark.export.target import STATE, ExportTarget
from rt.spark.sink.ledger import Ledger
from rt.spark.source.options import DirectorySource
from sequencer.localcluster.processes import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SUPPORT = Path(__file__).parents[1] / "support"
NAME = "killed"


class Victim:
    """A driver that works below `root`, and the log that it reads. There is always more work for the
    driver.
    """

    def __init__(self, root: Path, sink: Sink) -> None:
        self.seed = random.randrange(2**32)
        self.draw = random.Random(self.seed)
        self.root = root
        self.feeds = Feeds(root)
        self.feeds.fill(60)
        self.feeds.roll()
        self.options = sink.options(NAME)
        del self.options["ledger"]
        self.streamed, self.delivered, self.target = root / "streamed", root / "delivered", root / "target"
        self.ledger = Ledger(f"{self.delivered}/checkpoint/rt", NAME)
        self._seen = 0
        asked = {
            "log": self.feeds.path,
            "streamed": str(self.streamed),
            "delivered": str(self.delivered),
            "target": str(self.target),
            "options": self.options,
            "directory": str(root / "spark"),
        }
        with open(root / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, SUPPORT / "spark_victim.py", json.dumps(asked)],
                start_new_session=True,
                stdout=log,
                stderr=log,
            )

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds. Meanwhile, publish more work for the driver."""
        deadline = time.monotonic() + 900
        while not condition():
            assert self.process.poll() is None, (self.root / "log").read_text()
            assert time.monotonic() < deadline, "the driver makes no progress"
            seen = self.begun() + len(self.exported("part-*.json")) + self.ledger.done().batch
            if seen > self._seen:
                self._seen = seen
                self.feeds.fill(4)
            time.sleep(0.005)

    def begun(self) -> int:
        """Return the number of micro-batches that were planned by the query that writes Parquet."""
        return count(self.streamed / "checkpoint" / "offsets")

    def done(self) -> int:
        """Return the number of micro-batches that are written."""
        return count(self.streamed / "checkpoint" / "commits")

    def exported(self, what: str) -> set[Path]:
        """Return the export's records of one kind: of parts that count, or of parts that have all their
        names.
        """
        return {*(self.target / STATE).glob(what)}

    def kill_workers(self) -> int:
        """Kill the workers that run tasks, forked from a Spark daemon. Return their number."""
        workers = [
            pid
            for daemon in descendants(self.process.pid)
            if b"pyspark.daemon\0pyspark.worker\0" in command_of(daemon)
            for pid in descendants(daemon)
            if b"pyspark.daemon" in command_of(pid)
        ]
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(workers)

    def kill(self) -> None:
        """Kill the whole process group of the driver."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def count(directory: Path) -> int:
    """Return the number of micro-batches in a log of a checkpoint."""
    return sum(1 for path in directory.glob("[0-9]*")) if directory.exists() else 0


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes()
    return b""


@pytest.fixture(scope="module")
def victim(spark: SparkSession, sink: Sink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Yield a driver that was killed."""
    with nothing_left():
        victim = Victim(tmp_path_factory.mktemp("victim"), sink)
        draw = victim.draw
        try:
            victim.until(victim.ledger.started)
            assert victim.kill_workers() > 0

            # Copy the files when a batch is planned or just done, and when an exported part is visible in
            # part or whole.
            wanted, done = draw.randint(1, 3), draw.randint(0, 1)
            victim.until(lambda: victim.begun() >= wanted and victim.done() >= wanted - 1 + done)
            with frozen(victim.process.pid):
                shutil.copytree(victim.streamed, victim.root / "streamed-before")
            place = draw.choice(["part-*.json", "part-*.moved"])
            before = victim.exported(place)
            victim.until(lambda: victim.exported(place) - before)
            with frozen(victim.process.pid):
                shutil.copytree(victim.target, victim.root / "target-before")

            # Kill the driver when a batch is started, half done, or just done, whatever else is under way.
            batch, some = draw.randint(0, 1), draw.randint(0, PARTITIONS)
            victim.until(lambda: victim.ledger.done().batch >= batch and victim.exported("part-*.moved"))
            victim.until(lambda: len(victim.ledger.partitions(victim.ledger.done().batch + 1)) >= some)
        finally:
            victim.kill()
        yield victim
        victim.feeds.close()


def test_stream_into_parquet_has_each_message_once_after_driver_kill(
    spark: SparkSession, victim: Victim
) -> None:
    wanted = [
        (row.position, row.session, row.number, hashlib.sha256(row.value).hexdigest())
        for row in victim.feeds.rows()
    ]
    for state in ("as it was killed", "as it was before"):
        if state == "as it was before":
            shutil.rmtree(victim.streamed)
            (victim.root / "streamed-before").rename(victim.streamed)
        query = into_parquet(spark, victim.feeds.path, str(victim.streamed), 100_000, availableNow=True)
        assert query.awaitTermination(900), "the query does not end"
        got = sorted(tuple(row) for row in spark.read.parquet(f"{victim.streamed}/output").collect())
        assert got == wanted, f"{state}, seed {victim.seed}"


def test_stream_into_cluster_has_each_row_once_after_driver_and_worker_kill(
    spark: SparkSession, sink: Sink, victim: Victim
) -> None:
    query: Any = into_nodes(
        spark, victim.feeds.path, str(victim.delivered), victim.options, 100_000, availableNow=True
    )
    assert query.awaitTermination(900), "the query does not end"

    rows = victim.feeds.rows()
    wanted = Counter((row.value, row.topic, row.timestamp_ns // 1000 * 1000) for row in rows)
    got = Counter((row.value, row.topic, row.timestamp_ns) for row in sink.messages(NAME, len(rows)))
    assert got == wanted, f"seed {victim.seed}"


def test_export_has_each_message_once_after_driver_kill(spark: SparkSession, victim: Victim) -> None:
    columns = ["position", "timestamp_ns", "session", "run", "number", "full_topic", "value"]
    wanted = [
        (m.position, m.timestamp_ns, m.session, m.run, m.number, m.topic, m.value)
        for m in victim.feeds.rows()
    ]
    for target in (victim.target, victim.root / "target-before"):
        settings = ExportSettings(DirectorySource(victim.feeds.path))
        deque(
            Exporter(settings, ExportTarget(LocalFilesystem(str(target))), spark).parts(once=True), maxlen=0
        )
        table = ds.dataset(target, format="parquet", partitioning="hive").to_table(columns=columns)
        got = sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))
        assert got == wanted, f"{target.name}, seed {victim.seed}"

    result = subprocess.run(
        [sys.executable, "-m", "rt", "export", str(victim.target), "--status", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    status = json.loads(result.stdout)
    assert (status["end"], status["lag"], status["is_moved"]) == (len(wanted), 0, True)

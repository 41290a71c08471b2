"""A streaming query whose driver is killed at any moment, and started again, writes each message once."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from merged_logs import Feeds
from pyspark.sql import SparkSession
from stream_driver import into_parquet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SUPPORT = Path(__file__).parents[1] / "support"
KILLS = 2


@contextmanager
def growing(feeds: Feeds) -> Iterator[None]:
    """More is merged all the time, now and then in a new segment."""
    stopping = threading.Event()

    def grow() -> None:
        for turn in range(150):
            feeds.fill(4)
            if turn % 15 == 14:
                feeds.roll()
            if stopping.wait(0.3):
                return

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, "the driver ended by itself; its directory has its log"
        assert time.monotonic() < deadline, "the driver makes no progress"
        time.sleep(0.002)


def count(directory: Path) -> int:
    """The micro-batches that a log of a checkpoint knows of."""
    return sum(1 for path in directory.glob("[0-9]*")) if directory.exists() else 0


def test_each_message_is_written_once_whenever_the_driver_is_killed(
    spark: SparkSession, tmp_path: Path
) -> None:
    draw = random.Random(seed := random.randrange(2**32))
    feeds = Feeds(tmp_path)
    feeds.fill(50)
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "output"
    with growing(feeds):
        for life in range(KILLS):
            directory = tmp_path / f"life-{life}"
            directory.mkdir()
            arguments = (feeds.path, str(checkpoint), str(output), str(directory))
            with open(directory / "log", "wb") as output_of_driver:
                process = subprocess.Popen(
                    [sys.executable, SUPPORT / "stream_driver.py", *arguments],
                    start_new_session=True,
                    stdout=output_of_driver,
                    stderr=output_of_driver,
                )
            try:
                wanted = count(checkpoint / "offsets") + draw.randint(1, 4)
                until(lambda least=wanted: count(checkpoint / "offsets") >= least, process)
                # Planned and not done yet, or done just now.
                done = draw.randint(0, 1)
                until(lambda least=wanted - 1 + done: count(checkpoint / "commits") >= least, process)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    end = feeds.merge().stop

    query = into_parquet(spark, feeds.path, str(checkpoint), str(output), 100_000, availableNow=True)
    assert query.awaitTermination(600), "the query does not end"

    got = sorted(tuple(row) for row in spark.read.parquet(str(output)).collect())
    wanted_rows = [
        (row.position, row.session, row.number, hashlib.sha256(row.value).hexdigest()) for row in feeds.rows()
    ]
    assert len(wanted_rows) == end
    assert got == wanted_rows, f"seed {seed}"
    feeds.close()

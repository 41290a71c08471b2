"""Errors of failing Spark queries: the message comes first, without a traceback of rt code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from receiving_node import make_pki

from sequencer.localcluster.loopback import free_ports

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def down(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a stream whose nodes do not run."""
    pki = make_pki(tmp_path_factory.mktemp("pki"))
    endpoints = ",".join(f"localhost:{port}" for port in free_ports(2))
    files = {"ca": f"{pki}/ca.crt", "cert": f"{pki}/sub.crt", "key": f"{pki}/sub.key"}
    return {"endpoints": endpoints, "stream": "s", **files, "connectTimeoutMs": "500"}


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    made = Feeds(tmp_path / "log")
    made.fill(3)
    yield made
    made.close()


def message_of(error: PySparkException) -> str:
    """Return the error's text without the stack of the JVM."""
    return str(error).split("JVM stacktrace")[0]


def test_read_from_unreachable_cluster_raises_one_error_with_reason_of_each_node(
    spark: SparkSession, down: dict[str, str]
) -> None:
    with pytest.raises(PySparkException) as error:
        spark.read.format("rt").options(**down).load().count()
    message = message_of(error.value)
    first, second = down["endpoints"].split(",")
    assert f"no node of stream s answers: got {first}: connection refused; {second}: " in message
    assert "expected an answer within 0.5 s" in message
    assert "Traceback" not in message
    assert len(message.strip().splitlines()) <= 2


def test_write_to_unreachable_cluster_raises_error_without_traceback(
    spark: SparkSession, down: dict[str, str], tmp_path: Path
) -> None:
    pki = Path(down["ca"]).parent
    options = {
        **down,
        "cert": f"{pki}/other.crt",
        "key": f"{pki}/other.key",
        "name": "w",
        "ledger": str(tmp_path),
    }
    with pytest.raises(PySparkException) as error:
        spark.sql("select 'a' value").write.format("rt").options(**options).mode("append").save()
    message = message_of(error.value)
    assert "no node of stream s answers" in message
    assert "Traceback" not in message


def test_stream_from_unreachable_cluster_raises_error_without_traceback(
    spark: SparkSession, down: dict[str, str], tmp_path: Path
) -> None:
    frame = spark.readStream.format("rt").options(**down).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException, match="no node of stream s answers") as error:
        query.awaitTermination(600)
    assert "Traceback" not in message_of(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"endingOffsets": "5"}, "endingOffsets is for batch queries; a stream has no end"),
        ({"consumer": "c"}, "consumer needs endpoints"),
    ],
)
@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"processingTime": "0 seconds"}])
def test_stream_with_invalid_option_raises_error_naming_it(
    spark: SparkSession,
    feeds: Feeds,
    tmp_path: Path,
    given: dict[str, str],
    expected: str,
    trigger: dict[str, Any],
) -> None:
    """Spark's runner of streams hides the error if a reader cannot be created."""
    frame = spark.readStream.format("rt").schema("position long").options(path=feeds.path, **given).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(PySparkException, match=expected):
        writer.trigger(**trigger).start().awaitTermination(600)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"path": "/nowhere/at/all"}, "rt.errors.LogNotFound: not a log directory (at /nowhere/at/all)"),
        ({"path": "/tmp", "topcs": "a"}, "unknown option 'topcs'. Did you mean topics"),
        ({"subscribe": "a"}, "subscribe → stream, and topics"),
        ({"path": "/etc/passwd"}, "(at /etc/passwd)"),
    ],
)
def test_batch_query_with_invalid_option_raises_error_without_traceback(
    spark: SparkSession, given: dict[str, str], expected: str
) -> None:
    with pytest.raises(PySparkException) as error:
        spark.read.format("rt").options(**given).load().count()
    message = message_of(error.value)
    assert expected in message.splitlines()[0]
    assert "Traceback" not in message


def test_task_error_omits_traceback_of_rt_code(spark: SparkSession, feeds: Feeds) -> None:
    frame = spark.read.format("rt").options(path=feeds.path).load()
    with open(f"{feeds.path}/log.0.0", "r+b") as file:
        file.seek(-60, 2)
        file.write(bytes(20))
    with pytest.raises(PySparkException) as error:
        frame.selectExpr("sum(length(value))").collect()
    assert "rt.errors." in message_of(error.value)
    assert "gather" not in message_of(error.value)


WRITING = """
import os, sys
from importlib.machinery import ModuleSpec
sys.modules["__main__"].__spec__ = ModuleSpec("pyspark.daemon", None)
from rt.spark.python_workers import quiet_end
reading, writing = os.pipe()
os.close(reading)
with quiet_end():
    os.write(writing, b"rows")
"""


def test_worker_ends_by_sigpipe_without_traceback_if_socket_closes_while_writing_rows() -> None:
    """A `limit` ends the worker in this way."""
    run = subprocess.run([sys.executable, "-c", WRITING], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (-signal.SIGPIPE, "")

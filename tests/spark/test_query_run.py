"""`rt query run --spark`: each result is in the merged log exactly once, even if the driver is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import timed_engines
from sink_nodes import Sink
from spark_sessions import prepare, settings

import rt
from rt.query import Source
from rt.query import operators as ops
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.processes import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECOND = timed_engines.SECOND
START = 1_767_225_600
KEYS = 7
COUNT = 240
NAME = "totals"

JOB = """
import json
from rt.query import Source, operators as ops
from rt.query.messages import OutgoingMessage
from rt.query.spark import SparkJob

given = json.loads(GIVEN)


def totals(group):
    '''The orders of every ten seconds of a user.'''
    return group.pipe(
        ops.tumbling_window(10, ops.Fold.sum(lambda order: order["amount"])),
        ops.map(lambda window: message(group.key, window)),
    )


def message(user, window):
    value = [user, window["start_ns"], window["value"]]
    return OutgoingMessage(json.dumps(value).encode(), "totals", window["end_ns"])


query = Source("orders").pipe(
    ops.where(lambda order: order.topic == "orders"),
    ops.map(lambda order: json.loads(order.value)),
    ops.group_by(lambda order: order["user"]),
    ops.flat_map(totals),
)
job = SparkJob(
    query,
    source=given["source"],
    sink=given["sink"],
    checkpoint=given["checkpoint"],
    time_of=lambda order: order.timestamp_ns,
    max_out_of_orderness_s=5,
    trigger_s=0,
)
"""


def orders(root: Path) -> tuple[str, list[tuple[float, dict[str, int]]]]:
    """Return a merged log of orders, up to four seconds late, and its content."""
    found = [(START + n - (n * 3) % 5, {"user": n % KEYS, "amount": n}) for n in range(COUNT)]
    with rt.Publisher(root, "s", publisher_id="a", fsync="never") as publisher:
        for second, order in found:
            value = json.dumps(order).encode()
            publisher.publish(value, topic="orders", timestamp_ns=second * SECOND)
        for n in range(2):  # The watermark of the last batch closes all windows.
            publisher.publish(b"", topic="time", timestamp_ns=(START + COUNT + 1000 + n) * SECOND)
    with MergedLogBuilder(root / "merged", cluster_id=bytes(16), stream="s") as log:
        log.merge_all([publisher.directory])
    return str(root / "merged"), [(float(second), order) for second, order in found]


def expected(values: list[tuple[float, dict[str, int]]]) -> dict[int, list[list[int]]]:
    """Return what the engine emits, by user."""
    window = ops.tumbling_window(
        10, ops.Fold.sum(lambda value: value[1]["amount"]), key_mapper=lambda value: value[1]["user"]
    )
    run = timed_engines.TimedRun(
        Source("in").pipe(window), {"in": values}, {"in": {"max_out_of_orderness_s": 5}}
    )
    while not run.sources["in"].is_at_end:
        assert run.send("in")
    run.send("in")  # the end
    run.commit()
    found: defaultdict[int, list[list[int]]] = defaultdict(list)
    for each in run.out.values:
        found[each["key"]].append([each["key"], each["start_ns"], each["value"]])
    return found


def done(checkpoint: Path) -> int:
    """The number of micro-batches that have ended."""
    return sum(1 for _ in (checkpoint / "commits").glob("[0-9]*"))


def test_killed_spark_job_merges_each_result_once_and_equal_to_engine(sink: Sink, tmp_path: Path) -> None:
    log, values = orders(tmp_path / "log")
    checkpoint = tmp_path / "checkpoint"
    options = sink.options(NAME)
    given = {
        "source": {"path": log, "maxOffsetsPerTrigger": "60"},
        "sink": options,
        "checkpoint": str(checkpoint),
    }
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("GIVEN", repr(json.dumps(given))))
    environment = dict(os.environ)
    prepare(tmp_path, sys.executable, environment)
    conf = [word for pair in settings(tmp_path).items() for word in ("--conf", "=".join(pair))]
    run = [sys.executable, "-m", "rt", "query", "run", "--spark", str(path)]
    command = [*run, "--master", "local[2]", *conf]

    with nothing_left(), open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=output, stderr=output, env=environment
        )
        try:
            deadline = time.monotonic() + 600
            while done(checkpoint) < 2:
                assert process.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline, "the job makes no progress"
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        subprocess.run([*command, "--once"], stdout=output, stderr=output, env=environment, check=True)

    want = expected(values)
    got: defaultdict[int, list[list[int]]] = defaultdict(list)
    for message in sink.messages(NAME, sum(map(len, want.values()))):
        user, start_ns, total = json.loads(message.value)
        assert (message.topic, message.timestamp_ns) == ("totals", start_ns + 10 * SECOND)
        got[user].append([user, start_ns, total])
    assert got == want

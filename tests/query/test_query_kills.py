"""A real engine process killed at random moments: merged results equal those of a run without kills."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import BASE_NS, Feeds
from postgres_server import PostgresServer
from query_driver import FRAGILE_EVERY, RunningQueries, factories, open_store

import rt
from rt.errors import WriteConflict
from rt.objects import MemoryStore
from rt.query import QueryEngine, VirtualScheduler
from rt.query.messages import MessageSource, as_message
from rt.sidecar.progress_file import read_progress
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIVER = Path(__file__).parents[1] / "support" / "query_driver.py"
COUNT = 1200
KILLS = 3
WAIT_S = 240


@pytest.fixture
def node() -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets want a short path.
    try:
        with nothing_left(), LocalCluster(root, 1) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


def merged(node: LocalCluster) -> list[bytes]:
    with rt.LogReader(node.merged_directory("n1")) as reader:
        return [each.value for each in reader]


@pytest.fixture(params=["file", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the store of the queries is."""
    if request.param == "file":
        return f"{tmp_path}/queries.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return f"{server.url}#{server.schema(tmp_path)}"


def test_engine_killed_at_random_moments_publishes_each_result_once(
    tmp_path: Path, node: LocalCluster, place: str
) -> None:
    feeds = Feeds(tmp_path, ["a"])
    feeds.publish("a", [b"%d" % n for n in range(COUNT)], "t", [BASE_NS + n * 10**8 for n in range(COUNT)])
    feeds.merge()
    RunningQueries(feeds.path, MemoryStore(), {"path": f"{tmp_path}/plain"}, "commit").finish(COUNT)
    with rt.LogReader(f"{tmp_path}/plain/s/sessions/out") as reader:
        expected = [each.value for each in reader]
    assert len(expected) > COUNT / 2

    tls = node.certificate("publisher", "out", dedup_ids=["results"])
    sink = {
        "dedup_id": "results",
        "check_timeout": 1.0 * WAIT_S,
        "endpoints": node.endpoints,
        "tls": {name: str(getattr(tls, name)) for name in ("ca", "cert", "key")},
    }
    draw = random.Random(3)

    def arguments(disk: int) -> list[str]:
        on_disk = json.dumps({**sink, "path": f"{tmp_path}/{disk}"})
        return [feeds.path, place, str(COUNT), on_disk]

    for kill in range(KILLS):
        # The messages of the first process stay on another disk. That disk's session is still pushed.
        watermark = COUNT * (kill + 1) // (KILLS + 1)
        run(arguments(min(kill, 1)), watermark, draw.randint(0, 12), is_in_it=kill > 0)
        if kill == 0:  # The second disk's session counts as newer only if nodes see it later.
            node.wait(lambda: is_replicated(tmp_path / "0"), "the first process's push", timeout_s=WAIT_S)
    run(arguments(1))
    # The merge is committed. The node may still be writing it.
    node.wait_merged(len(expected), timeout_s=WAIT_S)
    assert merged(node) == expected
    check_letters(place, feeds.path)

    lost = {**sink, "path": f"{tmp_path}/1", "tls": tls}
    with pytest.raises(WriteConflict, match="not of this output"):
        RunningQueries(feeds.path, MemoryStore(), lost, "commit")


def check_letters(place: str, log: str) -> None:
    """Check that each skipped value has one letter, even if it was processed again after a kill."""
    with open_store(place) as store:
        engine = QueryEngine(store, factories, VirtualScheduler())
        engine.add_source("in", MessageSource(log, "s"), time_of=lambda message: message.timestamp_ns)
        engine.add_sink("out", encode=as_message)
        engine.recover()
        letters = [each.sequence_id for each in engine.dead_letters]
        (fragile,) = (each for each in engine.status().queries if each.id == "fragile")
        engine.unload()
    assert letters == list(range(0, COUNT, FRAGILE_EVERY))
    assert (fragile.skipped, fragile.events) == (len(letters), COUNT)


def is_replicated(disk: Path) -> bool:
    record = read_progress(str(disk / "s" / "sessions" / "out"))
    return record is not None and record.replicated.number > 0


def run(
    arguments: list[str], kill_after: int | None = None, steps: int = 0, *, is_in_it: bool = False
) -> None:
    """Run the driver to its end, or kill it `steps` steps after a watermark, either before a step or during
    it.
    """
    process = subprocess.Popen(
        [sys.executable, DRIVER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if kill_after is not None and int(line.split()[1]) >= kill_after:
                steps -= 1
            if steps >= 0:
                process.stdin.write(b"\n")
            else:
                if is_in_it:
                    process.stdin.write(b"\n")
                return
        assert process.wait(WAIT_S) == 0
        assert kill_after is None, "the driver ended before it was killed"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

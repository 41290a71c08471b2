"""A real engine process, killed at random moments: the nodes merge what a run without kills emits."""

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
from query_driver import RunningQueries

import rt
from rt.errors import WriteConflict
from rt.objects import MemoryStore
from rt.sidecar.progress_file import read_progress
from sequencer.localcluster.leftovers import nothing_left
from sequencer.localcluster.nodes import LocalCluster

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


def test_an_engine_killed_at_random_moments_publishes_each_result_once(
    tmp_path: Path, node: LocalCluster
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
        return [feeds.path, f"{tmp_path}/queries.db", str(COUNT), on_disk]

    for kill in range(KILLS):
        # What the first process published stays on another disk, and is still pushed.
        watermark = COUNT * (kill + 1) // (KILLS + 1)
        run(arguments(min(kill, 1)), watermark, draw.randint(0, 12), is_in_it=kill > 0)
        if kill == 0:  # The session on another disk is the newer one only if the nodes hear of it later.
            node.wait(lambda: is_replicated(tmp_path / "0"), "the first process's push", timeout_s=WAIT_S)
    run(arguments(1))
    node.wait_merged(len(expected), timeout_s=WAIT_S)  # It is agreed; the node may still be writing it.
    assert merged(node) == expected

    lost = {**sink, "path": f"{tmp_path}/1", "tls": tls}
    with pytest.raises(WriteConflict, match="not of this output"):
        RunningQueries(feeds.path, MemoryStore(), lost, "commit")


def is_replicated(disk: Path) -> bool:
    record = read_progress(str(disk / "s" / "sessions" / "out"))
    return record is not None and record.replicated.number > 0


def run(
    arguments: list[str], kill_after: int | None = None, steps: int = 0, *, is_in_it: bool = False
) -> None:
    """Let the driver run to its end, or kill it `steps` steps after a watermark: before a step, or in it."""
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

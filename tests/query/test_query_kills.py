"""A real engine process, killed -9 at random moments: the nodes merge what comes out without kills."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import BASE_NS, Feeds
from query_driver import RunningQueries

import rt
from rt.errors import WriteConflict
from rt.objects import MemoryStore
from sequencer.testing.leftovers import nothing_left
from sequencer.testing.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIVER = Path(__file__).parents[1] / "support" / "query_driver.py"
COUNT = 1200
KILLS = 3
WAIT_S = 240


@pytest.fixture
def node() -> Iterator[Nodes]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets want a short path.
    try:
        with nothing_left(), Nodes(root, 1) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


def merged(node: Nodes) -> list[bytes]:
    with rt.LogReader(node.merged_directory("n1")) as reader:
        return [each.value for each in reader]


def test_an_engine_killed_at_random_moments_publishes_each_result_once(tmp_path: Path, node: Nodes) -> None:
    feeds = Feeds(tmp_path, ["a"])
    feeds.publish("a", [b"%d" % n for n in range(COUNT)], "t", [BASE_NS + n * 10**8 for n in range(COUNT)])
    feeds.merge()
    RunningQueries(feeds.path, MemoryStore(), {"path": f"{tmp_path}/plain"}, "commit").finish(COUNT)
    with rt.LogReader(f"{tmp_path}/plain/s/sessions/out") as reader:
        wanted = [each.value for each in reader]
    assert len(wanted) > COUNT / 2

    tls = node.certificate("publisher", "out", dedup_ids=["results"])
    sink = {
        "path": f"{tmp_path}/out",
        "dedup_id": "results",
        "endpoints": node.endpoints,
        "tls": {name: str(getattr(tls, name)) for name in ("ca", "cert", "key")},
    }
    arguments = [feeds.path, f"{tmp_path}/queries.db", str(COUNT), json.dumps(sink)]
    draw = random.Random(3)
    for kill in range(KILLS):
        run(arguments, kill_behind=COUNT * (kill + 1) // (KILLS + 1), turns=draw.randint(0, 4))
        if kill == 0:
            shutil.rmtree(f"{tmp_path}/out/s/sessions/out")  # The next life publishes from another disk.
    run(arguments)
    assert merged(node) == wanted

    lost = {**sink, "tls": tls, "check_timeout": 120.0}
    with pytest.raises(WriteConflict, match="not of this output"):
        RunningQueries(feeds.path, MemoryStore(), lost, "commit")


def run(arguments: list[str], kill_behind: int | None = None, turns: int = 0) -> None:
    """Let the driver run to its end, or kill it some turns behind that watermark."""
    process = subprocess.Popen([sys.executable, DRIVER, *arguments], stdout=subprocess.PIPE)
    deadline = time.monotonic() + WAIT_S
    assert process.stdout is not None
    try:
        for line in process.stdout:
            assert time.monotonic() < deadline, "the driver makes no progress"
            if kill_behind is not None and int(line) >= kill_behind:
                turns -= 1
                if turns < 0:
                    return
        assert process.wait(WAIT_S) == 0
        assert kill_behind is None, "the driver ended before it was killed"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

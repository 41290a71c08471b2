"""Raft heartbeats of real nodes at full load: payload delays none by an election timeout."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import fields

import rt
from sequencer.localcluster.nodes import LocalCluster
from sequencer.raft.model.config import RaftConfig

pytestmark = pytest.mark.slow

WAIT_S = 180.0
LOADS = {"small": (b"x" * 128, 400_000), "large": (b"x" * 65536, 3_000)}
"""A value, and how often each of two publishers publishes it: about 50 MB and 200 MB, as fast as possible."""

DEFAULTS = {one.name: one.default for one in fields(RaftConfig)}
HEARTBEAT_MS, ELECTION_MS_MIN = DEFAULTS["heartbeat_ms"], DEFAULTS["election_ms_min"]
WITNESS = """
import sys, threading, time
longest, is_over = 0.0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), is_over.set())).start()
while not is_over.is_set():
    began = time.monotonic()
    time.sleep(0.01)
    worked = time.thread_time() + 0.0005
    while time.thread_time() < worked:
        pass
    longest = max(longest, time.monotonic() - began - 0.0105)
print(longest)
"""
"""Measures how late the machine runs a process that needs 5 % of a processor, as Raft does at full load."""
WITNESSES = 3
"""One for each node."""


@pytest.fixture
def stall_s() -> Iterator[Callable[[], float]]:
    """A function that ends the measurement and returns the longest stall, in seconds.

    Raft cannot compensate for the time in which the machine gives its processors to other processes.
    """
    with contextlib.ExitStack() as opened:
        command, pipe = [sys.executable, "-c", WITNESS], subprocess.PIPE
        witnesses = [
            opened.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            for _ in range(WITNESSES)
        ]
        for witness in witnesses:
            opened.callback(witness.kill)
        yield lambda: max(float(witness.communicate()[0]) for witness in witnesses)


@pytest.fixture
def nodes(stall_s: Callable[[], float]) -> Iterator[LocalCluster]:
    """Start nodes with a health port, which reports the records of Raft. Both the measurement and Raft's
    records include the start.
    """
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    try:
        with LocalCluster(root, with_rest=True) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("load", LOADS)
def test_full_load_changes_no_leader_and_delays_no_heartbeat_by_election_timeout(
    nodes: LocalCluster, stall_s: Callable[[], float], tmp_path: Path, load: str
) -> None:
    value, count = LOADS[load]
    nodes.wait(lambda: in_one_term(nodes), "all nodes to be in one term")
    leader, before = nodes.wait_ready(), terms(nodes)
    with ThreadPoolExecutor(3) as pool, subscribing(nodes, tmp_path / "copy"):
        publishing = [
            pool.submit(publish, nodes, tmp_path / name, f"{load}-{name}", value, count)
            for name in ("one", "other")
        ]
        for one in publishing:
            one.result()
        nodes.wait_merged(2 * count)
    leader_after, after = nodes.leader(), terms(nodes)
    gaps_ms = {name: 1000 * metric(nodes, name, "rt_raft_leader_gap_seconds") for name in nodes.names}
    stalled_ms = 2 * 1000 * stall_s()  # A heartbeat needs two processes: one sends it, one reads it.
    if after != before and stalled_ms > ELECTION_MS_MIN - HEARTBEAT_MS:
        pytest.skip(f"the machine stood still for {stalled_ms:.0f} ms: no leader could be heard meanwhile")
    assert after == before, "no node stood for election"
    assert leader_after == leader
    assert gaps_ms.pop(leader) == 0
    timeout_ms = ELECTION_MS_MIN + stalled_ms
    assert {name: gap for name, gap in gaps_ms.items() if not 0 < gap < timeout_ms} == {}, timeout_ms


def publish(nodes: LocalCluster, path: Path, session: str, value: bytes, count: int) -> None:
    tls = nodes.certificate("publisher", session)
    with rt.Publisher(path, "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls) as publisher:
        together = [value] * max(1, 2**20 // len(value))
        for start in range(0, count, len(together)):
            publisher.publish_many(together[: count - start])
        publisher.wait(count - 1, "merged", timeout=WAIT_S)


@contextlib.contextmanager
def subscribing(nodes: LocalCluster, path: Path) -> Iterator[None]:
    """Run a subscriber that pulls and reads all messages during the block."""
    tls, is_over = nodes.certificate("subscriber", "reader"), threading.Event()

    def read() -> None:
        with rt.Subscriber(path, "s", endpoints=nodes.endpoints, tls=tls, connect_timeout=None) as subscriber:
            while not is_over.is_set():
                subscriber.poll(100_000, 0.2)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            is_over.set()
        reading.result()


def in_one_term(nodes: LocalCluster) -> bool:
    """Whether all nodes have the same term."""
    return len(set(terms(nodes))) == 1


def terms(nodes: LocalCluster) -> list[float]:
    """Raft's term on each node."""
    return [metric(nodes, name, "rt_raft_term") for name in nodes.names]


def metric(nodes: LocalCluster, name: str, what: str) -> float:
    """Return a metric of a node. It does not change while the node's control process is silent.

    While the data process starts or stands still, the supervisor answers, which does not know the metric.
    """
    found: list[str] = []

    def is_said() -> bool:
        url = f"http://127.0.0.1:{nodes.health_ports[name]}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=WAIT_S) as said:
            found[:] = [line for line in said.read().decode().splitlines() if line.startswith(f"{what} ")]
        return bool(found)

    nodes.wait(is_said, f"{name} to say {what}")
    return float(json.loads(found[0].rpartition(" ")[2]))

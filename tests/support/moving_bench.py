"""Measures the downtime of a query engine after a fault of its host: three nodes, PostgreSQL, two hosts.

    cd tests/support && python moving_bench.py --rounds 5

A message is published after the fault. The time runs from the fault until its result is merged. The hosts use
the default times of `rt.query.host`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from chaos.wired_nodes import WiredNodes
from moving_hosts import NAMES, Hosts, Trial
from postgres_server import PostgresServer

import rt
from rt.query.host import TIMES
from sequencer.localcluster.processes import nothing_left


def faults(hosts: Hosts, nodes: WiredNodes) -> dict[str, Callable[[str], object]]:
    """Return the faults by name. Each is a function of a host's name."""
    return {
        "kill -9": hosts.kill,
        "paused": lambda name: hosts.signal(name, signal.SIGSTOP),
        "cut off from the nodes": nodes.cut,
        "silent to the nodes": nodes.silence,
        "cut off from PostgreSQL": lambda name: hosts.to_server[name].cut(),
        "silent to PostgreSQL": lambda name: hosts.to_server[name].hold(),
        "answer of a commit lost": lambda name: hosts.proxies[name].cut(b"; COMMIT", "after"),
        "SIGTERM": hosts.stop,
    }


def measured(root: Path, rounds: int, postgres: PostgresServer) -> dict[str, list[float]]:
    """Return the seconds of each round, by fault."""
    with contextlib.ExitStack() as opened:
        nodes = opened.enter_context(WiredNodes(root, clients=NAMES))
        nodes.start()
        nodes.wait_ready()
        opened.enter_context(nothing_left())  # Ends the push clients of the hosts before the wires end.
        hosts = Hosts(root, nodes, postgres, TIMES.lease_s)
        opened.callback(hosts.close)
        tls = nodes.certificate("publisher", "feed")
        feed = rt.Publisher(
            root / "feed", nodes.stream, publisher_id="feed", endpoints=nodes.endpoints, tls=tls
        )
        trial = Trial(hosts, nodes, opened.enter_context(feed))
        for name in NAMES:
            hosts.start(name)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for what, happen in faults(hosts, nodes).items():
                owner, _ = trial.settled()
                trial.publish()
                trial.wait_results()
                begun_s = time.monotonic()
                happen(owner)
                trial.publish(1)
                trial.wait_results()
                found.setdefault(what, []).append(time.monotonic() - begun_s)
                if not hosts.role(owner):
                    hosts.start(owner)
                hosts.fix(owner)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    try:
        with nothing_left(), contextlib.closing(PostgresServer()) as postgres:
            for what, taken in measured(root, options.rounds, postgres).items():
                print(f"{what:26} median {median(taken):5.1f} s   max {max(taken):5.1f} s")  # noqa: T201
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()

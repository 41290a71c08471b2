"""An engine that moves between two host processes, over a real node and a real PostgreSQL server."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.wired_nodes import WiredNodes
from moving_hosts import NAMES, Hosts, Trial
from postgres_server import PostgresServer

import rt
from sequencer.localcluster.processes import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with nothing_left():
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def test_engine_fails_over_between_hosts_after_faults_and_publishes_each_result_once(
    root: Path, postgres: PostgresServer
) -> None:
    """On a busy machine a host may also lose its lease without a fault. So each step looks up the current
    owner.
    """
    with contextlib.ExitStack() as opened:
        nodes = opened.enter_context(WiredNodes(root, 1, clients=NAMES))
        nodes.start()
        nodes.wait_ready()
        opened.enter_context(nothing_left())  # The hosts' push processes end before the wires close.
        hosts = Hosts(root, nodes, postgres, lease_s=2.0)
        opened.callback(hosts.close)
        tls = nodes.certificate("publisher", "feed")
        feed = rt.Publisher(
            root / "feed", nodes.stream, publisher_id="feed", endpoints=nodes.endpoints, tls=tls
        )
        trial = Trial(hosts, nodes, opened.enter_context(feed))
        trial.publish()
        for name in NAMES:
            hosts.start(name)
        owner, standby = trial.settled()
        trial.wait_results()

        trial.publish()
        hosts.kill(owner)
        trial.publish()
        trial.wait_results()
        assert hosts.role(standby) == "owner"
        hosts.start(owner)

        faults: list[Callable[[str], object]] = [
            lambda name: hosts.signal(name, signal.SIGSTOP),
            nodes.cut,
            lambda name: hosts.to_server[name].cut(),
            lambda name: hosts.proxies[name].cut(b"; COMMIT", "after"),
        ]
        for happen in faults:
            owner, _ = trial.settled()
            ends = hosts.ends(owner)
            happen(owner)
            trial.publish()
            trial.wait_results()
            hosts.fix(owner)
            trial.wait(lambda: hosts.ends(owner) > ends, "the former owner to say so")  # noqa: B023
            trial.publish()
            trial.wait_results()

        owner, standby = trial.settled()
        trial.publish()
        assert hosts.stop(owner) == 0
        trial.wait_results()
        trial.wait(lambda: hosts.role(standby) == "owner", "the standby")
        assert hosts.stop(standby) == 0
        assert trial.results() == trial.expected

"""Host processes on real clusters that are killed, paused, added and stopped under load."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import rt
from rt.cli.streams.hosts import hosts as streams_command
from sequencer.localcluster.loopback import free_ports
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

pytestmark = pytest.mark.slow

KEYS = ("a", "b", "c", "d", "e")
CLUSTERS = ("east", "west")
WAIT_S = 240.0
PROGRAM = Path(__file__).parents[1] / "support" / "stream_host.py"


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with nothing_left():
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


class Hosts:
    """The host processes of a test, by name."""

    def __init__(self, root: Path, clusters: dict[str, LocalCluster]) -> None:
        self.out = root / "out"
        self.out.mkdir()
        self._root = root
        self._ports = iter(free_ports(8))
        self.ports: dict[str, int] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._clusters = {}
        for name, nodes in clusters.items():
            tls = nodes.certificate("subscriber", "hosts", lease_groups=["streams"])
            paths = [str(tls.ca), str(tls.cert), str(tls.key)]
            self._clusters[name] = {"endpoints": nodes.endpoints, "tls": paths}

    def start(self, name: str) -> None:
        self.ports[name] = next(self._ports)
        config = self._root / f"{name}.json"
        config.write_text(
            json.dumps(
                {
                    "host": name,
                    "out": str(self.out),
                    "copies": str(self._root / "copies"),
                    "clusters": self._clusters,
                    "port": self.ports[name],
                }
            )
        )
        with open(self._root / f"{name}.log", "wb") as log:
            arguments = [sys.executable, str(PROGRAM), str(config)]
            self._running[name] = subprocess.Popen(arguments, stdout=log, stderr=log)

    def end(self, name: str, number: signal.Signals) -> int:
        process = self._running.pop(name)
        process.send_signal(number)
        return process.wait(WAIT_S)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        process = self._running[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def owned(self, name: str) -> int:
        """Return the number of queues that the host reports as owned; 0 if it does not answer."""
        url = f"http://127.0.0.1:{self.ports[name]}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
            return sum(line.startswith("rt_streams_queue_owned{") and line.endswith(" 1") for line in lines)
        return 0

    def words(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._root.glob("h*.log")))


def lines(path: Path) -> list[tuple[int, str]]:
    """Return the complete lines. The last line may be incomplete: a host still writes it, or was killed
    meanwhile.
    """
    text = path.read_text() if path.exists() else ""
    return [(int(token), value) for token, value in map(str.split, text[: text.rfind("\n") + 1].splitlines())]


def test_events_are_processed_once_while_hosts_are_killed_paused_and_added_under_load(
    root: Path,
) -> None:
    with contextlib.ExitStack() as opened:
        clusters = {}
        for name in CLUSTERS:
            clusters[name] = opened.enter_context(LocalCluster(root / name[0], 1, stream=name))
            clusters[name].start()
        for nodes in clusters.values():
            nodes.wait_ready()
        hosts = Hosts(root, clusters)
        publishers = {
            name: opened.enter_context(
                rt.Publisher(
                    root / "feeds",
                    name,
                    publisher_id="feed",
                    endpoints=nodes.endpoints,
                    tls=nodes.certificate("publisher", "feed"),
                )
            )
            for name, nodes in clusters.items()
        }
        sent: dict[str, list[str]] = {}

        def publish(count: int) -> None:
            for name, publisher in publishers.items():
                for number in range(count):
                    key = f"{name}-{KEYS[number % len(KEYS)]}"
                    values = sent.setdefault(key, [])
                    values.append(f"{key}.{len(values)}")
                    publisher.publish(values[-1].encode(), topic=f"load/{key}")

        def has_all(prefix: str) -> bool:
            return all(
                {value for path in hosts.out.glob(f"{prefix}.{key}*") for _, value in lines(path)}
                == set(values)
                for key, values in sent.items()
            )

        hosts.start("h1")
        publish(500)
        until(lambda: has_all("keeping"), f"the first host\n{hosts.words()}")
        until(lambda: hosts.owned("h1") == 2, "both queues")
        hosts.start("h2")
        publish(500)
        until(lambda: hosts.owned("h2") == 1 and hosts.owned("h1") == 1, "the second host's share")
        publish(500)
        hosts.end("h1", signal.SIGKILL)
        publish(500)
        hosts.start("h3")
        until(lambda: hosts.owned("h2") == 1 and hosts.owned("h3") == 1, "the third host's share")
        publish(500)
        with hosts.paused("h3"):
            publish(500)
            until(lambda: hosts.owned("h2") == 2, "the queues of a host that is paused past its lease")
            until(lambda: has_all("keeping"), f"every event without the paused host\n{hosts.words()}")
        until(lambda: hosts.owned("h2") == 1 and hosts.owned("h3") == 1, "a share for the host that is back")
        publish(500)
        endpoints = [f"127.0.0.1:{hosts.ports[name]}" for name in ("h2", "h3")]

        def shows_both_owners() -> bool:
            told = CliRunner().invoke(streams_command, [*endpoints, "--json"])
            rows = [json.loads(line) for line in told.stdout.splitlines()]
            return told.exit_code == 0 and {row["owner"] for row in rows} == {"h2", "h3"}

        until(shows_both_owners, "the command to show both owners")
        assert hosts.end("h2", signal.SIGTERM) == 0
        publish(500)
        until(lambda: has_all("keeping") and has_all("plain"), f"every event\n{hosts.words()}")
        assert hosts.end("h3", signal.SIGTERM) == 0
        for key, values in sent.items():
            kept = dict(lines(hosts.out / f"keeping.{key}"))  # Each token once, in order.
            assert list(kept.values()) == values, key
            for path in hosts.out.glob(f"plain.{key}.*"):
                positions = list(dict(lines(path)))
                assert positions == sorted(positions), path.name

"""Two hosts of one query engine as processes, with faults. Shared by a test and a measurement."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from chaos.wired_nodes import WiredNodes
from chaos.wires import Wire
from cut_connections import CuttingProxy
from postgres_server import PostgresServer

import rt
from rt.bench.processes import ProcessTable

NAMES = ("a", "b")
PROGRAM = Path(__file__).with_name("moving_engine.py")
WAIT_S = 120.0


class Hosts:
    """Two machines. Each has a disk, wires to the nodes and to the server, and at most one process."""

    def __init__(self, root: Path, nodes: WiredNodes, postgres: PostgresServer, lease_s: float) -> None:
        self._root, self._nodes = root, nodes
        self.to_server: dict[str, Wire] = {}
        self.proxies: dict[str, CuttingProxy] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = itertools.count()
        self._logs: dict[str, Path] = {}
        tls = nodes.certificate("subscriber", "queries", lease_groups=["queries"])
        certificates = {"reading": tls, "writing": nodes.certificate("publisher", "sums", dedup_ids=["sums"])}
        for name in NAMES:
            wire = self.to_server[name] = nodes._wire((name, "server"), postgres.port)
            proxy = self.proxies[name] = CuttingProxy(wire.port)
            config = {
                "host": name,
                "directory": str(root / name),
                "stream": nodes.stream,
                "endpoints": nodes.endpoints_of(name, *nodes.names),
                "url": postgres.tcp_url(sslmode="disable").replace(f":{postgres.port}/", f":{proxy.port}/"),
                "schema": PostgresServer.schema(root),
                "timeout_s": 2,
                "times": {"lease_s": lease_s, "look_s": lease_s / 12},
                **{key: [str(each.ca), str(each.cert), str(each.key)] for key, each in certificates.items()},
            }
            (root / f"{name}.json").write_text(json.dumps(config))

    def start(self, name: str) -> None:
        self._logs[name] = self._root / f"{name}.{next(self._starts)}.log"
        with open(self._logs[name], "wb") as log:
            arguments = [sys.executable, str(PROGRAM), str(self._root / f"{name}.json")]
            self._processes[name] = subprocess.Popen(arguments, stdout=log, stderr=log)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process, and to its child processes that read and publish for it."""
        pid = self._processes[name].pid
        for each in (pid, *ProcessTable().children(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self._processes.pop(name).wait(WAIT_S)

    def stop(self, name: str) -> int:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(WAIT_S)

    def fix(self, name: str) -> None:
        """Continue the process, and restore its connections."""
        if name in self._processes:
            self.signal(name, signal.SIGCONT)
        self._nodes.heal(name)
        self.to_server[name].heal()

    def events(self, name: str) -> list[str]:
        """Return the engine events of the host's last process, such as "owner", "standby" or "fenced"."""
        return re.findall(r" engine_(\w+) ", self._logs[name].read_text())

    def role(self, name: str) -> str:
        """Return the last event; empty if there is no process."""
        events = self.events(name) if name in self._processes else []
        return events[-1] if events else ""

    def ends(self, name: str) -> int:
        """How often the host's engine has ended without a checkpoint."""
        return sum(event in {"fenced", "failed"} for event in self.events(name))

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for proxy in self.proxies.values():
            proxy.close()
        for wire in self.to_server.values():
            self._nodes._run(wire.close())

    def words(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self._root.glob("*.log"))
        )


class Trial:
    """Published numbers, and the sums that must be published for them."""

    def __init__(self, hosts: Hosts, nodes: WiredNodes, publisher: rt.Publisher) -> None:
        self.hosts, self._nodes, self._publisher = hosts, nodes, publisher
        self.expected: list[str] = []
        self._total = 0

    def publish(self, count: int = 40) -> None:
        for _ in range(count):
            number = len(self.expected) + 1
            self._publisher.publish(b"%d" % number, "in")
            self._total += number
            self.expected.append(f"{number} {self._total}")

    def results(self) -> list[str]:
        with rt.LogReader(self._nodes.merged_directory("n1"), topics=["out"]) as reader:
            return [each.value.decode() for each in reader]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.hosts.words()}"
            time.sleep(0.02)

    def wait_results(self) -> None:
        self.wait(lambda: len(self.results()) >= len(self.expected), "all results")
        assert self.results() == self.expected

    def settled(self) -> tuple[str, str]:
        """Wait until one host is the owner and the other the standby. Return their names in this order."""
        self.wait(lambda: sorted(map(self.hosts.role, NAMES)) == ["owner", "standby"], "roles")
        first, second = NAMES
        return (first, second) if self.hosts.role(first) == "owner" else (second, first)

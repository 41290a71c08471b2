"""A cluster of benchmark nodes: one process each, on loopback, with mutual TLS and real fsyncs."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from rt.bench.processes import cpu_s
from rt.errors import Timeout
from sequencer.localcluster.loopback import free_ports, make_certificates
from sequencer.localcluster.processes import Answer, Process

STREAM = "bench"
_SOUND_S_MAX = 60.0
_POLL_S = 0.01


class BenchCluster:
    """`count` running nodes with these settings of `RaftConfig`. Leaving it removes everything."""

    def __init__(self, directory: str | None, count: int, **config: Any) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.nodes: dict[str, Process] = {}
        self._config = config
        self._root = Path(tempfile.mkdtemp(prefix="rt-bench-", dir=directory))
        self._ports = dict(zip(self.names, free_ports(count), strict=True))

    def __enter__(self) -> Self:
        try:
            self._tls = make_certificates(self._root / "pki", STREAM, self.names)
            for name in self.names:
                self.start(name)
            self.settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for node in self.nodes.values():
                node.signal(signal.SIGKILL)
            for node in self.nodes.values():
                node.kill()
        finally:
            shutil.rmtree(self._root, ignore_errors=True)

    def start(self, name: str) -> None:
        config = self._config | {
            "name": name,
            "members": {name: f"127.0.0.1:{port}" for name, port in self._ports.items()},
            "directory": str(self._root / name),
            "stream": STREAM,
        }
        settings = {"config": config, "tls": self._tls[name], "port": self._ports[name]}
        self.nodes[name] = Process("sequencer.bench.node", settings, self._root / f"{name}.stderr")

    def kill(self, name: str) -> float:
        """Kill -9. Returns the time, by the monotonic clock that all processes share."""
        node = self.nodes.pop(name)
        node.signal(signal.SIGKILL)
        at = time.monotonic()
        node.kill()
        return at

    def pause(self, name: str) -> float:
        self.nodes[name].signal(signal.SIGSTOP)
        return time.monotonic()

    def resume(self, name: str) -> None:
        self.nodes[name].signal(signal.SIGCONT)

    def hand_over(self, name: str) -> float:
        """Transfer the leadership. Returns the time of the request."""
        at = time.monotonic()
        if not self.nodes[name].ask("hand_over", seconds=_SOUND_S_MAX / 2)["is_led_by_another"]:
            raise Timeout("leadership was not handed over", where=self._root / name)
        return at

    def status(self, name: str) -> Answer:
        return self.nodes[name].ask("status")

    def settle(self) -> tuple[str, list[str]]:
        """Wait until all running nodes are counted and have applied the same index.

        Returns the leader and the other nodes.
        """
        statuses = self.wait(_is_sound)
        leader = str(statuses[0]["leader"])
        return leader, [name for name in self.nodes if name != leader]

    def wait(self, is_met: Callable[[list[Answer]], bool]) -> list[Answer]:
        deadline = time.monotonic() + _SOUND_S_MAX
        while True:
            statuses = [self.status(name) for name in self.nodes]
            if is_met(statuses):
                return statuses
            if time.monotonic() > deadline:
                raise Timeout("the cluster of the benchmark did not settle", where=self._root, got=statuses)
            time.sleep(_POLL_S)

    def cpu_s(self, name: str) -> float:
        return cpu_s(self.nodes[name].pid)


def _is_sound(statuses: list[Answer]) -> bool:
    leaders = {status["leader"] for status in statuses}
    if len(leaders) != 1 or None in leaders or len({status["applied"] for status in statuses}) != 1:
        return False
    running = {status["name"] for status in statuses}
    leading = [status for status in statuses if status["role"] == "leader"]
    return len(leading) == 1 and all(
        member["is_counted"] and member["is_connected"]
        for member in leading[0]["members"]
        if member["name"] in running
    )

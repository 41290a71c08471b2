"""The cluster of a chaos run: node processes whose disks can lose power, and the wires between them."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from chaos.power_cut import Keep, cut_power
from chaos.wires import Wires
from sequencer.localcluster.loopback import free_ports, make_certificates
from sequencer.localcluster.processes import Answer, Process

STREAM: Final = "chaos"
_ANSWER_S_MAX: Final = 120.0
_SMALL: Final = {"snapshot_ms": 700, "keep_entries": 50, "keep_bytes": 100_000}
"""Small limits, so that a node needs a snapshot after it was away for seconds."""


class Cluster:
    """The nodes of one cluster, with their processes, disks and wires. Closing it kills all processes.

    `pause_s` is the average pause of a proposer between bursts. For `lies_about` see `UndoableDisk`.
    """

    def __init__(
        self, root: Path, count: int, *, seed: int, pause_s: float = 0.03, lies_about: Sequence[str] = ()
    ) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.root, self.seed, self._pause_s, self._lies_about = root, seed, pause_s, list(lies_about)
        self.lives = dict.fromkeys(self.names, 0)
        self.running: dict[str, Process] = {}
        self._stack = ExitStack()
        self._tls = make_certificates(root / "pki", STREAM, self.names)
        self._ports = dict(zip(self.names, free_ports(count), strict=True))
        for name in self.names:
            self.out(name).mkdir(parents=True)

    def __enter__(self) -> Self:
        self.wires = self._stack.enter_context(Wires(self._ports))
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.kill(list(self.running))
        finally:
            self._stack.close()

    def out(self, name: str) -> Path:
        """Return the directory in which the runs of a node record what they did."""
        return self.root / name

    def files(self, name: str) -> Path:
        """The node's own directory."""
        return self.root / name / "raft"

    def start(self, name: str) -> None:
        """Start the next run of a node that is down."""
        assert name not in self.running, name
        self.lives[name] += 1
        settings = {
            "name": name,
            "life": self.lives[name],
            "members": self.wires.members_as_seen_by(name),
            "port": self._ports[name],
            "directory": str(self.files(name)),
            "journal": str(self._journal(name)),
            "out": str(self.out(name)),
            "stream": STREAM,
            "tls": self._tls[name],
            "config": _SMALL,
            "seed": self.seed,
            "threads": 2,
            "window": 64,
            "pause_s": self._pause_s,
            "lies_about": self._lies_about,
        }
        self.running[name] = Process("chaos.node", settings, self.out(name) / "stderr")

    def kill(self, names: Sequence[str]) -> None:
        """Kill these nodes with SIGKILL, all at nearly the same time."""
        for name in names:
            self.running[name].signal(signal.SIGKILL)
        for name in names:
            self.running.pop(name).kill()

    def cut_power(self, names: Sequence[str], keep: Keep, seed: int) -> int:
        """Kill these nodes, and undo their changes that are not synced. Return the number of undone
        changes.
        """
        self.kill(names)
        return sum(
            cut_power(str(self.files(name)), str(self._journal(name)), keep, seed + number)
            for number, name in enumerate(names)
            if self._journal(name).exists()
        )

    def wipe(self, name: str) -> None:
        """Kill a node, and lose its disk."""
        self.kill([name])
        shutil.rmtree(self.files(name))
        shutil.rmtree(self._journal(name))

    def statuses(self) -> list[Answer]:
        """Return the status of every running node. Raise `rt.Timeout` or `ProcessEnded`."""
        for process in self.running.values():
            process.post("status")
        return [process.answer(_ANSWER_S_MAX) for process in self.running.values()]

    def check_alive(self) -> None:
        """Raise `ProcessEnded` if a process ended by itself."""
        for process in self.running.values():
            if process.status is not None:
                process.ask("status")

    def _journal(self, name: str) -> Path:
        return self.root / name / "journal"

"""The participants of a soak besides the nodes: publishers and subscribers, each with its processes.

Each process has a file of notes. Nothing else of it runs after its `Process` is killed or closed, except the
push process of a publisher, which continues as it would in production.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final, Literal

from chaos.soak_notes import Published, Received, Run, Skipped, read_published, read_received
from chaos.wired_nodes import WiredNodes
from rt.errors import RtError
from rt.log.scan.directory import merged_directory
from rt.sidecar.pull_settings import Retention
from sequencer.localcluster.clients import client_settings
from sequencer.localcluster.processes import Process

BEGIN_S: Final = 120.0
_MODULE: Final = "chaos.soak_traffic"
_tags = itertools.count(1)


class Part(ABC):
    """One publisher or subscriber. At most one of its processes runs at a time."""

    def __init__(self, nodes: WiredNodes, kind: Literal["publisher", "subscriber"], name: str) -> None:
        self.name = name
        self.process: Process | None = None
        self._nodes = nodes
        self._home = nodes.root / name
        self._home.mkdir()
        self._settings = client_settings(nodes, kind, name, self._home, kind=kind)

    @abstractmethod
    def start(self) -> None:
        """Start the next process."""

    def kill(self) -> None:
        """Kill the process with SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request to the running process, and return its answer."""
        assert self.process is not None, self.name
        return self.process.ask(do, timeout_s=BEGIN_S, **arguments)

    def _begin(self, notes: Path, **settings: Any) -> None:
        everything = {**self._settings, "notes": str(notes), **settings}
        self.process = Process(_MODULE, everything, self._nodes.root / f"{self.name}.log")


class SoakPublisher(Part):
    """The session of a publisher. Each later process continues the numbers of the session."""

    def __init__(self, nodes: WiredNodes, name: str, rate_hz: float) -> None:
        super().__init__(nodes, "publisher", name)
        self._rate_hz = rate_hz
        self._lives: list[tuple[int, Path]] = []

    def start(self) -> None:
        """Start the next process."""
        tag = next(_tags)
        self._lives.append((tag, self._home / f"notes.{tag}"))
        self._begin(self._lives[-1][1], tag=tag, rate_hz=self._rate_hz)

    def close(self, linger_s: float) -> None:
        """End the process in good order. The push process continues with messages that are not replicated
        yet.
        """
        self.ask("finish")
        self.ask("close", linger_s=linger_s)
        self.kill()

    @property
    def published(self) -> list[Published]:
        """The notes of each of its processes."""
        return [read_published(self.name, tag, _text(notes)) for tag, notes in self._lives]


class SoakSubscriber(Part):
    """A subscriber to all messages. With `is_named` it acknowledges positions, and resumes there."""

    def __init__(
        self, nodes: WiredNodes, name: str, *, is_named: bool = False, retention: Retention = "follow"
    ) -> None:
        super().__init__(nodes, "subscriber", name)
        self._is_named, self._retention = is_named, retention
        self._lives: list[tuple[int | None, Path]] = []

    @property
    def copy(self) -> Path:
        """Its copy of the merged log."""
        return Path(merged_directory(str(self._home), self._nodes.stream))

    def start(self) -> None:
        """Start the next process at the position that the previous one reached. The first starts at the first
        message.
        """
        wanted = None if self._is_named else self.reached
        self._lives.append((wanted, self._home / f"notes.{len(self._lives) + 1}"))
        self._begin(self._lives[-1][1], position=wanted, retention=self._retention, is_named=self._is_named)

    @property
    def is_trimmed_as_nodes(self) -> bool:
        """Whether its copy retains what the nodes retain."""
        return self._retention == "follow"

    @property
    def has_skipped(self) -> bool:
        """Whether messages were trimmed before it received them."""
        return any(isinstance(item, Skipped) for life in self.received for item in life.items)

    @property
    def reached(self) -> int:
        """One past the last message noted by any of its processes."""
        for life in reversed(self.received):
            for item in reversed(life.items):
                if isinstance(item, Run):
                    return item.end
                if isinstance(item, Skipped):
                    return item.resumed
        return 0

    @property
    def position(self) -> int:
        """The next position; 0 if the process does not answer."""
        try:
            return int(self.ask("received")["position"])
        except RtError:
            return 0

    def close(self) -> None:
        """End the process in good order."""
        self.ask("close")
        self.kill()

    @property
    def received(self) -> list[Received]:
        """The notes of each of its processes."""
        return [
            read_received(self.name, life, wanted, _text(notes))
            for life, (wanted, notes) in enumerate(self._lives, 1)
        ]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""

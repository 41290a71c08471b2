"""Who takes part in a soak beside the nodes: publishers and subscribers, each with the lives it has had.

A life is a process with a file of notes. Nothing of it outlives the `Process` that is killed or closed, but
for the push that a publisher's process has beside it, which is left to go on as it would be anywhere.
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
    """One publisher or subscriber: at most one of its lives runs."""

    def __init__(self, nodes: WiredNodes, kind: Literal["publisher", "subscriber"], name: str) -> None:
        self.name = name
        self.process: Process | None = None
        self._nodes = nodes
        self._home = nodes.root / name
        self._home.mkdir()
        self._settings = client_settings(nodes, kind, name, self._home, kind=kind)

    @abstractmethod
    def start(self) -> None:
        """Begin another life."""

    def kill(self) -> None:
        """Kill -9; nothing if it does not run."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the life that runs do something."""
        assert self.process is not None, self.name
        return self.process.ask(do, timeout_s=BEGIN_S, **arguments)

    def _begin(self, notes: Path, **settings: Any) -> None:
        everything = {**self._settings, "notes": str(notes), **settings}
        self.process = Process(_MODULE, everything, self._nodes.root / f"{self.name}.log")


class SoakPublisher(Part):
    """A publisher's session; a life of it that comes after another goes on with its numbers."""

    def __init__(self, nodes: WiredNodes, name: str, rate_hz: float) -> None:
        super().__init__(nodes, "publisher", name)
        self._rate_hz = rate_hz
        self._lives: list[tuple[int, Path]] = []

    def start(self) -> None:
        """Begin another life."""
        tag = next(_tags)
        self._lives.append((tag, self._home / f"notes.{tag}"))
        self._begin(self._lives[-1][1], tag=tag, rate_hz=self._rate_hz)

    def close(self, linger_s: float) -> None:
        """End the life in good order; what is not replicated is left to the push."""
        self.ask("finish")
        self.ask("close", linger_s=linger_s)
        self.kill()

    @property
    def published(self) -> list[Published]:
        """What each of its lives noted."""
        return [read_published(self.name, tag, _text(notes)) for tag, notes in self._lives]


class SoakSubscriber(Part):
    """A subscriber of all messages; with `is_named` it acknowledges, and resumes there."""

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
        """Begin another life, where the one before had come to; the first one at the first message."""
        wanted = None if self._is_named else self.reached
        self._lives.append((wanted, self._home / f"notes.{len(self._lives) + 1}"))
        self._begin(self._lives[-1][1], position=wanted, retention=self._retention, is_named=self._is_named)

    @property
    def is_trimmed_as_nodes(self) -> bool:
        """Whether its copy keeps what the nodes keep."""
        return self._retention == "follow"

    @property
    def has_skipped(self) -> bool:
        """Whether something was trimmed before it had it."""
        return any(isinstance(item, Skipped) for life in self.received for item in life.items)

    @property
    def reached(self) -> int:
        """One past the last message that was noted, over all lives."""
        for life in reversed(self.received):
            for item in reversed(life.items):
                if isinstance(item, Run):
                    return item.end
                if isinstance(item, Skipped):
                    return item.resumed
        return 0

    @property
    def position(self) -> int:
        """How far it is; 0 while it cannot say."""
        try:
            return int(self.ask("received")["position"])
        except RtError:
            return 0

    def close(self) -> None:
        """End the life in good order."""
        self.ask("close")
        self.kill()

    @property
    def received(self) -> list[Received]:
        """What each of its lives noted."""
        return [
            read_received(self.name, life, wanted, _text(notes))
            for life, (wanted, notes) in enumerate(self._lives, 1)
        ]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""

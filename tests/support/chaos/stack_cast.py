"""The clients of a chaos run of the whole stack: publishers, a subscriber, an operator."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import rt
from chaos.stack_publisher import value_of
from chaos.wired_nodes import WiredNodes
from rt.errors import RtError
from rt.events import Event, Reset
from rt.log.scan.directory import merged_directory
from rt.net.rest_client import ask, check
from sequencer.localcluster.clients import client_settings
from sequencer.localcluster.processes import Process, ProcessEnded

PROBLEMS_MAX: Final = 20
_ANSWER_S: Final = 60.0
_ASK_S: Final = 5.0


class StackPublisher:
    """A publisher that reaches only some nodes, through its own wires."""

    def __init__(self, nodes: WiredNodes, name: str, reached: Sequence[str], seed: int) -> None:
        self.name, self.reached = name, list(reached)
        self._nodes = nodes
        endpoints = nodes.endpoints_of(name, *reached)
        self._settings = client_settings(
            nodes, "publisher", name, nodes.root / name, endpoints=endpoints, seed=seed, pause_s=0.1
        )
        self._process: Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    def start(self) -> None:
        """Start the next process, which continues the numbers of the previous one."""
        (self._nodes.root / self.name).mkdir(exist_ok=True)
        log = self._nodes.root / f"{self.name}.log"
        self._process = Process("chaos.stack_publisher", self._settings, log)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def ask(self, do: str) -> dict[str, Any]:
        """Send a request to the process (see `stack_publisher`)."""
        assert self._process is not None, self.name
        return self._process.ask(do, timeout_s=_ANSWER_S)

    def check_alive(self) -> None:
        """Raise `ProcessEnded` if the process ended by itself."""
        process = self._process
        if process is not None and process.status is not None:
            raise ProcessEnded("a publisher ended by itself", where=self.name, got=process.last_words(500))


class LogCheck:
    """Checks that each message occurs once, in its publisher's order, and that positions are dense."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.end = 0
        """One past the last position."""
        self.ends: dict[str, int] = {}
        """By session: one past the last number."""
        self.problems: list[str] = []

    def take(self, messages: Iterable[rt.Message]) -> None:
        """Check the next messages."""
        for message in messages:
            session, number = message.session, message.number
            wanted = self.end, self.ends.get(session, 0)
            if (message.position, number) != wanted or message.value != value_of(number):
                self.problem(f"position {message.position} is {session} {number}: {wanted} must follow")
            self.end, self.ends[session] = message.position + 1, number + 1

    def problem(self, text: str) -> None:
        """Record a problem, up to `PROBLEMS_MAX` of them."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"{self.who}: {text}")


class StackSubscriber:
    """A subscriber in this process with its own wires. It reads whenever `read` is called."""

    def __init__(self, nodes: WiredNodes, name: str) -> None:
        self.name, self.reached = name, nodes.names
        self.check = LogCheck(name)
        self._nodes, self._root = nodes, nodes.root / name
        self._tls = nodes.certificate("subscriber", name)
        self._subscriber: rt.Subscriber | None = None

    @property
    def copy(self) -> Path:
        """Its copy of the merged log."""
        return Path(merged_directory(str(self._root), self._nodes.stream))

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not closed since."""
        return self._subscriber is not None

    def start(self) -> None:
        """Start the subscriber at the position up to which it has read."""
        self._subscriber = rt.Subscriber(
            self._root,
            self._nodes.stream,
            endpoints=self._nodes.endpoints_of(self.name, *self.reached),
            tls=self._tls,
            position=self.check.end,
            on_event=self._on_event,
            connect_timeout=None,
        )

    def close(self) -> None:
        """Close the subscriber, if it runs."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def read(self) -> None:
        """Read the messages that are available."""
        if self._subscriber is not None:
            self.check.take(self._subscriber.poll(10_000, 0))

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Reset):  # Nothing is trimmed, and a corrupt node affects no subscriber.
            self.check.problem(f"it was told of {event}")


class StackOperator:
    """The requests of an operator, sent directly to the nodes."""

    def __init__(self, nodes: WiredNodes) -> None:
        self._nodes = nodes
        self._tls = nodes.certificate("operator", "chaos")

    def post(self, target: str, **body: object) -> bool:
        """Send a request. Return whether a node accepted it."""
        endpoints = [f"127.0.0.1:{self._nodes.data_ports[name]}" for name in self._nodes.running]
        with contextlib.suppress(RtError):
            content = json.dumps(body).encode()
            check(asyncio.run(ask(endpoints, self._tls, "POST", target, content, timeout_s=_ASK_S)))
            return True
        return False

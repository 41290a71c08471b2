"""Nodes as separate processes, which answer requests on their standard input. Also the end of a run.

Invariant: no child outlives its parent, nor its `Process` after that was closed. A publisher's push process
outlives the publisher by design. So each process of a run carries a mark in its environment, and its children
inherit the mark. `nothing_left` finds all processes with the mark and kills them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from rt.child_process import ChildProcess, die_with_stdin, poll_timeout_ms, write_line
from rt.errors import RtError, Timeout

Answer: TypeAlias = dict[str, Any]
_POLL_S = 0.2

_VARIABLE: Final = "RT_RUN_MARK"
_PAUSE_S: Final = 0.01


class ProcessEnded(RtError):
    """The process ended unexpectedly."""


class Process(ChildProcess):
    """A child that runs `python -m module`. Its stderr is appended to a file."""

    def __init__(self, module: str, settings: Mapping[str, Any], stderr: Path) -> None:
        self.stderr = stderr
        command = [sys.executable, "-m", module, json.dumps(dict(settings))]
        with stderr.open("ab") as file:
            super().__init__(command, stderr=file)
        self._answers: deque[Answer] = deque()
        self._request_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended. After SIGSTOP, the process has stopped when this
        returns.
        """
        if self.status is None:
            super().signal(number)
            if number == signal.SIGSTOP:
                # The kernel resumes a stopped orphan and hangs it up (SIGHUP), but not an orphan that is
                # about to stop.
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def terminate(self, timeout_s: float) -> int:
        """Send SIGTERM and return the exit status. The process is killed if it does not end in time."""
        self.signal(signal.SIGTERM)
        self.wait(timeout_s)
        return self.kill()

    def ask(self, do: str, *, timeout_s: float = 30.0, **arguments: Any) -> Answer:
        """Send a request, and return its answer. Raises `rt.Timeout`, `ProcessEnded`."""
        self.post(do, **arguments)
        return self.answer(timeout_s)

    def post(self, do: str, **arguments: Any) -> None:
        """Send a request. `answer` returns its answer later."""
        self._request_id += 1
        self.send(json.dumps({"do": do, "ask": self._request_id, **arguments}).encode() + b"\n")

    def answer(self, timeout_s: float) -> Answer:
        """The answer to the last request. Earlier ones are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._answers:
                answer = self._answers.popleft()
                if answer.pop("ask") == self._request_id:
                    return answer
            if not self.is_heard:
                raise self._ended()
            poll = select.poll()
            self.register(poll)
            if not poll.poll(poll_timeout_ms(deadline - time.monotonic())):
                raise Timeout("no answer from a process", where=self.stderr)
            self._answers += map(json.loads, self.exchange())

    def _ended(self) -> ProcessEnded:
        words = f"status {self.wait(5)}: {self.last_words()}"
        return ProcessEnded("a process ended", where=self.stderr, got=words)

    def last_words(self, count: int = 2000) -> str:
        """The end of its stderr."""
        return self.stderr.read_bytes()[-count:].decode(errors="replace")


def serve(answer: Callable[[str, Answer], Answer]) -> None:
    """In a child: answer the parent's requests in order, until SIGTERM. The child ends with the parent.

    An error of `answer(do, arguments)` ends the process.
    """
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: requests.put(None))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    die_with_stdin(requests.put)
    while (line := _next(requests)) is not None:
        request = json.loads(line)
        do, number = request.pop("do"), request.pop("ask")
        write_line(json.dumps({"ask": number, **answer(do, request)}).encode() + b"\n")


def _next(requests: queue.SimpleQueue[bytes | None]) -> bytes | None:
    """The next request. A signal that arrives just before a wait is handled only after the wait, so each wait
    is short.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return requests.get(timeout=_POLL_S)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Kill all processes that were started inside and still run."""
    mark = secrets.token_hex(16)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        while found := processes_with(f"{_VARIABLE}={mark}"):
            # Stop all processes before one is killed, so that no supervisor sees and reports the death of its
            # child.
            for sent in (signal.SIGSTOP, signal.SIGKILL):
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sent)
            time.sleep(_PAUSE_S)


def processes_with(variable: str) -> list[int]:
    """The other processes that have `variable`, a name and a value, in their environment."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if variable.encode() in environment and pid != os.getpid():
                found.append(pid)
    return found

"""Nodes as processes of their own, which answer questions on their standard input.

Invariant: no child outlives its parent, nor its `Process` once that was closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from rt.errors import RtError, Timeout

Answer: TypeAlias = dict[str, Any]
_READ_BYTES = 65536
_POLL_S = 0.2


class ProcessEnded(RtError):
    """The process ended unexpectedly."""


class Process:
    """A child that runs `python -m module`. Its stderr is appended to a file."""

    def __init__(self, module: str, settings: Mapping[str, Any], stderr: Path) -> None:
        self.stderr = stderr
        with stderr.open("ab") as file:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(dict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                process_group=0,
            )
        self._read = b""
        self._request_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._child.poll()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended. After SIGSTOP it has stopped on return."""
        if self._child.poll() is None:
            self._child.send_signal(number)
            if number == signal.SIGSTOP:
                # The kernel wakes a stopped orphan and hangs it up, but not one that is about to stop.
                os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """Kill -9. It has ended on return."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def terminate(self, timeout_s: float) -> int:
        """SIGTERM; its exit status. It is killed if it does not end in time."""
        self.signal(signal.SIGTERM)
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            self.kill()

    def ask(self, do: str, *, timeout_s: float = 30.0, **arguments: Any) -> Answer:
        """Send a request, and return its answer. Raises `rt.Timeout`, `ProcessEnded`."""
        self.post(do, **arguments)
        return self.answer(timeout_s)

    def post(self, do: str, **arguments: Any) -> None:
        """Send a request. `answer` returns its answer later."""
        self._request_id += 1
        line = json.dumps({"do": do, "ask": self._request_id, **arguments}).encode() + b"\n"
        stdin = self._child.stdin
        assert stdin is not None
        try:
            stdin.write(line)
        except OSError as error:
            raise self._ended() from error

    def answer(self, timeout_s: float) -> Answer:
        """The answer to the last request. Earlier ones are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\n" not in self._read:
                self._fill(deadline)
            line, _, self._read = self._read.partition(b"\n")
            answer: Answer = json.loads(line)
            if answer.pop("ask") == self._request_id:
                return answer

    def _fill(self, deadline: float) -> None:
        stdout = self._child.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Timeout("no answer from a process", where=self.stderr)
        piece = stdout.read(_READ_BYTES)
        if not piece:
            raise self._ended()
        self._read += piece

    def _ended(self) -> ProcessEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(5)
        return ProcessEnded(
            "a process ended", where=self.stderr, got=f"status {self.exit_status}: {self.last_words()}"
        )

    def last_words(self, count: int = 2000) -> str:
        """The end of its stderr."""
        return self.stderr.read_bytes()[-count:].decode(errors="replace")


def serve(answer: Callable[[str, Answer], Answer]) -> None:
    """In a child: answer the parent's requests in order, until SIGTERM; dies with the parent.

    An error of `answer(do, arguments)` ends the process.
    """
    requests: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: requests.put(None))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    threading.Thread(target=_listen, args=[requests], name="stdin", daemon=True).start()
    while (request := _next(requests)) is not None:
        do, number = request.pop("do"), request.pop("ask")
        reply = {"ask": number, **answer(do, request)}
        os.write(1, json.dumps(reply).encode() + b"\n")


def _next(requests: queue.SimpleQueue[Answer | None]) -> Answer | None:
    """The next request. A signal just before a wait is handled only after it, so no wait is long."""
    while True:
        with contextlib.suppress(queue.Empty):
            return requests.get(timeout=_POLL_S)


def _listen(requests: queue.SimpleQueue[Answer | None]) -> None:
    """Does not use `sys.stdin`: its lock, held by a read, would fail the interpreter's shutdown."""
    read = b""
    while piece := os.read(0, _READ_BYTES):
        *lines, read = (read + piece).split(b"\n")
        for line in lines:
            requests.put(json.loads(line))
    os.kill(os.getpid(), signal.SIGKILL)  # The parent has ended.

"""One push process: its sessions and its requests.

For one thread; nothing here blocks. If the publishers' process ends, however that happens, the push process
continues until the rest is sent.

Invariants:
- The process has a request for each session until it reports the session as ended. If it dies, it is
  restarted after the pauses of `RestartBackoff`, with requests for all remaining sessions, also those already
  closed.
- It never ends while the other end of its stdin is open, so no request is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from rt.sidecar.push_protocol import (
    FinishRequested,
    LineBuffer,
    PushEnded,
    PushLine,
    PushRequested,
    decode_line,
    encode_line,
)
from rt.sidecar.restart_backoff import RestartBackoff, environment

logger = logging.getLogger("rt.client.publisher")

IDLE_SECONDS: Final = 5.0
"""How long an idle process is kept for the next session: starting one costs a second of a core."""
_READ_BYTES: Final = 64 * 1024
_COMMAND: Final = (sys.executable, "-m", "rt", "push", "--attached")


def choose(loads: Sequence[int], *, processes_max: int) -> int:
    """The process for a new session: an index into `loads` (sessions of each), or its length for a new one.

    The one with the fewest sessions; a new one if all have some and there are fewer than `processes_max`.
    """
    least = min(loads, default=1)
    if least > 0 and len(loads) < processes_max:
        return len(loads)
    return loads.index(least)


class PushProcess:
    """Serves sessions. Its process runs from the first one on. Call `step` after each wait."""

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        self._command = command
        self._sessions: dict[int, PushRequested] = {}
        self._finishing: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_fd = -1
        self._socket: socket.socket | None = None
        """The other end is the process's stdin and stdout. Unlike a pipe, its end raises no signal."""
        self._unsent = b""
        self._lines = LineBuffer()
        self._restarts = RestartBackoff()
        self._start_at = 0.0
        self._idle_at: float | None = None
        self._is_dismissed = False

    @property
    def load(self) -> int:
        """Number of sessions."""
        return len(self._sessions)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_dismissed(self) -> bool:
        """Whether it is about to end and accepts no more sessions."""
        return self._is_dismissed

    @property
    def is_over(self) -> bool:
        """Whether it has no work and does not run."""
        return self._process is None and not self._sessions

    @property
    def is_settled(self) -> bool:
        """Whether all requests were written to it."""
        return not self._unsent and (self._process is not None or not self._sessions)

    def serve(self, session: PushRequested) -> None:
        """Push a session. Must not be called after it was dismissed."""
        assert not self._is_dismissed
        self._sessions[session.serve] = session
        self._idle_at = None
        if self._process is not None:
            self._queue_line(session)

    def finish(self, number: int) -> None:
        """The publisher of a session has ended."""
        if number in self._sessions:
            self._finishing.add(number)
            if self._process is not None:
                self._queue_line(FinishRequested(number))

    def step(self, now: float) -> None:
        """Read reports, detect its end, start it if due, and write requests."""
        if self._process is not None:
            self._receive()
            self._detect_end(now)
        if self._process is None and self._sessions and now >= self._start_at:
            self._start(now)
        if self._process is not None and not self._sessions and not self._is_dismissed:
            self._dismiss_idle(now)
        self._send()

    def due_in(self, now: float) -> float | None:
        """Seconds until there is work without a wake-up; None if there is none."""
        if self._process is None:
            return max(0.0, self._start_at - now) if self._sessions else None
        return None if self._idle_at is None or self._is_dismissed else max(0.0, self._idle_at - now)

    def register(self, poll: select.poll) -> None:
        """Make `poll` return when there is work."""
        if self._pid_fd >= 0:
            poll.register(self._pid_fd, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def disown(self) -> None:
        """In a forked child: the process belongs to the parent, and must see the end of the parent only."""
        if self._process is not None:
            self._process.returncode = 0  # It is not a child of this process, so do not wait for it.
        self._process = None
        self._sessions.clear()
        self._release()

    def _start(self, now: float) -> None:
        self._restarts.record_start()
        self._lines = LineBuffer()
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env=environment("push"),
                    start_new_session=True,
                )
            self._socket.setblocking(False)
            self._pid_fd = os.pidfd_open(self._process.pid)
        except OSError as error:
            logger.warning("push_process_not_started reason=%s", error)
            self._record_failure(now)
            return
        for number, session in self._sessions.items():
            self._queue_line(session)
            if number in self._finishing:
                self._queue_line(FinishRequested(number))

    def _record_failure(self, now: float) -> None:
        """It could not be started or watched."""
        process, self._process = self._process, None
        self._release()
        if process is not None:
            process.kill()
            process.wait()
        self._start_at = now + self._restarts.record_end()

    def _queue_line(self, message: PushLine) -> None:
        self._unsent += encode_line(message)

    def _send(self) -> None:
        if self._socket is None or not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:  # It has ended, which is detected next.
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            for line in self._lines.take(data):
                match decode_line(line):
                    case PushEnded(number):
                        self._sessions.pop(number, None)
                        self._finishing.discard(number)

    def _detect_end(self, now: float) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return
        self._receive()  # Its last reports.
        if not self._is_dismissed:
            logger.warning("push_process_ended exit_status=%d sessions=%d", status, self.load)
        self._process = None
        self._release()
        self._start_at = now + self._restarts.record_end()

    def _dismiss_idle(self, now: float) -> None:
        if self._idle_at is None:
            self._idle_at = now + IDLE_SECONDS
        elif now >= self._idle_at:
            self._is_dismissed = True
            self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
        self._unsent = b""

    def _release(self) -> None:
        self._hang_up()
        fd, self._pid_fd = self._pid_fd, -1
        if fd >= 0:
            os.close(fd)

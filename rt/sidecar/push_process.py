"""One push process: its sessions and its requests.

For one thread; nothing here blocks. If the publishers' process ends for any reason, the push process
continues until the rest is sent.

Invariants:
- The process has a request for each session until it reports the session as ended. If it dies, it is
  restarted after the pauses of `RestartBackoff`, with requests for all remaining sessions, including closed
  sessions.
- It never ends while the other end of its stdin is open, so no request is lost.
"""

from __future__ import annotations

import logging
import select
import sys
from collections.abc import Callable, Sequence
from typing import Final

from rt.child_process import ChildProcess, RestartBackoff, child_environment
from rt.line_protocol import decode_line, encode_line
from rt.sidecar.protocol import FinishRequested, PushEnded, PushLine, PushReported, PushRequested

logger = logging.getLogger("rt.client.publisher")

IDLE_SECONDS: Final = 5.0
"""How long an idle process is kept for the next session: starting one costs a second of a core."""
_COMMAND: Final = (sys.executable, "-m", "rt", "push", "--attached", " " * 256)
"""The last argument is room for the names of the sessions, which the process writes there for `ps`."""


def choose(loads: Sequence[int], *, processes_max: int) -> int:
    """The process for a new session: an index into `loads` (sessions of each), or its length for a new one.

    Chooses the process with the fewest sessions. Chooses a new process if all processes have sessions and
    there are fewer than `processes_max`.
    """
    least = min(loads, default=1)
    if least > 0 and len(loads) < processes_max:
        return len(loads)
    return loads.index(least)


class PushProcess:
    """Serves sessions. Its process starts with the first session. Call `step` after each wait.

    `on_report` is called with each report of the process on the state of a push.
    """

    def __init__(self, on_report: Callable[[PushReported], None], command: Sequence[str] = _COMMAND) -> None:
        self._on_report = on_report
        self._command = command
        self._sessions: dict[int, PushRequested] = {}
        self._finishing: set[int] = set()
        self._process: ChildProcess | None = None
        self._restarts = RestartBackoff()
        self._start_at = 0.0
        self._idle_at: float | None = None
        self._is_dismissed = False

    @property
    def load(self) -> int:
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
        return not self._sessions if self._process is None else self._process.is_sent

    def serve(self, session: PushRequested) -> None:
        """Push a session. Must not be called after it was dismissed."""
        assert not self._is_dismissed
        self._sessions[session.number] = session
        self._idle_at = None
        self._send(session)

    def finish(self, number: int) -> None:
        """The publisher of a session has ended."""
        if number in self._sessions:
            self._finishing.add(number)
            self._send(FinishRequested(number))

    def step(self, now: float) -> None:
        """Read reports, write requests, detect its end, and start it if due."""
        if self._process is not None:
            self._exchange(self._process, now)
        if self._process is None and self._sessions and now >= self._start_at:
            self._start(now)
        if self._process is not None and not self._sessions and not self._is_dismissed:
            self._dismiss_idle(self._process, now)

    def due_in(self, now: float) -> float | None:
        """Seconds until there is work without a wake-up; None if there is none."""
        if self._process is None:
            return max(0.0, self._start_at - now) if self._sessions else None
        return None if self._idle_at is None or self._is_dismissed else max(0.0, self._idle_at - now)

    def register(self, poll: select.poll) -> None:
        """Make `poll` return when there is work."""
        if self._process is not None:
            self._process.register(poll)

    def _start(self, now: float) -> None:
        self._restarts.record_start(now)
        try:
            self._process = ChildProcess(
                self._command, is_logged=True, is_session=True, env=child_environment("push")
            )
        except OSError as error:
            logger.warning("push_process_not_started reason=%s", error)
            self._start_at = now + self._restarts.record_end(now)
            return
        for number, session in self._sessions.items():
            self._send(session)
            if number in self._finishing:
                self._send(FinishRequested(number))

    def _send(self, message: PushLine) -> None:
        if self._process is not None:
            self._process.send(encode_line(message))

    def _exchange(self, process: ChildProcess, now: float) -> None:
        status = process.status  # Read first: if it is set, the lines below are the last lines.
        for line in process.exchange():
            match decode_line(line, PushLine):
                case PushEnded(number):
                    self._sessions.pop(number, None)
                    self._finishing.discard(number)
                case PushReported() as report:
                    self._on_report(report)
        if status is not None:
            if not self._is_dismissed:
                logger.warning("push_process_ended exit_status=%d sessions=%d", status, self.load)
            process.kill()
            self._process = None
            self._start_at = now + self._restarts.record_end(now)

    def _dismiss_idle(self, process: ChildProcess, now: float) -> None:
        if self._idle_at is None:
            self._idle_at = now + IDLE_SECONDS
        elif now >= self._idle_at:
            self._is_dismissed = True
            process.hang_up()

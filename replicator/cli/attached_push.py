"""`rt push --attached`: push the sessions that the parent process requests on stdin.

Invariants:
- The process ends when stdin has ended and everything is replicated, no matter why stdin was closed.
- Log records about a session go to `push.log` in its directory. Until stdin ends, all records also go to the
  parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

from replicator.push.client import PushClient
from replicator.push.control import listen as listen_for_control
from replicator.push.control import show_in_ps
from replicator.push.problem_log import ProblemLog, PushReport
from replicator.push.sidecar import SERVED, PushSidecar
from replicator.send.directory_watch import WatchHub
from rt.child_process import ForwardedLog, write_line
from rt.cli import logging_setup
from rt.cli.signals import listen_in_loop, run_until_signal
from rt.line_protocol import decode_line, encode_line
from rt.net.tls import TLS
from rt.sidecar.protocol import (
    PUSH_LOG,
    FinishRequested,
    PushEnded,
    PushLine,
    PushReported,
    PushRequested,
)

logger = logging.getLogger("replicator")

LOG_BYTES_MAX: Final = 2**20
"""A log file that has this size is renamed to `push.log.1`, and replaces the earlier file of that name."""
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_STDERR: Final = 2


async def push_attached(log_format: str = "text") -> None:
    """Push until it is done; `Interrupted` by a signal."""
    hub, log, forwarded = WatchHub(), SessionLogHandler(), ForwardedLog()
    log.setFormatter(logging_setup.formatter(log_format))
    logging.getLogger().handlers[:] = [log, forwarded]

    def make(
        asked: PushRequested, on_report: Callable[[PushReport], None], problems: ProblemLog
    ) -> PushClient:
        return PushClient(
            asked.directory,
            asked.stream,
            asked.endpoints,
            TLS(asked.ca, asked.cert, asked.key),
            waits=True,
            on_report=on_report,
            problems=problems,
            hub=hub,
        )

    def report() -> None:
        """Write reports to the parent. It runs in a thread, because the parent may read slowly."""
        with contextlib.suppress(OSError):  # The parent has ended.
            while True:
                write_line(encode_line(reports.get()))
        while True:
            reports.get()  # Otherwise reports would pile up while a node is unreachable.

    def handle_line(line: bytes) -> None:
        match decode_line(line, PushLine):
            case PushRequested() | FinishRequested() as asked:
                pushes.handle(asked)
            case _:
                logger.warning("request_malformed bytes=%d", len(line))

    def on_parent_ended() -> None:
        logging.getLogger().removeHandler(forwarded)
        log.redirect_stderr(pushes.directories)
        pushes.finish()

    reports: queue.SimpleQueue[PushEnded | PushReported] = queue.SimpleQueue()
    threading.Thread(target=report, name="reports", daemon=True).start()
    pushes = PushSidecar(make, reports.put)
    pushes.on_change = lambda: show_in_ps(pushes.summaries())
    control = await listen_for_control(pushes)
    try:
        await run_until_signal(pushes.run(), listen=lambda _: listen_in_loop(handle_line, on_parent_ended))
    finally:
        if control is not None:
            control.close()


class SessionLogHandler(logging.Handler):
    """Appends each record to `push.log` of the session whose task logs it."""

    def __init__(self) -> None:
        super().__init__()
        self._fallback = ""
        """The directory for stderr and for records that belong to no session; empty if there is none."""

    def redirect_stderr(self, directories: list[str]) -> None:
        """Redirect stderr of this process, and records that belong to no session, to `push.log` in the first
        directory. Call it when the parent has ended, with the directories that the parent leaves.
        """
        self._fallback = directories[0] if directories else ""
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        with contextlib.suppress(OSError):
            if self._fallback:
                os.close(self._open(self._fallback))

    def emit(self, record: logging.LogRecord) -> None:
        directory = SERVED.get() or self._fallback
        if directory:
            with contextlib.suppress(OSError):  # The disk may be full, or the directory removed.
                fd = self._open(directory)
                try:
                    os.write(fd, (self.format(record) + "\n").encode(errors="backslashreplace"))
                finally:
                    os.close(fd)

    def _open(self, directory: str) -> int:
        """Open the log of a session; start an empty file if the log is too long. If stderr was redirected to
        this log, it goes to the opened file from now on.
        """
        path = os.path.join(directory, PUSH_LOG)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size >= LOG_BYTES_MAX:
                os.replace(path, f"{path}.1")
        fd = os.open(path, _APPEND, 0o600)
        if directory == self._fallback:
            os.dup2(fd, _STDERR)
        return fd

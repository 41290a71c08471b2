"""A process and its child: how the child starts, exchanges lines, logs, ends, and is started again.

Invariants:
- The stdin of a child is its lifeline: it ends when the parent closes it, or when the parent ends for any
  reason. A fork of the parent does not keep it.
- Neither process waits for the other, unless a method says so.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from rt.line_protocol import LineBuffer, decode_line, encode_line

RESTART_SECONDS_MAX: Final = 5.0
_READ_BYTES: Final = 256 * 1024
_LOG_READS_MAX: Final = 1000
"""The most log lines that are handled before other work has its turn. The socket holds fewer."""
_LOG_CHARACTERS_MAX: Final = 8000
"""The most characters of one record: at 12 bytes each in JSON, they fit into one read."""
_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2

logger = logging.getLogger("rt.child_process")


class LogLine(Struct, frozen=True, tag="log"):
    """A log record of a child, on its stderr."""

    logger: str
    level: int
    created_s: float
    text: str


# The parent's side


class RestartBackoff:
    """Pauses between a child's end and its next start: each twice as long, until a child ran for `calm_s`.

    Pure.
    """

    def __init__(
        self, pause_s_min: float = 0.1, pause_s_max: float = RESTART_SECONDS_MAX, calm_s: float = 10.0
    ) -> None:
        self._pause_s_min, self._pause_s_max, self._calm_s = pause_s_min, pause_s_max, calm_s
        self._pause_s = pause_s_min
        self._started_s = 0.0

    def record_start(self, now_s: float) -> None:
        self._started_s = now_s

    def record_end(self, now_s: float) -> float:
        """The child has ended. Returns the seconds until its next start."""
        if now_s - self._started_s >= self._calm_s:
            self._pause_s = self._pause_s_min
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._pause_s_max)
        return pause_s


class ChildProcess:
    """A child that leads a process group, started with `options` of `subprocess.Popen`. For one thread.

    Lines go to its stdin and come from its stdout, unless the options set another stdin or stdout. With
    `is_logged`, its stderr goes to the `logging` of this process: see `ForwardedLog`. With `is_session` it
    may outlive the terminal. Without `is_session`, the kernel wakes it with SIGHUP if it is stopped when this
    process ends. Raises `OSError` if it cannot be started or watched.
    """

    def __init__(
        self, command: Sequence[str], *, is_logged: bool = False, is_session: bool = False, **options: Any
    ) -> None:
        self.last_line = ""
        """The last line on stderr that was no log record."""
        self._unsent = b""
        self._lines, self._log_lines = LineBuffer(), LineBuffer()
        self._log: socket.socket | None = None
        with no_fork, contextlib.ExitStack() as failed, contextlib.ExitStack() as theirs:
            # Unlike a pipe, a socket whose other end is closed raises no signal.
            own, stdin = socket.socketpair()
            self._socket: socket.socket | None = failed.enter_context(own)
            theirs.enter_context(stdin)
            own.setblocking(False)
            if is_logged:
                # A write arrives whole or fails, so that a slow reader never gets half a line.
                self._log, log = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end in (failed.enter_context(self._log), theirs.enter_context(log)):
                    end.setblocking(False)
                options |= {"stderr": log}
            group = {"start_new_session": True} if is_session else {"process_group": 0}
            options = {"stdin": stdin, "stdout": stdin} | group | options
            self._process = subprocess.Popen(command, **options)
            failed.callback(self._process.wait)
            failed.callback(self._process.kill)
            self._pid_fd = os.pidfd_open(self._process.pid)
            failed.pop_all()
            _children.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def is_heard(self) -> bool:
        """Whether its stdout may still bring lines."""
        return self._socket is not None

    @property
    def is_sent(self) -> bool:
        """Whether all lines were written to it."""
        return not self._unsent

    def send(self, line: bytes) -> None:
        """Write a line to its stdin; `exchange` sends the rest. The line is lost if the child has ended."""
        if self._socket is not None:
            self._unsent += line
            self._send()

    def exchange(self) -> list[bytes]:
        """Send what is left, log what it has logged, and return the lines that it has written.

        Hangs up after its last line.
        """
        has_ended = self.status is not None
        self._send()
        self._pass_log_on()
        lines: list[bytes] = []
        while self._socket is not None and (data := _received(self._socket)) is not None:
            lines += self._lines.take(data)
            if not data:
                self.hang_up()
        if has_ended:
            self.hang_up()
        return lines

    def register(self, poll: select.poll) -> None:
        """Make `poll` return when `exchange` has work, or it has ended."""
        poll.register(self._pid_fd, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if self._log is not None:
            poll.register(self._log, select.POLLIN)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Wait until it has ended. Return its exit status; None if it still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status

    def hang_up(self) -> None:
        """End its stdin, and stop listening."""
        if self._socket is not None:
            with no_fork:
                self._socket.close()
            self._socket = None
        self._unsent = b""

    def end(self, seconds: float) -> int:
        """End its stdin and wait for its end; kill it after `seconds`. Returns its exit status."""
        self.hang_up()
        self.wait(seconds)
        return self.kill()

    def kill(self) -> int:
        """Kill -9 it and its process group, unless it has ended, and release it. Returns its exit status."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        self._pass_log_on()
        self._release()
        return status

    def disown(self) -> None:
        """Release it in a forked child: it belongs to the parent, and must detect only the end of the
        parent.
        """
        self._process.returncode = 0  # It is not a child of this process, so do not wait for it.
        self._release()

    def _release(self) -> None:
        self.hang_up()
        self._close_log()
        fd, self._pid_fd = self._pid_fd, -1
        if fd >= 0:
            os.close(fd)

    def _send(self) -> None:
        if self._socket is None or not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:  # The child has ended, which is detected next.
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]

    def _pass_log_on(self) -> None:
        for _ in range(_LOG_READS_MAX):
            if self._log is None or (data := _received(self._log)) is None:
                return
            for line in self._log_lines.take(data or b"\n"):
                self._pass_on(line)
            if not data:
                self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _pass_on(self, line: bytes) -> None:
        match decode_line(line, LogLine):
            case LogLine(name, level, created_s, text):
                target = logging.getLogger(name)
                if target.isEnabledFor(level):
                    fields = {"levelno": level, "levelname": logging.getLevelName(level), "process": self.pid}
                    when = {"created": created_s, "msecs": created_s % 1 * 1000}
                    target.handle(logging.makeLogRecord({"name": name, "msg": text, **fields, **when}))
            case _ if line:
                self.last_line = line.decode(errors="backslashreplace")
                logger.warning("child_stderr pid=%d line=%r", self.pid, self.last_line)


no_fork: Final = threading.RLock()
"""A fork waits for this lock. A forked child must not keep some objects, such as a lifeline or a locked file.
Hold the lock from the creation of such an object until the fork handlers can find it. Hold it only for a
short time, and take no other lock meanwhile.
"""
_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _disown_all() -> None:
    try:
        for child in list(_children):
            child.disown()
        _children.clear()
    finally:
        no_fork.release()


os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_disown_all)


def _received(end: socket.socket) -> bytes | None:
    """The received bytes; None if there are none. Empty at the end of the stream."""
    try:
        return end.recv(_READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def child_environment(command: str) -> dict[str, str]:
    """This process's environment, without options that are meant for the user's own `rt <command>`."""
    prefix = f"RT_{command.upper()}_"
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


def poll_timeout_ms(seconds: float | None) -> int | None:
    """The timeout for `poll`, rounded up, so that the time has passed when `poll` returns."""
    return None if seconds is None else max(0, int(seconds * 1000 + 0.999))


# The child's side


class ForwardedLog(logging.Handler):
    """Sends the records of a child to the `logging` of its parent. Thread-safe.

    Never blocks. While the parent does not read, records are dropped and counted. Long ones are cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        # A path that is not Unicode would fail the parent's handlers.
        text = self.format(record)[:_LOG_CHARACTERS_MAX].encode(errors="backslashreplace").decode()
        try:
            if self._dropped:
                lost = f"log_records_dropped count={self._dropped}"
                os.write(_STDERR, encode_line(LogLine(logger.name, logging.WARNING, time.time(), lost)))
                self._dropped = 0
            os.write(_STDERR, encode_line(LogLine(record.name, record.levelno, record.created, text)))
        except OSError:
            self._dropped += 1


def stdin_lines() -> Iterator[bytes]:
    """The lines of stdin until its end; waits for each.

    Does not use `sys.stdin`: its lock, held by a read, would fail the interpreter's shutdown.
    """
    lines = LineBuffer()
    with contextlib.suppress(OSError):
        while data := os.read(_STDIN, _READ_BYTES):
            yield from lines.take(data)


def write_line(line: bytes) -> None:
    """Write a line to the parent. Waits while it does not read; `OSError` if it has ended."""
    while line:
        line = line[os.write(_STDOUT, line) :]


def listen(on_line: Callable[[bytes], object], on_end: Callable[[], object]) -> None:
    """Start a thread that calls `on_line` with each line of stdin, and `on_end` at its end."""

    def read() -> None:
        for line in stdin_lines():
            on_line(line)
        on_end()

    threading.Thread(target=read, name="stdin", daemon=True).start()


def die_with_stdin(on_line: Callable[[bytes], object] = lambda _: None) -> None:
    """Kill this process when stdin ends: its parent has ended. `on_line` is called in another thread."""
    listen(on_line, lambda: os.kill(os.getpid(), signal.SIGKILL))


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage inside: imports create some 60,000 objects that stay, and hardly any garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_what_is_loaded() -> None:
    """Exclude all existing objects from collections.

    A full collection, which stops all threads, then takes a few ms instead of some 70.
    """
    gc.freeze()

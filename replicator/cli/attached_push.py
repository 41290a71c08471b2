"""What `rt push --attached` is: it pushes what the process asks for that holds the other end of its stdin.

Laws. It ends when that end is closed, however that comes about, and all is replicated. What it has to say
until then goes to that process's stderr; from then on to `push.log` beside each session's log, for whoever
reads that stderr would wait for its end as long as this process drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sys
from typing import Final

from replicator.attached_pushes import SERVED, AttachedPushes
from replicator.cli.common import on_signals
from replicator.push_client import PushClient
from replicator.watch_hub import WatchHub
from rt.cli.signals import Interrupted
from rt.net.tls import TLS
from rt.push_requests import Ended, Finish, Lines, Serve, decode_line, encode_line

logger = logging.getLogger("replicator")

_LEFT_LOG: Final = "push.log"
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2
_READ_BYTES: Final = 64 * 1024


async def push_attached() -> None:
    """Push until it is done; `Interrupted` by a signal."""
    hub = WatchHub()

    def make(asked: Serve) -> PushClient:
        tls = TLS(asked.ca, asked.cert, asked.key)
        return PushClient(asked.directory, asked.stream, asked.endpoints, tls, waits=True, hub=hub)

    os.set_blocking(_STDOUT, False)
    pushes = AttachedPushes(make, _Reports().say)
    running = asyncio.ensure_future(pushes.run())
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        running.cancel()

    on_signals(stop)
    _listen(pushes)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise Interrupted(stopped[0]) from None


class _Reports:
    """Says on stdout what has ended; whoever reads that may be slow, or gone."""

    def __init__(self) -> None:
        self._unsaid = b""

    def say(self, number: int) -> None:
        self._unsaid += encode_line(Ended(number))
        self._write()

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._unsaid = self._unsaid[os.write(_STDOUT, self._unsaid) :]
        except BlockingIOError:
            loop.add_writer(_STDOUT, self._write)
            return
        except OSError:
            self._unsaid = b""
        loop.remove_writer(_STDOUT)
        if self._unsaid:
            loop.call_soon(self._write)


def _listen(pushes: AttachedPushes) -> None:
    """Have `pushes` do what is said on stdin, whatever that is; at its end, have it finish."""
    loop, lines = asyncio.get_running_loop(), Lines()

    def hear() -> bool:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # The other end is gone, or there never was one.
            data = b""
        for line in lines.take(data):
            match decode_line(line):
                case Serve() | Finish() as asked:
                    pushes.take(asked)
                case _:
                    logger.warning("request_not_understood bytes=%d", len(line))
        return bool(data)

    def heard() -> None:
        if not hear():
            loop.remove_reader(_STDIN)
            _leave(pushes)

    try:
        loop.add_reader(_STDIN, heard)
    except OSError:  # A file, or nothing at all: it can be read to its end at once.
        while hear():
            pass
        _leave(pushes)


def _leave(pushes: AttachedPushes) -> None:
    """Nobody holds the other end any more."""
    directories = pushes.directories
    for directory in directories:
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(directory, _LEFT_LOG), _APPEND | os.O_TRUNC, 0o600))
    fd = _open_log(directories[0] if directories else "")
    os.dup2(fd, _STDERR)
    os.close(fd)
    sys.stderr = _LeftLogs()
    pushes.finish()


def _open_log(directory: str) -> int:
    if directory:
        with contextlib.suppress(OSError):
            return os.open(os.path.join(directory, _LEFT_LOG), _APPEND, 0o600)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class _LeftLogs(io.TextIOBase):
    """Stderr that writes to the log of the session that speaks."""

    def write(self, text: str) -> int:
        directory = SERVED.get()
        fd = _open_log(directory) if directory else os.dup(_STDERR)
        try:
            os.write(fd, text.encode(errors="backslashreplace"))
        finally:
            os.close(fd)
        return len(text)

    def fileno(self) -> int:
        return _STDERR

"""`rt push --attached`: push what the parent process, at the other end of stdin, asks for.

Invariants:
- The process ends when stdin has ended and all is replicated, whatever closed stdin.
- Until stdin ends, log records go to the parent's stderr. After that they go to `push.log` beside the log of
  each session, because a reader of that stderr would wait until this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sys
from typing import Final

from replicator.push.client import PushClient
from replicator.push.sidecar import SERVED, PushSidecar
from replicator.send.directory_watch import WatchHub
from rt.cli.signals import run_until_signal
from rt.net.tls import TLS
from rt.sidecar.push_protocol import (
    FinishRequested,
    LineBuffer,
    PushEnded,
    PushRequested,
    decode_line,
    encode_line,
)

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

    def make(asked: PushRequested) -> PushClient:
        tls = TLS(asked.ca, asked.cert, asked.key)
        return PushClient(asked.directory, asked.stream, asked.endpoints, tls, waits=True, hub=hub)

    os.set_blocking(_STDOUT, False)
    pushes = PushSidecar(make, _Reports().say)
    await run_until_signal(pushes.run(), listen=lambda _: _listen(pushes))


class _Reports:
    """Reports on stdout which pushes have ended. The reader may be slow, or may have ended."""

    def __init__(self) -> None:
        self._unsaid = b""

    def say(self, number: int) -> None:
        self._unsaid += encode_line(PushEnded(number))
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


def _listen(pushes: PushSidecar) -> None:
    """Pass each request on stdin to `pushes`, and finish when stdin ends."""
    loop, lines = asyncio.get_running_loop(), LineBuffer()

    def hear() -> bool:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # The parent has closed its end.
            data = b""
        for line in lines.take(data):
            match decode_line(line):
                case PushRequested() | FinishRequested() as asked:
                    pushes.handle(asked)
                case _:
                    logger.warning("request_malformed bytes=%d", len(line))
        return bool(data)

    def heard() -> None:
        if not hear():
            loop.remove_reader(_STDIN)
            _leave(pushes)

    try:
        loop.add_reader(_STDIN, heard)
    except OSError:  # Stdin is a file or closed: it can be read to its end at once.
        while hear():
            pass
        _leave(pushes)


def _leave(pushes: PushSidecar) -> None:
    """The parent has closed stdin: log to files, and finish."""
    directories = pushes.directories
    for directory in directories:
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(directory, _LEFT_LOG), _APPEND | os.O_TRUNC, 0o600))
    fd = _open_log(directories[0] if directories else "")
    os.dup2(fd, _STDERR)
    os.close(fd)
    sys.stderr = _AdoptedLogs()
    pushes.finish()


def _open_log(directory: str) -> int:
    if directory:
        with contextlib.suppress(OSError):
            return os.open(os.path.join(directory, _LEFT_LOG), _APPEND, 0o600)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class _AdoptedLogs(io.TextIOBase):
    """A stderr that writes to `push.log` of the session whose task writes."""

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

"""The health port in the supervisor: it answers while the data process, which has inherited the port, does
not.

Invariants:
- Nothing here blocks. Connections are limited in number and age, requests in size.
- A connection gets one answer and is closed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Final

from sequencer.raft.transport.listener import bind_socket

CONNECTIONS_MAX: Final = 32
REQUEST_S: Final = 5.0
REQUEST_BYTES_MAX: Final = 8192
FREE_S: Final = 1.0
"""How long the processes of a node that was killed may still hold the port."""
_BACKLOG: Final = 128
_LOOK_S: Final = 0.05

logger = logging.getLogger("sequencer.node.health_port")


class HealthPort:
    """Answers connections of `listening`. `answer` makes the answer from a request's line and headers."""

    def __init__(self, listening: socket.socket, answer: Callable[[bytes], bytes]) -> None:
        self._listening, self._answer = listening, answer
        self._requests: dict[socket.socket, tuple[float, bytes]] = {}
        """By connection, oldest first: when it was accepted, and what was read."""
        self._accepts_at_s = 0.0
        """No connection is accepted before this time. It is set when the process ran out of files."""

    @property
    def fd(self) -> int:
        return self._listening.fileno()

    def register(self, poll: select.poll, now_s: float, *, is_needed: bool) -> None:
        """Make `poll` return when `exchange` has work."""
        if is_needed and now_s >= self._accepts_at_s:
            poll.register(self._listening, select.POLLIN)
        for connection in self._requests:
            poll.register(connection, select.POLLIN)

    def exchange(self, now_s: float, *, is_needed: bool) -> None:
        """Accept, read and answer. Unless `is_needed`, nothing is accepted, because the data process accepts
        connections.
        """
        if is_needed and now_s >= self._accepts_at_s:
            self._accept(now_s)
        for connection, (accepted_s, read) in list(self._requests.items()):
            self._serve(connection, accepted_s, read, now_s)

    def close(self) -> None:
        for connection in list(self._requests):
            self._drop(connection)
        self._listening.close()

    def _accept(self, now_s: float) -> None:
        for _ in range(CONNECTIONS_MAX):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                logger.error("health_accept_failed error=%r", error.strerror or str(error))
                self._accepts_at_s = now_s + FREE_S
                return
            connection.setblocking(False)
            if len(self._requests) >= CONNECTIONS_MAX:
                self._drop(next(iter(self._requests)))
            self._requests[connection] = now_s, b""

    def _serve(self, connection: socket.socket, accepted_s: float, read: bytes, now_s: float) -> None:
        try:
            data = connection.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            if now_s - accepted_s > REQUEST_S:
                self._drop(connection)
            return
        except OSError:
            data = b""
        read += data
        if not data or len(read) > REQUEST_BYTES_MAX:
            self._drop(connection)
        elif b"\r\n\r\n" in read:
            with contextlib.suppress(OSError):
                # The answer fits into the buffer of a new connection.
                connection.send(self._answer(read), socket.MSG_NOSIGNAL)
                connection.shutdown(socket.SHUT_WR)
            self._drop(connection)
        else:
            self._requests[connection] = accepted_s, read

    def _drop(self, connection: socket.socket) -> None:
        del self._requests[connection]
        connection.close()


def open_health_port(listen: str, port: int, *, seconds_max: float = FREE_S) -> socket.socket | None:
    """A listening socket; None if `port` is 0 or cannot be opened. Then the data process tries to open it."""
    deadline = time.monotonic() + seconds_max
    while port:
        try:
            return _listening(listen, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_S)
    return None


def _listening(listen: str, port: int) -> socket.socket:
    listening = bind_socket((listen, port))
    try:
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening

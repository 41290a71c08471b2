"""The listening socket of a Raft node."""

from __future__ import annotations

import errno
import logging
import math
import select
import socket
from collections.abc import Iterator
from typing import Any, Final

_BACKLOG: Final = 64
_PAUSE_S: Final = 1.0
"""Pause of accepting after the process ran out of files. Without it the listener would always be ready."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger("sequencer.raft")


class RaftListener:
    """Accepts connections. The constructor binds; `start` listens, and makes `epoll` report connections."""

    due_s = math.inf
    """When to call `resume`, by the caller's clock."""

    _epoll: select.epoll

    def __init__(self, listen: tuple[str, int]) -> None:
        self._sock = bind_socket(listen)
        self.port: int = self._sock.getsockname()[1]

    def start(self, epoll: select.epoll) -> None:
        self._sock.listen(_BACKLOG)
        self._epoll = epoll
        epoll.register(self._sock, select.EPOLLIN)

    def accept(self, now_s: float) -> Iterator[tuple[socket.socket, tuple[Any, ...]]]:
        """The connections that wait, at most as many as the backlog holds."""
        for _ in range(_BACKLOG):
            try:
                accepted = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    logger.error("accept_failed error=%r pause_s=%s", str(error), _PAUSE_S)
                    self._epoll.unregister(self._sock)
                    self.due_s = now_s + _PAUSE_S
                    return
            else:
                yield accepted

    def resume(self, now_s: float) -> None:
        """End the pause, if it is over."""
        if now_s >= self.due_s:
            self.due_s = math.inf
            self._epoll.register(self._sock, select.EPOLLIN)

    def close(self) -> None:
        self._sock.close()


def bind_socket(listen: tuple[str, int]) -> socket.socket:
    """A bound socket that does not listen yet. Host "" means all interfaces."""
    host, port = listen
    any_host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - certificates say who may speak
    infos = socket.getaddrinfo(host or any_host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock

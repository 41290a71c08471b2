"""The addresses of members, and when to dial them again.

Invariant: nothing here waits. A name is resolved again for each attempt, on a thread of its own, because a
slow resolver must not stop the loop. After a failed attempt the next address is used, after a pause that
doubles up to a limit and is randomized, so that members do not dial at the same time.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

_PORT_MAX = 65535


class DialTarget(NamedTuple):
    """The arguments of `socket.socket` and `connect`."""

    family: int
    address: tuple[Any, ...]


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6 address]:port`. ValueError otherwise."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not colon or not (port.isascii() and port.isdigit() and 0 < int(port) <= _PORT_MAX):
        raise ValueError(f"not an address: {text!r:.200}, expected host:port or [IPv6 address]:port")
    return host, int(port)


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


def start_connect(target: DialTarget) -> socket.socket:
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(target.address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


class Dialer:
    """The attempts to reach one member. One thread uses it; `wake` is called from others.

    An attempt, or its connection, lasts from `target` returning an address until `on_ended`.
    """

    due_s: float
    """When to call `target`, by the caller's clock. Infinite during an attempt or while resolving."""

    def __init__(
        self, address: str, *, backoff_s: tuple[float, float], random: Random, wake: Callable[[], None]
    ) -> None:
        self._host, self._port = split_address(address)
        self._pause_s_min, self._pause_s_max = backoff_s
        self._random = random
        self._wake = wake
        self._pause_s = self._pause_s_min
        self._turn = 0
        self._fixed = self._numeric()
        self._found: Sequence[DialTarget] | OSError | None = None
        self._is_resolving = False
        self.failures = 0
        """Consecutive failed attempts, for logs."""
        self.due_s = 0.0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.due_s or self._found is not None

    def target(self) -> DialTarget | None:
        """The address to dial now. None while it is being resolved: `wake` is called when `is_due` is true.

        OSError if the name has no address: the attempt has then failed.
        """
        self.due_s = math.inf
        targets = self._fixed or self._resolve()
        return targets[self._turn % len(targets)] if targets else None

    def on_ended(self, now_s: float, lasted_s: float | None) -> None:
        """The attempt failed (None), or its connection ended after `lasted_s`.

        A connection shorter than the longest pause is no success: a member that drops connections at once is
        not dialled twenty times a second.
        """
        if lasted_s is None:
            self.failures += 1
            self._turn += 1
        else:
            self.failures = 0
            if lasted_s > self._pause_s_max:
                self._pause_s = self._pause_s_min
        self.due_s = now_s + self._pause_s * self._random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, self._pause_s_max)

    def retry_now(self, now_s: float) -> None:
        """Dial at once, and start again with the shortest pause."""
        self._pause_s = self._pause_s_min
        self.due_s = now_s

    def _numeric(self) -> list[DialTarget]:
        try:
            return _lookup(self._host, self._port, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            return []

    def _resolve(self) -> Sequence[DialTarget] | None:
        if self._found is None:
            if not self._is_resolving:
                self._is_resolving = True
                threading.Thread(target=self._run_resolver, name=f"look-up {self._host}", daemon=True).start()
            return None
        found, self._found, self._is_resolving = self._found, None, False
        if isinstance(found, OSError):
            raise found
        return found

    def _run_resolver(self) -> None:
        found: Sequence[DialTarget] | OSError
        try:
            found = _lookup(self._host, self._port)
        except OSError as error:
            found = error
        except UnicodeError:
            found = OSError(f"not a host name: {self._host!r:.200}")
        self._found = found
        self._wake()


def _lookup(host: str, port: int, flags: int = 0) -> list[DialTarget]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    targets = [DialTarget(family, address) for family, _, _, _, address in infos]
    if not targets:
        raise OSError(f"no address of {host!r:.200}")
    return targets

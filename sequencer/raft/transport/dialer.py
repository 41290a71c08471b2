"""The addresses of members, and when to dial them again.

Invariant: nothing here waits. A name is resolved again for each attempt, on a thread of its own, because a
slow resolver must not stop the loop. After a failed attempt the next address is used, after a pause that
doubles up to a limit and is randomized, so that members do not dial at the same time.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from rt.endpoints import parse_endpoint

logger = logging.getLogger("sequencer.raft")


class DialTarget(NamedTuple):
    """The arguments of `socket.socket` and `connect`."""

    family: int
    address: tuple[Any, ...]


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

    An attempt, or its connection, starts when `target` returns an address, and lasts until `on_ended`.
    """

    due_s: float
    """When to call `target`, by the caller's clock. Infinite during an attempt or while resolving."""

    def __init__(
        self, address: str, *, backoff_s: tuple[float, float], random: Random, wake: Callable[[], None]
    ) -> None:
        self.address = address
        self._host, self._port = parse_endpoint(address)
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
        """Record that the attempt failed (`lasted_s` is None), or that its connection ended after `lasted_s`.

        A connection shorter than the longest pause does not count as a success: a member that drops
        connections at once must not be dialled twenty times a second.
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

    def postpone(self, now_s: float) -> None:
        """Delay the next attempt, because the member is connected by another connection."""
        self.due_s = now_s + self._pause_s_max

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


class Dialers:
    """The attempts to reach several members. One thread uses them; `wake` is called from others."""

    is_resolved = False
    """Whether a look-up has ended since the last `connect`."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        backoff_s: tuple[float, float],
        random: Random,
        wake: Callable[[], None],
    ) -> None:
        self._backoff_s, self._random, self._wake = backoff_s, random, wake
        self._dialers: dict[str, Dialer] = {}
        self.update(addresses)

    def update(self, addresses: Mapping[str, str]) -> None:
        """Reach these members from now on. A member without an address is not dialled."""
        known = self._dialers
        self._dialers = {
            peer: known[peer]
            if peer in known and known[peer].address == address
            else Dialer(address, backoff_s=self._backoff_s, random=self._random, wake=self._on_resolved)
            for peer, address in addresses.items()
            if address
        }

    @property
    def due_s(self) -> float:
        """When to call `connect`, by the caller's clock."""
        return min((dialer.due_s for dialer in self._dialers.values()), default=math.inf)

    def connect(
        self, now_s: float, connected: Collection[str]
    ) -> Iterator[tuple[str, socket.socket, tuple[Any, ...]]]:
        """Start the attempts that are due: yields the peer, the connecting socket and the address."""
        self.is_resolved = False
        for peer, dialer in self._dialers.items():
            if not dialer.is_due(now_s):
                continue
            if peer in connected:
                dialer.postpone(now_s)
            else:
                try:
                    target = dialer.target()
                    if target is None:
                        continue
                    sock = start_connect(target)
                except OSError as error:
                    self.on_failed(peer, now_s, error)
                else:
                    yield peer, sock, target.address

    def on_failed(self, peer: str, now_s: float, error: object) -> None:
        dialer = self._dialers.get(peer)
        if dialer is None:
            return
        dialer.on_ended(now_s, None)
        level = logging.INFO if dialer.failures == 1 else logging.DEBUG
        logger.log(level, "dial_failed peer=%s failures=%d error=%r", peer, dialer.failures, str(error)[:300])

    def on_ended(self, peer: str, now_s: float, lasted_s: float) -> None:
        if peer in self._dialers:
            self._dialers[peer].on_ended(now_s, lasted_s)

    def retry_now(self, now_s: float) -> None:
        for dialer in self._dialers.values():
            dialer.retry_now(now_s)

    def _on_resolved(self) -> None:
        self.is_resolved = True
        self._wake()


def _lookup(host: str, port: int, flags: int = 0) -> list[DialTarget]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    targets = [DialTarget(family, address) for family, _, _, _, address in infos]
    if not targets:
        raise OSError(f"no address of {host!r:.200}")
    return targets

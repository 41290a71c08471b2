"""Descriptors that are polled with the connections of the mesh: descriptors of other owners, and the
descriptor of `wake`.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class Waker:
    """Ends a poll. Any thread or signal handler may call `wake`."""

    def __init__(self) -> None:
        # A signal handler may call `wake` while its own thread holds the lock in `wake` or `close`.
        self._lock = threading.RLock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Does nothing after `close`."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def on_ready(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            fd, self.fd = self.fd, -1
            os.close(fd)


class DescriptorWatch:
    """For the thread that polls. Does nothing after `close`, which does not close the epoll."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._watched: dict[int, Callable[[int], None]] = {}
        self._is_closed = False

    def __contains__(self, fd: int) -> bool:
        return fd in self._watched

    def __getitem__(self, fd: int) -> Callable[[int], None]:
        return self._watched[fd]

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None] = lambda _: None) -> None:
        """Call `on_ready` with the events of epoll whenever some of `events` occur. If `events` is 0, stop
        watching `fd`.
        """
        if self._is_closed:
            return
        if not events:
            del self._watched[fd]
            self._epoll.unregister(fd)
        elif fd in self._watched:
            self._watched[fd] = on_ready
            self._epoll.modify(fd, events)
        else:
            self._watched[fd] = on_ready
            self._epoll.register(fd, events)

    def close(self) -> None:
        self._is_closed = True
        self._watched.clear()

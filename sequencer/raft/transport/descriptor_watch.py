"""Descriptors of other owners, polled with the connections of the mesh. For the thread that polls."""

from __future__ import annotations

import select
from collections.abc import Callable


class DescriptorWatch:
    """Does nothing after `close`, which does not close the epoll."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._watched: dict[int, Callable[[int], None]] = {}
        self._is_closed = False

    def __contains__(self, fd: int) -> bool:
        return fd in self._watched

    def __getitem__(self, fd: int) -> Callable[[int], None]:
        return self._watched[fd]

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None] = lambda _: None) -> None:
        """Call `on_ready` with the events of epoll whenever some of `events` are due; no events: no more."""
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

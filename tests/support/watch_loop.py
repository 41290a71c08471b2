"""A thread that polls descriptors and runs calls, in place of the consensus thread."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class WatchLoop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._watched: dict[int, Callable[[int], None]] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None] = lambda _: None) -> None:
        if not events:
            del self._watched[fd]
            self._epoll.unregister(fd)
        elif fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        if events:
            self._watched[fd] = on_ready

    def call(self, call: Callable[[], Any]) -> Any:
        """Run a call on the thread. Returns its result."""
        done: Future[Any] = Future()
        self._calls.append((call, done))
        os.eventfd_write(self._wake_fd, 1)
        return done.result(60)

    def stop(self) -> None:
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._epoll.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._is_stopping:
            for fd, events in self._epoll.poll():
                if fd in self._watched:
                    self._watched[fd](events)
                elif fd == self._wake_fd:
                    os.eventfd_read(fd)
            while self._calls:
                call, done = self._calls.popleft()
                done.set_running_or_notify_cancel()
                try:
                    result = call()
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    done.set_exception(error)
                else:
                    done.set_result(result)

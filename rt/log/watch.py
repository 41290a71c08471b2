"""Waiting until a log directory changes, without polling it.

A watch set before the last look misses nothing: whatever changes afterwards ends the next `wait` at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
from time import monotonic

from inotify_simple import INotify, flags

from rt.errors import NotALog
from rt.log.disk import storage_errors
from rt.log.polling import LogPoll

logger = logging.getLogger("rt.log")

_CHANGES = flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.MOVE_SELF
_GONE = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})


class DirectoryWatch:
    """Wakes when a file of one directory is written, made or renamed. `wake` may come from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._closing = threading.Lock()
        with storage_errors(path, "watching a log directory"):
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inotify: INotify | None = None
        self._polled: LogPoll | None = None
        """Where the system has no inotify instance or watch left."""
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        try:
            self._start(path)
        except BaseException:
            self.close()
            raise

    def _start(self, path: str) -> None:
        with storage_errors(path, "watching a log directory"):
            try:
                self._inotify = INotify(nonblocking=True)
                self._inotify.add_watch(path, _CHANGES | flags.ONLYDIR)
                self._poll.register(self._inotify.fileno(), select.POLLIN)
            except OSError as error:
                if error.errno not in _LIMITS:
                    raise
                logger.warning("inotify_exhausted path=%s hint=raise fs.inotify.max_user_watches", path)
                self._stop_inotify()
                self._polled = LogPoll(path)

    def wait(self, timeout: float | None) -> bool:
        """Return True after a change or a `wake`, False after `timeout` seconds (None: no limit).

        `rt.NotALog` if the directory was removed or renamed. May wake for nothing.
        """
        if self._polled is not None:
            return self._wait_polling(self._polled, timeout)
        return self._wait_once(timeout)

    def _wait_polling(self, polled: LogPoll, timeout: float | None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            left = polled.pace.seconds if deadline is None else max(0.0, deadline - monotonic())
            if self._wait_once(min(left, polled.pace.seconds)) or polled.is_changed():
                return True
            if deadline is not None and monotonic() >= deadline:
                return False

    def _wait_once(self, timeout: float | None) -> bool:
        ready = self._poll.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
        for fd, _ in ready:
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            else:
                self._drain()
        return bool(ready)

    def wake(self) -> None:
        """End a `wait` that is under way, or the next one. Nothing after `close`."""
        with self._closing:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Release the descriptors."""
        self._stop_inotify()
        with self._closing:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def _drain(self) -> None:
        assert self._inotify is not None
        for event in self._inotify.read(timeout=0):
            if event.mask & _GONE:
                raise NotALog("the log directory was removed or renamed", where=self._path)

    def _stop_inotify(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

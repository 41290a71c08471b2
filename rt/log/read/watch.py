"""Wait until a log directory changes, with inotify, or with polling if the system has no inotify watch left.

Invariants:
- A watch that was set before the last read misses nothing: a later change ends the next `wait` at once.
- A poll costs two system calls while no file is created or renamed, and polls become rare while they find
  nothing. So a machine at its limits gets slow, but not busy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
import time
from time import monotonic
from typing import Final, NamedTuple

from inotify_simple import INotify, flags

from rt.errors import LogNotFound, RtError
from rt.log.disk import REAL, storage_errors
from rt.log.scan.directory import list_segments

logger = logging.getLogger("rt.log")

_CHANGES = flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.MOVE_SELF
WATCH_ENDED: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})
"""Errors of a system without an inotify instance or watch left."""


class DirectoryWatch:
    """Wakes when a file of one directory is written, created or renamed. `wake` is thread-safe."""

    _wake_fd = -1
    _inotify: INotify | None = None

    def __init__(self, path: str) -> None:
        self._path = path
        self._closing = threading.Lock()
        with storage_errors(path, "watching a log directory"):
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._polled: LogPoll | None = None
        """Set if the system has no inotify instance or watch left."""
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
                if error.errno not in EXHAUSTED:
                    raise
                logger.warning("inotify_exhausted path=%s hint=raise fs.inotify.max_user_watches", path)
                self._stop_inotify()
                self._polled = LogPoll(path)

    def wait(self, timeout: float | None) -> bool:
        """Return True after a change or a `wake`, False after `timeout` seconds (None: no limit).

        May return True without a change. Raises `rt.LogNotFound` if the directory was removed or renamed.
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
        """End the current or the next `wait`. No effect after `close`."""
        with self._closing:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._stop_inotify()
        with self._closing:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        """Readers are often dropped without a close."""
        if self._wake_fd >= 0:
            self.close()

    def _drain(self) -> None:
        assert self._inotify is not None
        for event in self._inotify.read(timeout=0):
            if event.mask & WATCH_ENDED:
                raise LogNotFound("the log directory was removed or renamed", where=self._path)

    def _stop_inotify(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


POLL_SECONDS_MIN: Final = 0.02
POLL_SECONDS_MAX: Final = 0.2
_TICK_NS: Final = 50_000_000
"""File times come from a clock that ticks every 10 ms at worst. A second change within a tick leaves the
times unchanged.
"""


class PollBackoff:
    """The pause between two polls: doubles after each that found nothing."""

    def __init__(self) -> None:
        self.seconds = POLL_SECONDS_MIN

    def record(self, *, is_changed: bool) -> None:
        self.seconds = POLL_SECONDS_MIN if is_changed else min(2 * self.seconds, POLL_SECONDS_MAX)


class _Seen(NamedTuple):
    made_ns: int
    """When a file was last created, renamed or removed."""
    newest: str
    size: int


class LogPoll:
    """Compares the log directory `path` with its state at the previous poll. The constructor makes the first
    poll.
    """

    def __init__(self, path: str) -> None:
        self.pace = PollBackoff()
        self._path = path
        self._listed_ns = -1
        self._newest = ""
        self._seen = self._snapshot()

    def is_changed(self) -> bool:
        """Whether a file was created, renamed or removed, the newest segment has grown, or the state cannot
        be read.

        Sets the pause before the next poll.
        """
        seen = self._snapshot()
        is_changed = seen is None or seen != self._seen
        self._seen = seen
        self.pace.record(is_changed=is_changed)
        return is_changed

    def _snapshot(self) -> _Seen | None:
        try:
            made_ns = os.stat(self._path).st_mtime_ns
            if made_ns != self._listed_ns:
                self._list(made_ns)
            size = os.stat(self._newest).st_size if self._newest else 0
        except (OSError, RtError):
            self._listed_ns = -1
            return None
        return _Seen(made_ns, self._newest, size)

    def _list(self, made_ns: int) -> None:
        now_ns = time.time_ns()
        newest = max(list_segments(REAL, self._path), default=None)
        self._newest = "" if newest is None else os.path.join(self._path, newest.file_name)
        self._listed_ns = made_ns if now_ns - made_ns > _TICK_NS else -1

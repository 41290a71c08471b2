"""Noticing that a log directory changed, as a descriptor that an event loop can wait for.

Law: `drain`, then look: whatever changes after the `drain` makes the descriptor readable again, so that
waiting for it behind a look misses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Iterator

from inotify_simple import INotify, flags

from rt.log.disk import storage_errors

logger = logging.getLogger("replicator")

_CHANGES = flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.MOVE_SELF
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})
_EVENTS_BYTES = 64 * 1024
_EVENT = struct.Struct("iIII")
POLL_SECONDS = 0.02
"""How often to look at a directory whose watch has no descriptor."""


class LogWatch:
    """Becomes readable when a file of one directory is written, made or renamed.

    Where the system has no inotify instance or watch left, `fileno` is -1: look every `POLL_SECONDS`.
    """

    def __init__(self, path: str) -> None:
        self._inotify: INotify | None = None
        with storage_errors(path, "watching a log directory"):
            try:
                self._inotify = INotify(nonblocking=True)
                self._inotify.add_watch(path, _CHANGES | flags.ONLYDIR)
            except OSError as error:
                self.close()
                if error.errno not in _LIMITS:
                    raise
                logger.warning("inotify_exhausted path=%s hint=raise fs.inotify.max_user_watches", path)

    def fileno(self) -> int:
        """The descriptor, or -1."""
        return -1 if self._inotify is None else int(self._inotify.fileno())

    def drain(self) -> bool:
        """Forget what was noticed so far; whether any of it may mean new items."""
        if self._inotify is None:
            return True
        tells = False
        with contextlib.suppress(BlockingIOError):
            while True:
                events = os.read(self._inotify.fileno(), _EVENTS_BYTES)
                tells = tells or any(map(_tells, _names(events)))
        return tells

    def close(self) -> None:
        """Release the descriptor. Twice is allowed."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


def _names(events: bytes) -> Iterator[bytes]:
    """The file that each event is about; empty for the directory itself. See inotify(7)."""
    at = 0
    while at < len(events):
        _, _, _, size = _EVENT.unpack_from(events, at)
        at += _EVENT.size + size
        yield events[at - size : at].rstrip(b"\0")


def _tells(name: bytes) -> bool:
    """Not the files that are written beside the log: asides, `.progress`, indexes."""
    return not name.startswith((b".", b"index."))

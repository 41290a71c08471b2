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
from typing import Final, NamedTuple

from inotify_simple import INotify, flags

from rt.log.disk import storage_errors

logger = logging.getLogger("replicator")

CHANGES: Final = flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.MOVE_SELF
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})
EVENTS_BYTES: Final = 64 * 1024
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
                self._inotify.add_watch(path, CHANGES | flags.ONLYDIR)
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
        told = False
        with contextlib.suppress(BlockingIOError):
            while True:
                events = os.read(self._inotify.fileno(), EVENTS_BYTES)
                told = told or any(tells(event.name) for event in events_in(events))
        return told

    def close(self) -> None:
        """Release the descriptor. Twice is allowed."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class Event(NamedTuple):
    """What inotify(7) tells."""

    watch: int
    mask: int
    name: bytes
    """The file that it is about; empty for the directory itself."""


def events_in(data: bytes) -> Iterator[Event]:
    """The events that were read."""
    at = 0
    while at < len(data):
        watch, mask, _, size = _EVENT.unpack_from(data, at)
        at += _EVENT.size + size
        yield Event(watch, mask, data[at - size : at].rstrip(b"\0"))


def tells(name: bytes) -> bool:
    """Whether a change of this file may mean new items: of `.progress`, indexes and asides it does not."""
    return not name.startswith((b".", b"index."))

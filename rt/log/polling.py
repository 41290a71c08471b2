"""Noticing that a log directory changed by looking at it, where the system has no inotify left.

Law: a look costs two calls of the system while nothing is made or renamed, and looks become rare while they
find nothing; so that a machine whose limits are used up is slow, not busy.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

from rt.errors import RtError
from rt.log.directory import list_segments
from rt.log.disk import REAL

POLL_SECONDS_MIN: Final = 0.02
POLL_SECONDS_MAX: Final = 0.2
_TICK_NS: Final = 50_000_000
"""The times of files are of a clock that ticks, every 10 ms at worst: a change in the tick of the one before
leaves no trace in them."""


class Pace:
    """How long to pause between two looks: twice as long after each that found nothing."""

    def __init__(self) -> None:
        self.seconds = POLL_SECONDS_MIN

    def note(self, *, is_changed: bool) -> None:
        """A look was made."""
        self.seconds = POLL_SECONDS_MIN if is_changed else min(2 * self.seconds, POLL_SECONDS_MAX)


class _Seen(NamedTuple):
    made_ns: int
    """When a file was last made, renamed or removed."""
    newest: str
    size: int


class LogPoll:
    """Compares the log directory `path` with what it was at the look before; made with the first look."""

    def __init__(self, path: str) -> None:
        self.pace = Pace()
        self._path = path
        self._listed_ns = -1
        self._newest = ""
        self._seen = self._look()

    def is_changed(self) -> bool:
        """Whether a file was made, renamed or removed, or the newest segment has grown; or nothing is there.

        Sets the pace for the next look.
        """
        seen = self._look()
        is_changed = seen is None or seen != self._seen
        self._seen = seen
        self.pace.note(is_changed=is_changed)
        return is_changed

    def _look(self) -> _Seen | None:
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

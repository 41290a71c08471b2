"""One watch of the `.progress` files of all publishers of a process.

Invariants:
- The next `changed` returns every watched file that was written since it was last returned.

If the system has no inotify instance or watch left, a file is `polled`: the caller reads it each `pace`.
"""

from __future__ import annotations

import contextlib
import logging

from inotify_simple import INotify, flags

from rt.log.read.watch import PollBackoff

logger = logging.getLogger("rt.client.publisher")


class ProgressWatch:
    """Watches files by their numbers. For one thread. Without a file it holds no resource."""

    def __init__(self) -> None:
        self.polled: set[int] = set()
        """The files that are not watched and must be polled."""
        self.pace = PollBackoff()
        self._inotify: INotify | None = None
        self._watches: dict[int, set[int]] = {}
        """The files of each watch. Two successive publishers may share one directory."""
        self._of: dict[int, int] = {}
        """The watch of each file."""

    def fileno(self) -> int:
        """Readable when a file was written; -1 if none is watched."""
        return -1 if self._inotify is None else int(self._inotify.fileno())

    def add(self, number: int, path: str) -> None:
        """Watch a file, or add it to `polled` if that fails."""
        try:
            if self._inotify is None:
                self._inotify = INotify(nonblocking=True)
            watch = self._inotify.add_watch(path, flags.MODIFY)
        except OSError as error:
            hint = "raise fs.inotify.max_user_watches and max_user_instances"
            logger.warning("progress_polled path=%s reason=%s hint=%s", path, error, hint)
            self.polled.add(number)
        else:
            self._watches.setdefault(watch, set()).add(number)
            self._of[number] = watch
        self._release_if_unused()

    def remove(self, number: int) -> None:
        """Stop watching a file."""
        self.polled.discard(number)
        watch = self._of.pop(number, None)
        if watch is not None:
            self._watches[watch].discard(number)
            if not self._watches[watch]:
                del self._watches[watch]
                assert self._inotify is not None
                with contextlib.suppress(OSError):  # The watch was removed together with its file.
                    self._inotify.rm_watch(watch)
        self._release_if_unused()

    def changed(self) -> set[int]:
        """The watched files that were written since the last call. Never blocks."""
        found: set[int] = set()
        if self._inotify is None:
            return found
        for event in self._inotify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW:
                return set(self._of)
            found |= self._watches.get(event.wd, set())
        return found

    def close(self) -> None:
        """Release the descriptor and all watches."""
        self.polled.clear()
        self._watches.clear()
        self._of.clear()
        self._release_if_unused()

    def _release_if_unused(self) -> None:
        if self._inotify is not None and not self._of:
            self._inotify.close()
            self._inotify = None

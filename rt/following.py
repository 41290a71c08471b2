"""Reading a log that another process is filling, so that the wait for more can be ended from outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from rt.log.disk import REAL, Disk
from rt.log.reader import EventHandler, LogReader, Place


class FollowingReader(LogReader):
    """A `LogReader` that follows its log.

    `check` is called whenever there is nothing to read for now, before the wait for more; what it raises ends
    the wait, and nothing is lost by it. `wake` has it called again. With `may_be_ahead` a position beyond the
    end is one to wait for: the log is a copy that is still being filled.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        position: Place,
        topics: Collection[str] | None,
        on_event: EventHandler | None,
        check: Callable[[], None],
        may_be_ahead: bool = False,
        disk: Disk = REAL,
    ) -> None:
        self._check = check
        self._may_be_ahead = may_be_ahead
        super().__init__(path, position=position, follow=True, topics=topics, on_event=on_event, disk=disk)

    def wake(self) -> None:
        """End a wait that is under way, or the next one; from any thread."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def _advance(self) -> bool:
        if super()._advance():
            return True
        self._check()
        return False

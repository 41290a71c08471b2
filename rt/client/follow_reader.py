"""Read a log that another process fills; another thread can end the wait for more."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from rt.errors import Corrupt
from rt.log.disk import REAL, Disk
from rt.log.read.reader import EventHandler, LogReader, Place


class FollowReader(LogReader):
    """A `LogReader` that follows its log.

    `check` is called before each wait for more, and again after `wake`. If it raises, the wait ends and no
    message is lost. With `may_be_ahead`, a position after the log end is allowed and waited for, because the
    log is a copy that is still being filled. `on_damaged` gets each `rt.Corrupt`: if it returns True, the
    reader waits for the repair; else the error is raised.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        position: Place,
        topics: Collection[str] | None,
        on_event: EventHandler | None,
        check: Callable[[], None],
        on_damaged: Callable[[Corrupt], bool] = lambda _: False,
        may_be_ahead: bool = False,
        disk: Disk = REAL,
    ) -> None:
        self._check, self._on_damaged = check, on_damaged
        self._may_be_ahead = may_be_ahead
        super().__init__(path, position=position, follow=True, topics=topics, on_event=on_event, disk=disk)

    def wake(self) -> None:
        """End the current or the next wait. From any thread."""
        watch = self._watch
        if watch is not None:
            watch.wake()

    def _advance(self) -> bool:
        try:
            if super()._advance():
                return True
        except Corrupt as error:
            if not self._on_damaged(error):
                raise
        self._check()
        return False

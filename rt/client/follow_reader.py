"""Read a log that another process fills; another thread can end the wait for more."""

from __future__ import annotations

import os
import threading
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


class DeliveryGate:
    """Whether a subscriber delivers: not while it is paused. Another thread may also end its wait.

    `wake` is called after each change, to end the waits of the reader. Thread-safe.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.is_paused = False
        self.is_closed = False
        self._is_called_off = False
        self._changed = threading.Condition()
        self._wake = wake

    def change(
        self,
        *,
        is_paused: bool | None = None,
        is_closed: bool | None = None,
        is_called_off: bool | None = None,
    ) -> None:
        """Set a flag and wake all waits."""
        with self._changed:
            self.is_paused = self.is_paused if is_paused is None else is_paused
            self.is_closed = self.is_closed if is_closed is None else is_closed
            self._is_called_off = self._is_called_off if is_called_off is None else is_called_off
            self._changed.notify_all()
            self._wake()

    def take_call_off(self) -> bool:
        """Whether the wait was called off. Only the first call after it returns True."""
        if not self._is_called_off:
            return False
        self._is_called_off = False
        return True

    def wait_while_paused(self, seconds: float | None) -> bool:
        """Wait until it is not paused, closed or called off. False after `seconds` (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(self._may_go_on, seconds)

    def _may_go_on(self) -> bool:
        return not self.is_paused or self.is_closed or self._is_called_off

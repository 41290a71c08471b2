"""Behavior of a node while its disk is full: it waits, and the other nodes cannot reach it.

For the loop's thread. Invariant: a write that fails for lack of space is repeated until it succeeds. Nothing
is sent before that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from rt.errors import DiskFull

T = TypeVar("T")

logger = logging.getLogger("sequencer.raft")


class DiskSpace:
    """Waits for space on the disk.

    `wait` is called after every failed attempt: it waits a little, or raises. `on_full` is called once each
    time the disk becomes full.
    """

    def __init__(self, wait: Callable[[DiskFull], None], on_full: Callable[[], None]) -> None:
        self._wait, self._on_full = wait, on_full
        self.is_full = False

    def once(self, act: Callable[[], T]) -> T:
        """Return the result of `act`, after waiting for space if necessary."""
        try:
            return act()
        except DiskFull as error:
            return self.retry(error, act)

    def retry(self, error: DiskFull, act: Callable[[], T]) -> T:
        """Like `once`, after a first attempt failed with `error`."""
        while True:
            if not self.is_full:
                self.is_full = True
                logger.error("disk_full error=%r", str(error))
                self._on_full()
            self._wait(error)
            try:
                result = act()
            except DiskFull as again:
                error = again
            else:
                self.is_full = False
                logger.info("disk_has_space")
                return result

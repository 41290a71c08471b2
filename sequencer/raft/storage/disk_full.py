"""What a node does while its disk is full: it waits, and is away to the others meanwhile.

For the loop's thread. The law: what could not be written for want of space is tried again until it is, and
nothing leaves the node before.
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

    `wait` is called behind every attempt: it waits a little, or raises. `on_full` is told once of each time
    that the disk is full.
    """

    def __init__(self, wait: Callable[[DiskFull], None], on_full: Callable[[], None]) -> None:
        self._wait, self._on_full = wait, on_full
        self.is_full = False
        """Something waits for space now."""

    def once(self, act: Callable[[], T]) -> T:
        """What `act` returns, once there is the space for it."""
        try:
            return act()
        except DiskFull as error:
            return self.retry(error, act)

    def retry(self, error: DiskFull, act: Callable[[], T]) -> T:
        """The same, for what has just failed with `error`."""
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

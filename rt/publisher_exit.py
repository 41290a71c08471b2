"""What becomes of publishers that are open when their process ends, or forks.

At the end of the process each is closed, as far as that is possible. In a forked child none goes on: the
files belong to the parent, two writers would destroy them.

The law: what pushes is told later than its publishers when the process ends, and earlier in a forked child,
so it is registered before: that is why it is imported here.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

import rt.pushing  # noqa: F401 - for the order of what is registered

logger = logging.getLogger("rt.publisher")


class OpenPublisher(Protocol):
    """What is asked of one that is open."""

    session: str

    def close(self, linger: float) -> None:
        """Flush and release the directory; wait for nodes up to `linger` seconds."""

    def disown(self) -> None:
        """This is a forked child: release the directory without touching a file of it."""


open_publishers: weakref.WeakSet[OpenPublisher] = weakref.WeakSet()
"""A publisher is in it from the end of its opening to its close."""


def _close_all() -> None:
    for publisher in list(open_publishers):
        try:
            publisher.close(linger=0)
        except Exception as error:  # noqa: BLE001 - the others are closed all the same
            logger.error("close_at_exit_failed session=%s reason=%s", publisher.session, error)


def _disown_all() -> None:
    for publisher in list(open_publishers):
        try:
            publisher.disown()
        except BaseException as error:  # noqa: BLE001 - the others must be let go of all the same
            logger.error("disown_failed session=%s reason=%r", publisher.session, error)
    open_publishers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)

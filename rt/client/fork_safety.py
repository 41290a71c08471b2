"""Close or release open publishers when their process exits or forks.

At exit each is closed, if possible. In a forked child each is released: the files belong to the parent, and a
second writer would corrupt them.

The push pool's handlers must run after these at exit and before them in a forked child. So it must register
first, and this module imports it.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

import rt.sidecar.push_pool  # noqa: F401 - registers its handlers first

logger = logging.getLogger("rt.client.publisher")


class OpenPublisher(Protocol):
    session: str

    def _close_at_exit(self) -> None:
        """Flush and release the directory. Wait for no node."""

    def _disown(self) -> None:
        """In a forked child: release the directory without touching its files."""


open_publishers: weakref.WeakSet[OpenPublisher] = weakref.WeakSet()
"""A publisher is in this set from the end of its opening to its close."""


def _close_all() -> None:
    for publisher in list(open_publishers):
        try:
            publisher._close_at_exit()
        except Exception as error:  # noqa: BLE001 - the others must be closed too
            logger.error("close_at_exit_failed session=%s reason=%s", publisher.session, error)


def _disown_all() -> None:
    for publisher in list(open_publishers):
        try:
            publisher._disown()
        except BaseException as error:  # noqa: BLE001 - the others must be released too
            logger.error("ownership_release_failed session=%s reason=%r", publisher.session, error)
    open_publishers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)

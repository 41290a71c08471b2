"""One push client a session directory, by lock; and how the next one is let in.

Law: whoever serves holds `push.lock`, whoever waits for that `push.next`. A client whose publisher has ended
makes way for one that waits, for that one has a publisher, and the same bytes to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from rt.errors import DirectoryLocked
from rt.log.disk import REAL, Disk, Lock, storage_errors

SERVING_FILE = "push.lock"
WAITING_FILE = "push.next"
_TRY_SECONDS = 0.05
"""How often a lock is tried that is held: flock(2) cannot be waited for in an event loop."""


def lock_push(path: str, *, disk: Disk = REAL) -> Lock:
    """The lock of the session directory `path`; `rt.DirectoryLocked` if another client serves it."""
    return _lock(disk, path, SERVING_FILE)


async def wait_for_turn(path: str, *, disk: Disk = REAL) -> Lock:
    """The lock, when the client that has it makes way."""
    with contextlib.suppress(DirectoryLocked):
        return lock_push(path, disk=disk)
    waiting = await _locked(disk, path, WAITING_FILE)
    try:
        return await _locked(disk, path, SERVING_FILE)
    finally:
        waiting.close()


def is_awaited(path: str, *, disk: Disk = REAL) -> bool:
    """Whether another client waits for the lock."""
    try:
        _lock(disk, path, WAITING_FILE).close()
    except DirectoryLocked:
        return True
    return False


async def _locked(disk: Disk, path: str, name: str) -> Lock:
    while True:
        with contextlib.suppress(DirectoryLocked):
            return _lock(disk, path, name)
        await asyncio.sleep(_TRY_SECONDS)


def _lock(disk: Disk, path: str, name: str) -> Lock:
    with storage_errors(os.path.join(path, name), "locking a session for its push client"):
        return disk.lock(os.path.join(path, name))

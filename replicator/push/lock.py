"""The lock of a session directory: one push client at a time, and how the next one takes over.

Invariant: the client that pushes the session holds `push.lock`. The next client holds `push.next` and waits.
A client whose publisher has ended polls `is_awaited`, and releases `push.lock` to the waiting client. The
waiting client has a running publisher, and sends the remaining bytes too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from rt.errors import DirectoryLocked
from rt.log.disk import REAL, Disk, Lock, storage_errors
from rt.sidecar.protocol import SERVING_FILE

WAITING_FILE = "push.next"
_TRY_SECONDS = 0.05  # How often a held lock is tried: an event loop cannot wait for flock(2).


def lock_push(path: str, *, disk: Disk = REAL) -> Lock:
    """The lock of the session directory `path`. `rt.DirectoryLocked` if another client serves it."""
    return _lock(disk, path, SERVING_FILE)


async def wait_for_turn(path: str, *, disk: Disk = REAL) -> Lock:
    """The lock, as soon as no other client holds it. Others see meanwhile that this one waits."""
    with contextlib.suppress(DirectoryLocked):
        return lock_push(path, disk=disk)
    waiting = await _wait_for_lock(disk, path, WAITING_FILE)
    try:
        return await _wait_for_lock(disk, path, SERVING_FILE)
    finally:
        waiting.close()


def is_awaited(path: str, *, disk: Disk = REAL) -> bool:
    try:
        _lock(disk, path, WAITING_FILE).close()
    except DirectoryLocked:
        return True
    return False


async def _wait_for_lock(disk: Disk, path: str, name: str) -> Lock:
    while True:
        with contextlib.suppress(DirectoryLocked):
            return _lock(disk, path, name)
        await asyncio.sleep(_TRY_SECONDS)


def _lock(disk: Disk, path: str, name: str) -> Lock:
    with storage_errors(os.path.join(path, name), "locking a session for its push client"):
        return disk.lock(os.path.join(path, name))

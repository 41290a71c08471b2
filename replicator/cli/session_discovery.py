"""Pushes all sessions of a stream below one root, for a sidecar, including those that appear later.

Invariant: each session has its own client. When one client ends, the others go on. A client that ended is
restarted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from replicator.push.client import PushClient
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.scan.directory import is_log_directory

logger = logging.getLogger("replicator")

_LOOK_SECONDS = 1.0  # How often to search for new sessions: publishers run longer.
_AGAIN_SECONDS = 10.0  # The pause after the client of a session failed or was refused.


class SessionDiscovery:
    """Pushes every session in the directory `sessions`; `make` gives the client of one."""

    def __init__(self, sessions: str, make: Callable[[str], PushClient], *, disk: Disk = REAL) -> None:
        self._sessions = sessions
        self._make = make
        self._disk = disk
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        names = self._found()
        if not names:
            logger.warning("no_session_found path=%s", self._sessions)
        try:
            while True:
                for name in names:
                    if name not in self._running:
                        self._running[name] = asyncio.create_task(self._push(name))
                await asyncio.sleep(_LOOK_SECONDS)
                names = self._found()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _found(self) -> list[str]:
        with storage_errors(self._sessions, "listing the sessions"):
            try:
                names = self._disk.list_directory(self._sessions)
            except FileNotFoundError:
                return []
        return [name for name in sorted(names) if is_log_directory(self._disk, self._path(name))]

    async def _push(self, name: str) -> None:
        try:
            await self._make(self._path(name)).run()
        except Exception as error:  # noqa: BLE001 - the others go on
            logger.error("push_failed path=%s reason=%s", self._path(name), error)
        await asyncio.sleep(_AGAIN_SECONDS)
        self._running.pop(name)

    def _path(self, name: str) -> str:
        return os.path.join(self._sessions, name)

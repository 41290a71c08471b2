"""One watch of a directory for all who wait for it in an event loop.

Law: whoever takes `version`, then looks, then waits for `changed(version)`, misses no change between the
look and the wait. Who waits costs nothing until something changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from replicator.log_watch import POLL_SECONDS, LogWatch


class Watched:
    """A directory that is watched. `version` rises with each change."""

    def __init__(self, path: str) -> None:
        self.version = 0
        self.users = 0
        self._watch = LogWatch(path)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if self._watch.fileno() >= 0:
            self._loop.add_reader(self._watch.fileno(), self._noticed)
        else:
            self._poll()

    async def changed(self, version: int) -> None:
        """Return as soon as `self.version` is not `version`."""
        while self.version == version:
            await self._changed.wait()

    def close(self) -> None:
        """Release the watch."""
        if self._watch.fileno() >= 0:
            self._loop.remove_reader(self._watch.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._watch.close()

    def _noticed(self) -> None:
        self._watch.drain()
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _poll(self) -> None:
        self._noticed()
        self._timer = self._loop.call_later(POLL_SECONDS, self._poll)


class WatchHub:
    """The directories that are watched now. For one event loop."""

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}

    @contextlib.contextmanager
    def watching(self, path: str) -> Iterator[Watched]:
        """The watch of a directory, shared with all others who have it. `rt.NotALog` if there is none."""
        watched = self._watched.get(path)
        if watched is None:
            watched = self._watched[path] = Watched(path)
        watched.users += 1
        try:
            yield watched
        finally:
            watched.users -= 1
            if not watched.users:
                del self._watched[path]
                watched.close()

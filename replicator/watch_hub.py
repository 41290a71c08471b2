"""One inotify instance for all log directories that are watched in an event loop.

Law: whoever takes `version`, then looks, then waits for `changed(version)`, misses no change between the
look and the wait. Who waits costs nothing until something changes. Where the system has no instance or watch
left, a directory is looked at from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from typing import Final

from inotify_simple import INotify, flags

from replicator.log_watch import CHANGES, EVENTS_BYTES, Event, events_in, tells
from rt.log.disk import storage_errors
from rt.log.polling import LogPoll

logger = logging.getLogger("replicator")

_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})
_GONE: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED


class Watched:
    """A directory that is watched. `version` rises with each change."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = 0
        self.users = 0
        self._changed = asyncio.Event()
        self._polled: LogPoll | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def changed(self, version: int) -> None:
        """Return as soon as `self.version` is not `version`."""
        while self.version == version:
            await self._changed.wait()

    def notice(self) -> None:
        """It changed."""
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def poll(self) -> None:
        """Look at it from now on: nobody tells when it changes."""
        self._polled = LogPoll(self.path)
        self._look_again()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        assert self._polled is not None
        if self._polled.is_changed():
            self.notice()
        self._look_again()

    def _look_again(self) -> None:
        assert self._polled is not None
        self._timer = asyncio.get_running_loop().call_later(self._polled.pace.seconds, self._look)


class WatchHub:
    """The directories that are watched now. For one event loop; holds no descriptor while there are none."""

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._inotify: INotify | None = None
        self._by_watch: dict[int, list[Watched]] = {}
        """Two paths may lead to one directory."""

    @contextlib.contextmanager
    def watching(self, path: str) -> Iterator[Watched]:
        """The watch of a directory, shared with all others who have it. `rt.NotALog` if there is none."""
        watched = self._watched.get(path)
        if watched is None:
            watched = self._begin(path)
        watched.users += 1
        try:
            yield watched
        finally:
            watched.users -= 1
            if not watched.users:
                self._end(watched)

    def wake(self, path: str) -> None:
        """Whoever watches that directory looks again."""
        if path in self._watched:
            self._watched[path].notice()

    def _begin(self, path: str) -> Watched:
        watched = Watched(path)
        with storage_errors(path, "watching a log directory"):
            try:
                self._watch(watched)
            except OSError as error:
                self._release_if_unused()
                if error.errno not in _LIMITS:
                    raise
                hint = "raise fs.inotify.max_user_watches and max_user_instances"
                logger.warning("inotify_exhausted path=%s hint=%s", path, hint)
                watched.poll()
        self._watched[path] = watched
        return watched

    def _watch(self, watched: Watched) -> None:
        if self._inotify is None:
            self._inotify = INotify(nonblocking=True)
            asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._noticed)
        watch = self._inotify.add_watch(watched.path, CHANGES | flags.ONLYDIR)
        self._by_watch.setdefault(watch, []).append(watched)

    def _end(self, watched: Watched) -> None:
        watched.close()
        if self._watched.get(watched.path) is watched:
            del self._watched[watched.path]
        for watch, all_watched in list(self._by_watch.items()):
            if watched in all_watched:
                all_watched.remove(watched)
                if not all_watched:
                    self._forget(watch)
        self._release_if_unused()

    def _forget(self, watch: int) -> None:
        del self._by_watch[watch]
        if self._inotify is not None:
            with contextlib.suppress(OSError):  # The directory is gone, and its watch with it.
                self._inotify.rm_watch(watch)

    def _release_if_unused(self) -> None:
        if self._inotify is not None and not self._by_watch:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _noticed(self) -> None:
        assert self._inotify is not None
        changed: dict[Watched, None] = {}
        with contextlib.suppress(BlockingIOError):
            for event in events_in(os.read(self._inotify.fileno(), EVENTS_BYTES)):
                changed.update(dict.fromkeys(self._told_by(event)))
        for watched in changed:
            watched.notice()

    def _told_by(self, event: Event) -> list[Watched]:
        if event.mask & flags.Q_OVERFLOW:
            return [watched for all_watched in self._by_watch.values() for watched in all_watched]
        found = self._by_watch.get(event.watch, [])
        if event.mask & _GONE:
            for watched in found:  # Who asks for the path from now on may mean another directory.
                if self._watched.get(watched.path) is watched:
                    del self._watched[watched.path]
        return found if tells(event.name) else []

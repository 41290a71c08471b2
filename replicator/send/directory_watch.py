"""One inotify instance for all log directories that are watched in an event loop.

Law: whoever takes `version`, then looks, then waits for `changed(version)`, misses no change between the
look and the wait. Who waits costs nothing until something changes. Where the system has no instance or watch
left, a directory is looked at from time to time.

Noticing that a log directory changed, as a descriptor that an event loop can wait for.

Law: `drain`, then look: whatever changes after the `drain` makes the descriptor readable again, so that
waiting for it behind a look misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from inotify_simple import INotify, flags

from rt.log.disk import storage_errors
from rt.log.read.watch import LogPoll

logger = logging.getLogger("replicator")

_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})
_GONE: Final = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED


class WatchedDirectory:
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
        self._watched: dict[str, WatchedDirectory] = {}
        self._inotify: INotify | None = None
        self._by_watch: dict[int, list[WatchedDirectory]] = {}
        """Two paths may lead to one directory."""

    @contextlib.contextmanager
    def watching(self, path: str) -> Iterator[WatchedDirectory]:
        """The watch of a directory, shared with all others who have it. `rt.LogNotFound` if there is none."""
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

    def _begin(self, path: str) -> WatchedDirectory:
        watched = WatchedDirectory(path)
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

    def _watch(self, watched: WatchedDirectory) -> None:
        if self._inotify is None:
            self._inotify = INotify(nonblocking=True)
            asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._noticed)
        watch = self._inotify.add_watch(watched.path, CHANGES | flags.ONLYDIR)
        self._by_watch.setdefault(watch, []).append(watched)

    def _end(self, watched: WatchedDirectory) -> None:
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
        changed: dict[WatchedDirectory, None] = {}
        with contextlib.suppress(BlockingIOError):
            for event in events_in(os.read(self._inotify.fileno(), EVENTS_BYTES)):
                changed.update(dict.fromkeys(self._told_by(event)))
        for watched in changed:
            watched.notice()

    def _told_by(self, event: InotifyEvent) -> list[WatchedDirectory]:
        if event.mask & flags.Q_OVERFLOW:
            return [watched for all_watched in self._by_watch.values() for watched in all_watched]
        found = self._by_watch.get(event.watch, [])
        if event.mask & _GONE:
            for watched in found:  # Who asks for the path from now on may mean another directory.
                if self._watched.get(watched.path) is watched:
                    del self._watched[watched.path]
        return found if tells(event.name) else []


CHANGES: Final = (
    flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE | flags.DELETE_SELF | flags.MOVE_SELF
)
"""That the directory itself is gone the system tells only when no file of it is open any more: so removed
files are told as well."""
EVENTS_BYTES: Final = 64 * 1024
_EVENT = struct.Struct("iIII")
POLL_SECONDS = 0.02
"""How often to look at a directory whose watch has no descriptor."""


class LogWatch:
    """Becomes readable when a file of one directory is written, made or renamed.

    Where the system has no inotify instance or watch left, `fileno` is -1: look every `POLL_SECONDS`.
    """

    def __init__(self, path: str) -> None:
        self._inotify: INotify | None = None
        with storage_errors(path, "watching a log directory"):
            try:
                self._inotify = INotify(nonblocking=True)
                self._inotify.add_watch(path, CHANGES | flags.ONLYDIR)
            except OSError as error:
                self.close()
                if error.errno not in _LIMITS:
                    raise
                logger.warning("inotify_exhausted path=%s hint=raise fs.inotify.max_user_watches", path)

    def fileno(self) -> int:
        """The descriptor, or -1."""
        return -1 if self._inotify is None else int(self._inotify.fileno())

    def drain(self) -> bool:
        """Forget what was noticed so far; whether any of it may mean new items."""
        if self._inotify is None:
            return True
        told = False
        with contextlib.suppress(BlockingIOError):
            while True:
                events = os.read(self._inotify.fileno(), EVENTS_BYTES)
                told = told or any(tells(event.name) for event in events_in(events))
        return told

    def close(self) -> None:
        """Release the descriptor. Twice is allowed."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class InotifyEvent(NamedTuple):
    """What inotify(7) tells."""

    watch: int
    mask: int
    name: bytes
    """The file that it is about; empty for the directory itself."""


def events_in(data: bytes) -> Iterator[InotifyEvent]:
    """The events that were read."""
    at = 0
    while at < len(data):
        watch, mask, _, size = _EVENT.unpack_from(data, at)
        at += _EVENT.size + size
        yield InotifyEvent(watch, mask, data[at - size : at].rstrip(b"\0"))


def tells(name: bytes) -> bool:
    """Whether a change of this file may mean new items: of `.progress`, indexes and asides it does not."""
    return not name.startswith((b".", b"index."))

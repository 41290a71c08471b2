"""One inotify instance for all log directories that an event loop watches. Only the loop calls this.

Invariants:
- A reader that takes `version`, then reads the directory, then awaits `changed(version)`, misses no change.
- Waiting costs nothing until something changes. But if the system has no inotify instance or watch left, the
  directory is polled.
- The only user of a directory may stop listening to writes for a while: then only files that appear,
  disappear or are renamed are changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Final

from inotify_simple import Event, INotify, flags, parse_events

from rt.log.disk import storage_errors
from rt.log.read.watch import EXHAUSTED, WATCH_ENDED, LogPoll

logger = logging.getLogger("replicator")

_CHANGES: Final = (
    flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE | flags.DELETE_SELF | flags.MOVE_SELF
)
"""With `DELETE`, because the kernel sends `DELETE_SELF` only after the last open file in it is closed."""
_EVENTS_BYTES: Final = 64 * 1024


class WatchedDirectory:
    """`version` grows with each change. `users` is the number of `watching` contexts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = 0
        self.users = 0
        self.watch: int | None = None  # None if it is polled.
        self._changed = asyncio.Event()
        self._poll_state: LogPoll | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def changed(self, version: int) -> None:
        """Return when `self.version` differs from `version`."""
        while self.version == version:
            await self._changed.wait()

    def mark_changed(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def start_polling(self) -> None:
        """Also poll the directory from now on."""
        if self._poll_state is None:
            self._poll_state = LogPoll(self.path)
            self._schedule_poll()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        assert self._poll_state is not None
        if self._poll_state.is_changed():
            self.mark_changed()
        self._schedule_poll()

    def _schedule_poll(self) -> None:
        assert self._poll_state is not None
        self._timer = asyncio.get_running_loop().call_later(self._poll_state.pace.seconds, self._poll)


class WatchHub:
    """The watched directories of one event loop. Holds no descriptor while there are none."""

    def __init__(self) -> None:
        self._watched: dict[str, WatchedDirectory] = {}
        self._inotify: INotify | None = None
        self._by_watch: dict[int, list[WatchedDirectory]] = {}  # Two paths may lead to one directory.

    @contextlib.contextmanager
    def watching(self, path: str) -> Iterator[WatchedDirectory]:
        """The watch of a directory, shared by all its users. `rt.LogNotFound` if there is no directory."""
        watched = self._watched.get(path)
        if watched is None:
            watched = self._start(path)
        else:
            self.listen(watched, to_writes=True)
        watched.users += 1
        try:
            yield watched
        finally:
            watched.users -= 1
            if not watched.users:
                self._stop(watched)

    def wake(self, path: str) -> None:
        if path in self._watched:
            self._watched[path].mark_changed()

    def listen(self, watched: WatchedDirectory, *, to_writes: bool) -> None:
        """Set whether writes to files are changes. They stay so if the directory has another user or is
        polled.

        The caller itself must check for writes that happened before it listens again.
        """
        watch = watched.watch
        if watch is None or watch not in self._by_watch or self._inotify is None:
            return
        if not to_writes and (watched.users > 1 or len(self._by_watch[watch]) > 1):
            return
        mask = flags.ONLYDIR | (_CHANGES if to_writes else _CHANGES & ~flags.MODIFY)
        found: int | None = None
        with contextlib.suppress(OSError):
            # For the same directory this changes the watch.
            found = self._inotify.add_watch(watched.path, mask)
        if found == watch:
            return
        watched.mark_changed()  # The directory was removed or replaced: its user finds out.
        if to_writes:
            watched.start_polling()  # The directory may be back by then, or adding the watch failed.
        if found is None:
            return
        if found in self._by_watch:
            self._inotify.add_watch(watched.path, _CHANGES | flags.ONLYDIR)
        else:
            self._inotify.rm_watch(found)

    def _start(self, path: str) -> WatchedDirectory:
        watched = WatchedDirectory(path)
        with storage_errors(path, "watching a log directory"):
            try:
                self._watch(watched)
            except OSError as error:
                self._release_if_unused()
                if error.errno not in EXHAUSTED:
                    raise
                hint = "raise fs.inotify.max_user_watches and max_user_instances"
                logger.warning("inotify_exhausted path=%s hint=%s", path, hint)
                watched.start_polling()
        self._watched[path] = watched
        return watched

    def _watch(self, watched: WatchedDirectory) -> None:
        if self._inotify is None:
            self._inotify = INotify(nonblocking=True)
            asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._read_events)
        watch = self._inotify.add_watch(watched.path, _CHANGES | flags.ONLYDIR)
        self._by_watch.setdefault(watch, []).append(watched)
        watched.watch = watch

    def _stop(self, watched: WatchedDirectory) -> None:
        watched.close()
        if self._watched.get(watched.path) is watched:
            del self._watched[watched.path]
        for watch, all_watched in list(self._by_watch.items()):
            if watched in all_watched:
                all_watched.remove(watched)
                if not all_watched:
                    self._remove_watch(watch)
        self._release_if_unused()

    def _remove_watch(self, watch: int) -> None:
        del self._by_watch[watch]
        if self._inotify is not None:
            with contextlib.suppress(OSError):  # The directory was deleted, and its watch with it.
                self._inotify.rm_watch(watch)

    def _release_if_unused(self) -> None:
        if self._inotify is not None and not self._by_watch:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _read_events(self) -> None:
        assert self._inotify is not None
        changed: dict[WatchedDirectory, None] = {}
        with contextlib.suppress(BlockingIOError):
            for event in parse_events(os.read(self._inotify.fileno(), _EVENTS_BYTES)):
                changed.update(dict.fromkeys(self._affected_by(event)))
        for watched in changed:
            watched.mark_changed()

    def _affected_by(self, event: Event) -> list[WatchedDirectory]:
        if event.mask & flags.Q_OVERFLOW:
            return [watched for all_watched in self._by_watch.values() for watched in all_watched]
        found = self._by_watch.get(event.wd, [])
        if event.mask & WATCH_ENDED:
            for watched in found:  # A new directory may have that path from now on.
                if self._watched.get(watched.path) is watched:
                    del self._watched[watched.path]
        return found if _may_bring_messages(event.name) else []


def _may_bring_messages(name: str) -> bool:
    """Whether the file may hold new messages: not if it is an index, `.progress` or temporary."""
    return not name.startswith((".", "index."))

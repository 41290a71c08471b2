"""Group commit for many receivers: syncs them in a few threads, and reports what became durable.

A small sync that is alone runs in the event loop: two changes of threads cost more than the sync. The loop
syncs only while the disk is quick, and spends half of its time on it at most.

Invariants:
- One thread at a time syncs a receiver. Bytes stored meanwhile wait for the next round: the more arrives, the
  more one sync covers.
- Nothing is reported as durable before its sync returned.
- A failed sync is reported once, and the receiver is never synced again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, Protocol

from msgspec import Struct

from rt.errors import Closed, RtError
from rt.log.write.writer import SyncPoint

logger = logging.getLogger("replicator")

THREADS: Final = 3
"""Syncs of different files overlap in the device's queue; more threads only wait for the same device."""
QUICK_BYTES_MAX: Final = 64 * 1024
"""The most bytes that a sync in the event loop covers."""
QUICK_S: Final = 0.005
"""A sync in the event loop is slow if it takes longer. After a slow one, the threads sync for `SLOW_S`."""
SLOW_S: Final = 1.0


class Syncable(Protocol):
    """A receiver. `path` names it in logs."""

    @property
    def path(self) -> str: ...

    def sync_point(self) -> SyncPoint | None:
        """All that is stored and not synced; None if nothing is. Called in the event loop."""

    def sync_to(self, point: SyncPoint) -> None:
        """Return when it is on disk. Called in any thread. A failure is final."""


OnSynced = Callable[[SyncPoint | None], None]
OnFailed = Callable[[RtError], None]


class _Member(Struct):
    """A receiver with its callbacks, and whether its sync is requested or running."""

    receiver: Syncable
    on_synced: OnSynced
    on_failed: OnFailed
    is_syncing: bool = False
    requested: SyncPoint | None = None
    point: SyncPoint | None = None  # The end of the running sync.
    last: SyncPoint | None = None  # The end of the last sync that was not empty.
    error: RtError | None = None

    @property
    def is_small(self) -> bool:
        """Whether little was stored since the last sync, all of it in the same segment."""
        new, old = self.requested, self.last
        if new is None or old is None:
            return new is None
        return new.id == old.id and new.offset - old.offset <= QUICK_BYTES_MAX


class GroupCommit:
    """Syncs receivers on request, in rounds. For one event loop; make it and use it there."""

    def __init__(self, *, threads: int = THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._rounds: SimpleQueue[Sequence[_Member] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"rt-sync-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._running = 0
        self._is_scheduled = False
        self._quick_after_s = 0.0
        """When the event loop may sync again."""
        self._wanted: dict[Syncable, _Member] = {}
        self._members: dict[Syncable, _Member] = {}
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, receiver: Syncable, on_synced: OnSynced, on_failed: OnFailed) -> None:
        """Add a receiver. Callbacks are called in the loop's thread: `on_synced(point)` after each sync."""
        self._members[receiver] = _Member(receiver, on_synced, on_failed)

    def discard(self, receiver: Syncable) -> None:
        """Remove a receiver. A running sync ends, and is not reported."""
        self._members.pop(receiver, None)
        self._wanted.pop(receiver, None)

    def request_sync(self, receiver: Syncable) -> None:
        """Request a sync of everything that the receiver has stored by now. Never call it while bytes are
        being stored.
        """
        member = self._members.get(receiver)
        if member is None or member.error is not None or self._is_closed:
            return
        member.requested = receiver.sync_point()
        self._wanted[receiver] = member
        if self._is_scheduled:
            return
        if self._running or not member.is_small or time.monotonic() < self._quick_after_s:
            self._start_rounds()
            return
        self._is_scheduled = True  # What is requested together is synced together.
        self._idle.clear()
        self._loop.call_soon(self._sync_scheduled)

    async def wait_idle(self) -> None:
        """Return when no sync is requested or running."""
        await self._idle.wait()

    async def close(self) -> None:
        """Wait for the running syncs. Syncs that were only requested are dropped."""
        self._is_closed = True
        self._wanted.clear()
        if not self._running:
            self._idle.set()
        await self.wait_idle()
        for _ in self._threads:
            self._rounds.put(None)
        for thread in self._threads:
            thread.join()

    def _sync_scheduled(self) -> None:
        """Sync here if there is only one small receiver to sync, else in the threads."""
        self._is_scheduled = False
        members = list(self._wanted.values())
        if not self._running and len(members) == 1 and members[0].is_small:
            begun_s = time.monotonic()
            self._begin(members)
            _sync_all(members)
            now_s = time.monotonic()
            lasted_s = now_s - begun_s
            self._quick_after_s = now_s + (lasted_s if lasted_s <= QUICK_S else SLOW_S)
            self._finish_round(members)
        else:
            self._start_rounds()
            self._set_idle()

    def _start_rounds(self) -> None:
        """Share the receivers that are ready among the threads that are free."""
        free = len(self._threads) - self._running
        if free <= 0:
            return  # Return before all receivers are checked: there may be thousands.
        ready = [member for member in self._wanted.values() if not member.is_syncing]
        if not ready:
            return
        self._idle.clear()
        share = -(-len(ready) // free)
        for start in range(0, len(ready), share):
            members = ready[start : start + share]
            self._begin(members)
            self._rounds.put(members)

    def _begin(self, members: Sequence[_Member]) -> None:
        for member in members:
            del self._wanted[member.receiver]
            member.is_syncing = True
            member.point = member.requested
            member.last = member.point or member.last
        self._running += 1

    def _serve(self) -> None:
        while (members := self._rounds.get()) is not None:
            _sync_all(members)
            with contextlib.suppress(RuntimeError):  # The loop was closed, and no task waits.
                self._loop.call_soon_threadsafe(self._finish_round, members)

    def _finish_round(self, members: Sequence[_Member]) -> None:
        self._running -= 1
        for member in members:
            member.is_syncing = False
            self._notify(member)
        if not self._is_closed:
            self._start_rounds()
        self._set_idle()

    def _set_idle(self) -> None:
        if not self._running and not self._wanted:
            self._idle.set()

    def _notify(self, member: _Member) -> None:
        if self._members.get(member.receiver) is not member:
            return
        if member.error is None:
            member.on_synced(member.point)
            return
        logger.error("sync_failed path=%s error=%s", member.receiver.path, member.error)
        self._wanted.pop(member.receiver, None)
        member.on_failed(member.error)


def _sync_all(members: Sequence[_Member]) -> None:
    for member in members:
        if member.point is None:
            continue
        try:
            member.receiver.sync_to(member.point)
        except RtError as error:
            member.error = error
        except Exception as error:  # noqa: BLE001
            # A thread of the pool must not swallow it: the bytes are not known to be durable.
            member.error = Closed(f"a sync failed unexpectedly: {error!r}", where=member.receiver.path)

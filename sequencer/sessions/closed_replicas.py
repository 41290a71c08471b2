"""Removing the copies of closed sessions from this node's disk.

For one event loop. Invariants:
- A copy is removed only if its session is closed, and everything merged of it is durable in the merged log
  here and on a majority of the nodes. So no node needs its bytes to make what is merged.
- A copy that a stream or a fetch uses stays. What a publisher brings later makes another one.
- A copy is removed as a whole: its directory gets another name, durably, before the first file of it goes.
- A copy that cannot be removed keeps no other one from being removed. It is tried again.
- Directories of sessions whose record is gone are found at the start, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Final

from replicator.protocol.run_in_thread import run_to_end
from rt.errors import RtError, StorageError
from rt.log.disk import REAL, storage_error, storage_errors
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.replicas import SessionReplicas, check_no_link
from sequencer.state.apply_result import Forgotten, Outcome, RangesMerged, RunClosed

LOOK_S: Final = 1.0
REMOVE_MAX: Final = 64
"""Copies that are removed in one go: streams and merging are not to wait for it."""
GONE: Final = "gone."
"""Begins the name of a directory that is being removed."""

_REMOVING: Final = "removing the copy of a closed session"

logger = logging.getLogger("sequencer")


class ClosedReplicas:
    """Removes what is not needed any more, from `run`.

    `released` is the last instruction that is durable in the merged log here and on a majority; None while
    the one here is damaged or lacks bytes.
    """

    def __init__(
        self,
        directory: str,
        replica: StateFollower,
        copies: SessionReplicas,
        pool: Executor,
        released: Callable[[], int | None],
        on_removed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._directory, self._replica, self._copies = directory, replica, copies
        self._pool, self._released, self._on_removed = pool, released, on_removed
        self._due: dict[int, int] = {}
        """By session id: the instruction that must be durable first."""
        self._leftovers: set[str] = set()
        """Names of directories that are being removed."""
        self._is_listed = False
        """Whether the directory was looked through since the last snapshot."""
        self._told: dict[str, str] = {}
        """By name: why it could not be removed."""

    # What the process hears

    def on_snapshot(self) -> None:
        """Look soon at what is here of sessions that are closed, or unknown by now."""
        self._is_listed = False

    def on_applied(self, outcome: Outcome) -> None:
        """A command was applied."""
        match outcome:
            case RunClosed(session_id):
                self._note([session_id])
            case RangesMerged(order):
                self._note(end.session_id for end in order.consumed)
            case Forgotten(session_ids):
                self._note(session_ids)

    def _note(self, session_ids: Iterable[int]) -> None:
        state = self._replica.state
        if state is None:
            return
        for session_id in session_ids:
            if session_id in state.closed or session_id not in state.sessions:
                self._due[session_id] = state.instruction

    # Removing

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.remove_some()

    async def remove_some(self) -> None:
        """Remove what is not needed any more, but not too much at once.

        Storage errors, if the directory's names cannot be made durable.
        """
        await self._look_around()
        self._note(copy.session_id for copy in self._copies.all() if copy.session_id not in self._due)
        released = self._released()
        due = [
            one for one, instruction in self._due.items() if released is not None and instruction <= released
        ]
        removed = 0
        for session_id in due:
            if removed >= REMOVE_MAX:
                break
            session = self._replica.session(session_id)
            if session is not None and session.lives:
                del self._due[session_id]  # Its publisher has come again.
                continue
            removed += await self._remove(session_id)
        if removed:
            logger.info("closed_copies_removed count=%d left=%d", removed, len(self._due))
        for name in sorted(self._leftovers):
            await self._remove_leftover(name)

    async def _look_around(self) -> None:
        """Find copies of sessions that are closed or unknown, and what is left of removed ones."""
        if self._is_listed or self._replica.state is None:
            return
        self._is_listed = True
        try:
            names = await run_to_end(self._pool, self._list)
        except RtError as error:
            self._is_listed = False
            self._tell(self._directory, error)
            return
        self._leftovers.update(name for name in names if name.startswith(GONE))
        before = self._replica.state.next_session_id
        ids = (int(name) for name in names if name.isascii() and name.isdecimal())
        self._note(session_id for session_id in ids if 0 < session_id < before)

    def _list(self) -> list[str]:
        with storage_errors(self._directory, "listing session copies"):
            return REAL.list_directory(self._directory)

    async def _remove(self, session_id: int) -> bool:
        """Whether it was removed now; a copy in use, or one that cannot be removed, is looked at again."""
        copy = self._copies.get(session_id)
        if self._copies.is_busy(session_id) or (copy is not None and not copy.is_unused):
            return False
        if copy is not None:
            await self._copies.close_copy(copy)
        session = self._replica.session(session_id)
        if session is not None and session.lives:
            return False  # Its publisher came meanwhile.
        if not self._copies.begin_removal(session_id):
            return False
        name = os.path.basename(self._copies.path(session_id))
        try:
            failed = await run_to_end(self._pool, lambda: self._set_aside(name))
        except RtError as error:
            self._tell(name, error)
            return False
        finally:
            self._copies.end_removal(session_id)
        if failed is not None:
            raise failed
        self._told.pop(name, None)
        self._leftovers.add(GONE + name)
        self._due.pop(session_id, None)
        self._on_removed(session_id)
        return True

    def _set_aside(self, name: str) -> StorageError | None:
        """In a thread: give a copy another name, under which it is none. The error of making that durable."""
        path, aside = os.path.join(self._directory, name), os.path.join(self._directory, GONE + name)
        check_no_link(path)
        with storage_errors(path, _REMOVING), REAL.hold_directory(self._directory):
            if os.path.isdir(path):
                _remove_tree(aside)
                REAL.rename(path, aside)
            try:
                REAL.sync_directory(self._directory)
            except OSError as error:
                return storage_error(error, self._directory, _REMOVING)
        return None

    async def _remove_leftover(self, name: str) -> None:
        path = os.path.join(self._directory, name)
        try:
            with storage_errors(path, _REMOVING):
                await run_to_end(self._pool, lambda: _remove_tree(path))
        except RtError as error:
            self._tell(name, error)
        else:
            self._leftovers.discard(name)
            self._told.pop(name, None)

    def _tell(self, name: str, error: RtError) -> None:
        """Say it once, not at each try."""
        if self._told.get(name) != str(error):
            self._told[name] = str(error)
            logger.error("closed_copy_not_removed name=%s error=%r", name, str(error))


def _remove_tree(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)

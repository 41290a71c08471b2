"""Removes the replicas of closed sessions from this node's disk.

For one event loop. Invariants:
- A replica is removed only if its session is closed, and everything merged of it is durable in the merged log
  here and on a majority of the nodes. So no node needs its bytes to make its merged log.
- A replica that a stream or a fetch uses is kept. Later bytes of a publisher create a new one.
- A replica is removed as a whole: its directory is renamed, durably, before its first file is deleted.
- A replica that cannot be removed does not block others. It is tried again.
- Directories of sessions whose record was deleted are found at the start, too.
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

POLL_S: Final = 1.0
REMOVE_MAX: Final = 64
"""Maximum number of replicas removed in one round, so that streams and merging do not wait for it."""
GONE: Final = "gone."
"""Prefix of the name of a directory that is being removed."""

_REMOVING: Final = "removing the replica of a closed session"

logger = logging.getLogger("sequencer")


class ClosedReplicas:
    """`run` removes the replicas that are not needed any more.

    `released` returns the last instruction that is durable in the merged log here and on a majority; None
    while the one here is corrupt or incomplete.
    """

    def __init__(
        self,
        directory: str,
        follower: StateFollower,
        replicas: SessionReplicas,
        pool: Executor,
        released: Callable[[], int | None],
        on_removed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._directory, self._follower, self._replicas = directory, follower, replicas
        self._pool, self._released, self._on_removed = pool, released, on_removed
        self._due: dict[int, int] = {}
        """By session id: the instruction that must be durable first."""
        self._leftovers: set[str] = set()
        """Names of directories that are being removed."""
        self._is_listed = False
        """Whether the directory was listed since the last snapshot."""
        self._logged: dict[str, str] = {}
        """By name: the last error that was logged."""

    def on_snapshot(self) -> None:
        """List the directory again soon, for replicas of sessions that are closed or unknown now."""
        self._is_listed = False

    def on_applied(self, outcome: Outcome) -> None:
        match outcome:
            case RunClosed(session_id):
                self._record([session_id])
            case RangesMerged(plan):
                self._record(end.session_id for end in plan.consumed)
            case Forgotten(session_ids):
                self._record(session_ids)

    def _record(self, session_ids: Iterable[int]) -> None:
        state = self._follower.state
        if state is None:
            return
        for session_id in session_ids:
            if session_id in state.closed or session_id not in state.sessions:
                self._due[session_id] = state.instruction

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.remove_some()

    async def remove_some(self) -> None:
        """Remove replicas that are not needed any more, at most `REMOVE_MAX`.

        Raises storage errors if the rename of a directory cannot be made durable.
        """
        await self._find_closed()
        self._record(
            replica.session_id for replica in self._replicas.all() if replica.session_id not in self._due
        )
        released = self._released()
        due = [
            one for one, instruction in self._due.items() if released is not None and instruction <= released
        ]
        removed = 0
        for session_id in due:
            if removed >= REMOVE_MAX:
                break
            session = self._follower.session(session_id)
            if session is not None and session.active_runs:
                del self._due[session_id]  # Its publisher came back.
                continue
            removed += await self._remove(session_id)
        if removed:
            logger.info("closed_replicas_removed count=%d left=%d", removed, len(self._due))
        for name in sorted(self._leftovers):
            await self._remove_leftover(name)

    async def _find_closed(self) -> None:
        """Find replicas of sessions that are closed or unknown, and leftovers of removed ones."""
        if self._is_listed or self._follower.state is None:
            return
        self._is_listed = True
        try:
            names = await run_to_end(self._pool, self._list)
        except RtError as error:
            self._is_listed = False
            self._log_once(self._directory, error)
            return
        self._leftovers.update(name for name in names if name.startswith(GONE))
        before = self._follower.state.next_session_id
        ids = (int(name) for name in names if name.isascii() and name.isdecimal())
        self._record(session_id for session_id in ids if 0 < session_id < before)

    def _list(self) -> list[str]:
        with storage_errors(self._directory, "listing session replicas"):
            return REAL.list_directory(self._directory)

    async def _remove(self, session_id: int) -> bool:
        """Remove a replica, and return whether it was removed. A replica that is in use, or cannot be
        removed, is tried again.
        """
        replica = self._replicas.get(session_id)
        if self._replicas.is_busy(session_id) or (replica is not None and not replica.is_unused):
            return False
        if replica is not None:
            await self._replicas.close_replica(replica)
        session = self._follower.session(session_id)
        if session is not None and session.active_runs:
            return False  # Its publisher came back meanwhile.
        if not self._replicas.start_removal(session_id):
            return False
        name = os.path.basename(self._replicas.path(session_id))
        try:
            failed = await run_to_end(self._pool, lambda: self._set_aside(name))
        except RtError as error:
            self._log_once(name, error)
            return False
        finally:
            self._replicas.end_removal(session_id)
        if failed is not None:
            raise failed
        self._logged.pop(name, None)
        self._leftovers.add(GONE + name)
        self._due.pop(session_id, None)
        self._on_removed(session_id)
        return True

    def _set_aside(self, name: str) -> StorageError | None:
        """In a thread: rename the directory of a replica, so that it is no replica any more. Return the error
        if the rename cannot be made durable.
        """
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
            self._log_once(name, error)
        else:
            self._leftovers.discard(name)
            self._logged.pop(name, None)

    def _log_once(self, name: str, error: RtError) -> None:
        if self._logged.get(name) != str(error):
            self._logged[name] = str(error)
            logger.error("closed_replica_not_removed name=%s error=%r", name, str(error))


def _remove_tree(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)

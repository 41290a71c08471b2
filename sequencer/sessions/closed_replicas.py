"""Removing the copies of closed sessions from this node's disk.

For one event loop. Invariants:
- A copy is removed only if its session is closed, and everything merged of it is durable in the merged log
  here and on a majority of the nodes. So no node needs its bytes to make what is merged.
- A copy that a stream or a fetch uses stays. What a publisher brings later makes another one.
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
from rt.errors import RtError
from rt.log.disk import REAL, storage_errors
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.apply_result import Forgotten, Outcome, RangesMerged, RunClosed
from sequencer.state.state import SequencerState

LOOK_S: Final = 1.0
REMOVE_MAX: Final = 64
"""Copies that are removed in one go: streams and merging are not to wait for it."""
GONE: Final = "gone."
"""Begins the name of a directory that is being removed."""

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

    # What the process hears

    def on_snapshot(self, state: SequencerState) -> None:
        """Look at what is here of sessions that are closed, or unknown by now."""
        for name in os.listdir(self._directory):
            if name.startswith(GONE):
                shutil.rmtree(os.path.join(self._directory, name), ignore_errors=True)
            session_id = int(name) if name.isdecimal() else 0
            session = state.sessions.get(session_id)
            if 0 < session_id < state.next_session_id and (session is None or not session.lives):
                self._due[session_id] = state.instruction

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
        """Remove what is not needed any more, but not too much at once."""
        self._note(copy.session_id for copy in self._copies.all() if copy.session_id not in self._due)
        released = self._released()
        if released is None:
            return
        due = [one for one, instruction in self._due.items() if instruction <= released]
        removed = 0
        for session_id in due:
            if removed >= REMOVE_MAX:
                break
            session = self._replica.session(session_id)
            if session is not None and session.lives:
                del self._due[session_id]  # Its publisher has come again.
                continue
            try:
                removed += await self._remove(session_id)
            except RtError as error:  # It is tried again.
                logger.error("closed_copy_not_removed id=%d error=%r", session_id, str(error))
                return
        if removed:
            logger.info("closed_copies_removed count=%d left=%d", removed, len(self._due))

    async def _remove(self, session_id: int) -> bool:
        """Whether it was removed now; a copy in use is looked at again later."""
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
        try:
            await run_to_end(self._pool, lambda: self._remove_directory(self._copies.path(session_id)))
        finally:
            self._copies.end_removal(session_id)
        self._due.pop(session_id, None)
        self._on_removed(session_id)
        return True

    def _remove_directory(self, path: str) -> None:
        """In a thread. Renamed first: what is left of it after a crash is no copy."""
        aside = os.path.join(self._directory, f"{GONE}{os.path.basename(path)}")
        with storage_errors(path, "removing the copy of a closed session"):
            if os.path.isdir(path):
                shutil.rmtree(aside, ignore_errors=True)
                REAL.rename(path, aside)
            shutil.rmtree(aside, ignore_errors=True)

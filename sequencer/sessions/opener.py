"""The copies that this node must have: opened, told of, and final where a life was fenced.

For one event loop. Laws. A copy that cannot be opened now is tried again for as long as its session is known.
That a disk has joined is answered only once all is open that is here of sessions which were open by then; so
not before what earlier terms committed was heard, for a snapshot knows nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

from replicator.protocol.messages import LogOffset
from rt.errors import Corrupt, RtError
from sequencer.ipc.data_reports import DataReports
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.merge_progress import consumed_number, consumed_place
from sequencer.sessions.replicas import SessionReplica, SessionReplicas
from sequencer.state.state import Session
from sequencer.state.write_plan import SessionEnd

OPEN_AGAIN_S: Final = 2.0
"""How long until a copy that could not be opened is tried again: there may be space by then."""
LOOK_S: Final = 0.1
"""How often it is looked at whether all copies are open."""

logger = logging.getLogger("sequencer")


class Opener:
    """Opens copies as sessions are heard of. `spawn` does work beside the rest."""

    def __init__(
        self,
        replica: StateFollower,
        copies: SessionReplicas,
        reports: DataReports,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_damaged: Callable[[Corrupt], object],
    ) -> None:
        """`on_damaged` hears of copies that do not verify; they are tried again all the same."""
        self._replica, self._copies, self._reports = replica, copies, reports
        self._spawn, self._on_damaged = spawn, on_damaged
        self._opening: set[int] = set()
        """Sessions whose copies are being opened."""
        self._control = 0
        """Counts the control processes that were to be answered."""

    # What the process hears

    def take_up(self, session: Session, *, is_input: bool) -> None:
        """Control begins anew: open the copy if there is something to merge, and say what is there.

        `is_input`: an order that is not carried out yet may need it, though the session may be over.
        """
        copy = self._copies.get(session.id)
        if copy is not None:
            _note_merged(copy, session)
            for report in copy.reports(consumed_place(session)):
                self._reports.segment(report)
            for life in session.lives:
                if life.is_fenced and life.end is None and life.run not in copy.finals:
                    self._spawn(self.finish(session.id, life.run))
        elif self._is_wanted(session, is_input=is_input):
            self._open_soon(session.id)

    def _is_wanted(self, session: Session, *, is_input: bool) -> bool:
        """Whether control, or the merger, needs to hear of what is here of a session."""
        if is_input and os.path.isdir(self._copies.path(session.id)):
            return True
        life = session.life
        return life is not None and (life.is_fenced or not self._copies.is_idle(session))

    def begin(self) -> None:
        """Control is away, or another one: what the last one was to be answered is void."""
        self._control += 1

    def on_opened(self, session_id: int) -> None:
        """A life is open: a copy that is here of an earlier start of this process is told of."""
        if self._copies.get(session_id) is None and os.path.isdir(self._copies.path(session_id)):
            self._open_soon(session_id)

    def on_merged(self, end: SessionEnd) -> None:
        """The cluster merged a session up to there."""
        copy = self._copies.get(end.session_id)
        if copy is not None:
            copy.store.record_merged(LogOffset(end.run, end.roll, end.offset), end.number)
        else:
            self._open_soon(end.session_id)

    async def finish(self, session_id: int, run: int) -> None:
        """X is fenced: say what is final of it."""
        copy = self._copies.get(session_id)
        if copy is None:
            self._open_soon(session_id)  # Which says it then.
        else:
            await self._copies.finish(copy, run)

    def confirm(self, joins: int) -> None:
        """Say, once it is so, that all was told which is durable here now that so many disks have joined."""
        self._spawn(self._confirm(joins, self._control))

    async def _confirm(self, joins: int, control: int) -> None:
        while control == self._control and not self._replica.is_caught_up:
            await asyncio.sleep(LOOK_S)
        unread = set(self._opening)
        while unread & self._opening:
            await asyncio.sleep(LOOK_S)
        if control == self._control:
            self._reports.joins(joins)

    # Opening

    async def opened(self, session_id: int) -> SessionReplica | None:
        """The copy, open, however long that takes; None if the session is not known any more."""
        told = ""
        while (session := self._replica.session(session_id)) is not None:
            try:
                return await self._copies.open_copy(session)
            except RtError as error:
                if isinstance(error, Corrupt):
                    self._on_damaged(error)
                if str(error) != told:
                    told = str(error)
                    logger.error(
                        "session_replica_failed session=%s id=%d error=%r", session.name, session_id, told
                    )
            await asyncio.sleep(OPEN_AGAIN_S)
        return None

    def _open_soon(self, session_id: int) -> None:
        """Open a copy, unless that is under way, and say what is final of it."""
        if session_id not in self._opening:
            self._opening.add(session_id)  # From now on it is waited for.
            self._spawn(self._open(session_id))

    async def _open(self, session_id: int) -> None:
        try:
            copy = await self.opened(session_id)
        finally:
            self._opening.discard(session_id)
        session = self._replica.session(session_id)
        if copy is None or session is None:
            return
        _note_merged(copy, session)
        for life in session.lives:
            if life.is_fenced and life.end is None:
                await self._copies.finish(copy, life.run)


def _note_merged(copy: SessionReplica, session: Session) -> None:
    place = consumed_place(session)
    if place is not None:
        copy.store.record_merged(place, consumed_number(session) or 0)

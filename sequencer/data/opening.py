"""The copies that this node must have: opened, told of, and final where a life was fenced.

For one event loop. The law: a copy that cannot be opened now is tried again for as long as its session is
known; that a disk has joined is answered only once all that was to be opened by then is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from replicator.items import Place
from rt.errors import Damaged, RtError
from sequencer.data.consumed import consumed_number, consumed_place
from sequencer.data.copies import Copies, Copy
from sequencer.data.replica import Replica
from sequencer.data.reports import Reports
from sequencer.orders import SessionEnd
from sequencer.state import Session

OPEN_AGAIN_S: Final = 2.0
"""How long until a copy that could not be opened is tried again: there may be space by then."""
LOOK_S: Final = 0.1
"""How often it is looked at whether all copies are open."""

logger = logging.getLogger("sequencer")


class Opener:
    """Opens copies as sessions are heard of. `spawn` does work beside the rest."""

    def __init__(
        self,
        replica: Replica,
        copies: Copies,
        reports: Reports,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_damaged: Callable[[Damaged], object],
    ) -> None:
        """`on_damaged` hears of copies that do not verify; they are tried again all the same."""
        self._replica, self._copies, self._reports = replica, copies, reports
        self._spawn, self._on_damaged = spawn, on_damaged
        self._opening: set[int] = set()
        """Sessions whose copies are being opened."""

    # What the process hears

    def take_up(self, session: Session) -> None:
        """Control begins anew: open the copy if there is something to merge, and say what is there."""
        copy = self._copies.get(session.id)
        if copy is not None:
            _note_merged(copy, session)
            for report in copy.reports(consumed_place(session)):
                self._reports.segment(report)
            for life in session.lives:
                if life.is_fenced and life.end is None and life.x not in copy.finals:
                    self._spawn(self.finish(session.id, life.x))
        elif session.lives:
            self._spawn(self._open(session.id))

    def on_merged(self, end: SessionEnd) -> None:
        """The cluster merged a session up to there."""
        copy = self._copies.get(end.session_id)
        if copy is not None:
            copy.store.note_merged(Place(end.x, end.y, end.offset), end.number)
        elif end.session_id not in self._opening:
            self._spawn(self._open(end.session_id))

    async def finish(self, session_id: int, x: int) -> None:
        """X is fenced: say what is final of it."""
        copy = self._copies.get(session_id)
        if copy is None:
            await self._open(session_id)
        else:
            await self._copies.finish(copy, x)

    async def confirm(self, joins: int) -> None:
        """Say that all was told which is durable here now that so many disks have joined."""
        unread = set(self._opening)
        while unread & self._opening:
            await asyncio.sleep(LOOK_S)
        self._reports.joins(joins)

    # Opening

    async def opened(self, session_id: int) -> Copy | None:
        """The copy, open, however long that takes; None if the session is not known any more."""
        told = ""
        while (session := self._replica.session(session_id)) is not None:
            try:
                return await self._copies.open_copy(session)
            except RtError as error:
                if isinstance(error, Damaged):
                    self._on_damaged(error)
                if str(error) != told:
                    told = str(error)
                    logger.error(
                        "session_copy_failed session=%s id=%d error=%r", session.name, session_id, told
                    )
            await asyncio.sleep(OPEN_AGAIN_S)
        return None

    async def _open(self, session_id: int) -> None:
        """Open a copy, unless that is under way, and say what is final of it."""
        if session_id in self._opening:
            return
        self._opening.add(session_id)
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
                await self._copies.finish(copy, life.x)


def _note_merged(copy: Copy, session: Session) -> None:
    place = consumed_place(session)
    if place is not None:
        copy.store.note_merged(place, consumed_number(session) or 0)

"""Closing session copies that nothing uses: their files are opened again when something comes for them.

For one event loop. Invariants:
- A copy is closed only while no stream feeds it, nothing is done to it, and everything in it is durable.
- Everything in it is merged by the cluster, and durable in the merged logs of this node and of a majority. So
  the merger needs nothing of it, and whoever asks for its bytes reads the files.
- What is merged of it is trimmed first: nobody trims it while it is closed.
- What a publisher announced of a life that is open, or what is final of it, is not forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from rt.errors import DiskFull
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.merge_progress import consumed_place
from sequencer.sessions.replicas import SessionReplica, SessionReplicas
from sequencer.state.state import Session

OPEN_MAX: Final = 256
"""Copies that stay open although nothing uses them: three or four descriptors each."""
IDLE_S: Final = 5.0
"""A copy is not closed sooner after its last use."""
LOOK_S: Final = 1.0

logger = logging.getLogger("sequencer")


class IdleReplicas:
    """Closes the copies that were not used for the longest time, but for `open_max`."""

    def __init__(
        self,
        replica: StateFollower,
        copies: SessionReplicas,
        is_released: Callable[[int], bool],
        *,
        open_max: int = OPEN_MAX,
        idle_s: float = IDLE_S,
    ) -> None:
        self._replica, self._copies, self._is_released = replica, copies, is_released
        self._open_max, self._idle_s = open_max, idle_s

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.close_some()

    async def close_some(self) -> None:
        """Close as many as are too many, if so many are idle."""
        too_many = len(self._copies.all()) - self._open_max
        if too_many <= 0:
            return
        before_s = asyncio.get_running_loop().time() - self._idle_s
        closed = 0
        for copy in sorted(self._copies.all(), key=lambda one: one.used_s):
            if closed >= too_many or copy.used_s > before_s:
                break
            closed += await self._close(copy)
        if closed:
            logger.debug("idle_copies_closed count=%d", closed)

    async def _close(self, copy: SessionReplica) -> bool:
        """Whether it was closed: it is looked at again, for what was done before took a while."""
        if not self._is_idle(copy):
            return False
        session = self._replica.session(copy.session_id)
        place = None if session is None else consumed_place(session)
        if place is not None:
            try:
                await self._copies.trim(copy, place)
            except DiskFull as error:
                logger.warning("trim_deferred session_id=%d error=%r", copy.session_id, str(error))
                return False
            if not self._is_idle(copy):
                return False
        await self._copies.close_copy(copy)
        return True

    def _is_idle(self, copy: SessionReplica) -> bool:
        if self._copies.get(copy.session_id) is not copy:
            return False
        session = self._replica.session(copy.session_id)
        if not copy.is_unused or not self._is_released(copy.session_id):
            return False
        return session is None or is_merged_whole(copy, session)


def is_merged_whole(copy: SessionReplica, session: Session) -> bool:
    """Whether nothing in the copy is still to be merged, and nothing else that is known of it is needed."""
    place, consumed = copy.receiver.next_offset, consumed_place(session)
    if place is not None and (consumed is None or place > consumed):
        return False
    life = session.life
    return life is None or not any(run >= life.run for run in (*copy.announced, *copy.finals))

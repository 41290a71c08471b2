"""Closes session replicas that nothing uses. They are opened again when bytes arrive for them.

For one event loop. Invariants of a replica that is closed:
- No stream feeds it, no operation runs on it, and everything in it is durable.
- Everything in it is merged, durably on this node and on a majority. So the merger needs nothing of it, and
  readers of its bytes read the files.
- Its merged segments were trimmed before, because nothing trims it while it is closed.
- It has no announced or final end of a run that is open, because closing it forgets them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from rt.errors import DiskFull
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.merge_progress import consumed_place
from sequencer.sessions.replica import SessionReplica
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.state import Session

OPEN_MAX: Final = 256
"""Replicas that stay open although nothing uses them: three or four descriptors each."""
IDLE_S: Final = 5.0
"""Minimum time between the last use of a replica and its closing."""
POLL_S: Final = 1.0

logger = logging.getLogger("sequencer")


class IdleReplicas:
    """Closes the least recently used replicas, so that about `open_max` stay open."""

    def __init__(
        self,
        follower: StateFollower,
        replicas: SessionReplicas,
        is_released: Callable[[int], bool],
        *,
        open_max: int = OPEN_MAX,
        idle_s: float = IDLE_S,
    ) -> None:
        self._follower, self._replicas, self._is_released = follower, replicas, is_released
        self._open_max, self._idle_s = open_max, idle_s

    async def run(self) -> None:
        """Check once a second, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.close_some()

    async def close_some(self) -> None:
        too_many = len(self._replicas.all()) - self._open_max
        if too_many <= 0:
            return
        before_s = asyncio.get_running_loop().time() - self._idle_s
        closed = 0
        for replica in sorted(self._replicas.all(), key=lambda one: one.used_s):
            if closed >= too_many or replica.used_s > before_s:
                break
            closed += await self._close(replica)
        if closed:
            logger.debug("idle_replicas_closed count=%d", closed)

    async def _close(self, replica: SessionReplica) -> bool:
        """Close the replica if it is idle, and return whether it was closed. This is checked twice, because
        trimming takes time.
        """
        if not self._is_idle(replica):
            return False
        session = self._follower.session(replica.session_id)
        place = None if session is None else consumed_place(session)
        if place is not None:
            try:
                await self._replicas.trim(replica, place)
            except DiskFull as error:
                logger.warning("trim_deferred session_id=%d error=%r", replica.session_id, str(error))
                return False
            if not self._is_idle(replica):
                return False
        await self._replicas.close_replica(replica)
        return True

    def _is_idle(self, replica: SessionReplica) -> bool:
        if self._replicas.get(replica.session_id) is not replica:
            return False
        session = self._follower.session(replica.session_id)
        if not replica.is_unused or not self._is_released(replica.session_id):
            return False
        return session is None or is_merged_whole(replica, session)


def is_merged_whole(replica: SessionReplica, session: Session) -> bool:
    """Whether the cluster merged all of the replica, and its announced and final ends are not needed."""
    place, consumed = replica.receiver.next_offset, consumed_place(session)
    if place is not None and (consumed is None or place > consumed):
        return False
    opened = session.active
    return opened is None or not any(run >= opened.run for run in (*replica.announced, *replica.finals))

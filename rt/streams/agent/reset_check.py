"""Finds out whether the queue was reset by force since positions were stored, and moves them back if it was.

Invariants:
- The epoch is stored in the commit that moves the positions. So a reset is noticed once, by the host that
  opens the store next.
- A position is never used if it may refer to another event than when it was stored.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from rt.errors import RtError
from rt.streams.core.errors import QueueReset
from rt.streams.core.stream_id import SequenceToken
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.queue.adapter import QueueGap
from rt.streams.queue.queue_epoch import QueueEpoch
from rt.streams.subscriptions.subscription_store import SubscriptionStore

logger = logging.getLogger("rt.streams")

_KNOWN_S: Final = 5.0
"""How long the queue may take to report its epoch, in seconds."""
_AGAIN_S: Final = 5.0


class ResetCheck:
    """The check of one queue, for one agent."""

    def __init__(self, queue: ServedQueue, store: SubscriptionStore) -> None:
        self._queue, self._store = queue, store
        self._is_known = False

    async def enter(self) -> None:
        """Check for a reset and edit the store; the caller commits the store. If the queue does not answer,
        `run` checks for a reset later.
        """
        try:
            async with asyncio.timeout(_KNOWN_S):
                epoch = await self._queue.adapter.epoch(self._queue.id)
        except (RtError, TimeoutError) as error:
            logger.warning("queue_epoch_unknown queue=%s error=%r", self._queue.id, error)
            return
        self._is_known = True
        if epoch is not None:
            self._enter(epoch)

    def _enter(self, epoch: QueueEpoch) -> None:
        queue, store = self._queue, self._store
        queue.log_end = SequenceToken(epoch.end)
        low = store.low
        changed = epoch.changed_from(store.epoch, None if low is None else low.sequence_number)
        store.epoch = epoch.stored
        if changed is not None:
            queue.counts.resets += 1
            at, was = SequenceToken(changed), store.furthest()
            if was is not None:
                reason = f"a reset of the queue was forced: positions from {changed} on have other events now"
                store.go_back(QueueGap(at, at, reason, is_reset=True))
                queue.counts.gaps += was > at
                logger.warning("queue_reset queue=%s stored=%s resumed=%s", queue.id, was, at)
        low = store.low  # It may have gone back.
        queue.resets = store.resets
        queue.recent_reset = next(
            (gap for gap in queue.resets if low is not None and gap.resumed >= low), None
        )

    async def run(self) -> None:
        """Ask until the queue answers. `QueueReset` if the positions in use are older than a forced reset."""
        while not self._is_known:
            await asyncio.sleep(_AGAIN_S)
            read = self._queue.cache.end.sequence_number
            try:
                epoch = await self._queue.adapter.epoch(self._queue.id)
            except RtError as error:
                if not error.retriable:
                    return
                continue
            self._is_known = True
            if epoch is None:
                return
            if epoch.changed_from(self._store.epoch, read) is not None:
                raise QueueReset("a reset of the cluster was forced", where=self._queue.id)
            self._store.epoch = epoch.stored
            self._queue.log_end = SequenceToken(epoch.end)

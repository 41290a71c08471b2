"""Makes the positions of a queue's consumers durable, then acknowledges them to the queue.

Invariant: the queue is acknowledged only up to what every subscription has, served here or not, and only
after that is durable.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rt.streams.agent.served_queue import ServedQueue
from rt.streams.agent.subscription_store import SubscriptionStore
from rt.streams.agent.subscription_table import SubscriptionTable
from rt.streams.core.stream_id import SequenceToken
from rt.streams.queue.adapter import QueueReceiver

_SAVE_SHARE: Final = 20
"""Saving uses at most a twentieth of the time. With many consumers it is less frequent than
`save_every_s`.
"""


class PositionSaver:
    """Saves the positions in `table` to `store` and acknowledges them to `receiver`."""

    def __init__(
        self, queue: ServedQueue, table: SubscriptionTable, store: SubscriptionStore, receiver: QueueReceiver
    ) -> None:
        self._queue = queue
        self._table = table
        self._store = store
        self._receiver = receiver
        self._acknowledged: SequenceToken | None = None
        self._is_saving = asyncio.Lock()

    async def run(self) -> None:
        """Save again and again, and remove the streams that had no events for `inactive_s`."""
        now, options = self._queue.now, self._queue.options
        wait, look_for_idle_at = options.save_every_s, now() + options.inactive_s / 10
        while True:
            await asyncio.sleep(wait)
            before = now()
            if before >= look_for_idle_at:
                look_for_idle_at = before + options.inactive_s / 10
                idle = self._table.forget_idle(options.inactive_s)
                await asyncio.gather(*(consumer.close() for consumer in idle))
            await self.save()
            wait = max(options.save_every_s, _SAVE_SHARE * (now() - before))

    async def save(self) -> None:
        async with self._is_saving:
            low = self._queue.cache.low()
            if self._store.low is not None or self._queue.counts.reads:
                self._table.note(low)
            done = self._lowest_needed(low)
            if self._store.is_dirty:
                await self._store.commit()
                self._queue.counts.saves += 1
            # Events accepted during the commit are not durable yet, and a consumer may have gone back.
            done = min(done, self._lowest_needed(self._queue.cache.low()))
            if self._acknowledged is None or done > self._acknowledged:
                await self._receiver.acknowledge(done)
                self._acknowledged = done

    def _lowest_needed(self, low: SequenceToken) -> SequenceToken:
        """The first token that some subscription needs. `low` is the same for those in the cache."""
        return min([low, *self._table.reread_positions()]) if self._queue.is_rewindable else low

"""Makes the positions of a queue's consumers durable, then acknowledges them to the queue.

Invariants:
- The queue is acknowledged only up to the position that every subscription has reached, served here or not,
  and only after that position is durable.
- Events that a consumer has accepted are durable after `save_every_s` and two commits, however long the
  commits wait for the disk. So a kill repeats no older events. It takes longer in three cases. Commits of
  changed subscriptions add their time. A save adds its time if it occupies the event loop for more than a
  tenth of `save_every_s`. An acknowledgement adds its time if it takes longer than `save_every_s`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rt.streams.agent.subscription_table import SubscriptionTable
from rt.streams.core.stream_id import SequenceToken
from rt.streams.delivery.consumer import Consumer
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.queue.adapter import QueueReceiver
from rt.streams.subscriptions.subscription_store import SubscriptionStore

_REST: Final = 9
"""After a save the event loop has nine times as long for other work. So saving takes at most a tenth of its
time. Waiting for the disk does not count.
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
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Save again and again, and remove the streams that had no events for `inactive_s`."""
        now, options = self._queue.now, self._queue.options
        save_at, look_for_idle_at = now() + options.save_every_s, now() + options.inactive_s / 10
        try:
            while True:
                await asyncio.sleep(max(0.0, save_at - now()))
                before = now()
                if before >= look_for_idle_at:
                    look_for_idle_at = before + options.inactive_s / 10
                    self._close(self._table.forget_idle(options.inactive_s))
                busy_s = await self.save()
                save_at = max(before + options.save_every_s, now() + _REST * busy_s)
        finally:
            for closing in self._closing:
                closing.cancel()

    def _close(self, consumers: list[Consumer]) -> None:
        """Do not wait for them: some may need seconds."""
        for consumer in consumers:
            closing = asyncio.create_task(consumer.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def save(self) -> float:
        """Save and acknowledge positions. Returns how many seconds this kept the event loop from other
        work.
        """
        async with self._is_saving:
            now = self._queue.now
            begun = now()
            low = self._queue.cache.low()
            if self._store.low is not None or self._queue.counts.reads:
                self._table.record_positions(low)
            done = self._lowest_needed(low)
            busy_s = now() - begun
            if self._store.is_dirty:
                await self._store.commit()
                busy_s += self._store.prepared_s
                self._queue.counts.saves += 1
            # Events accepted during the commit are not durable yet, and a consumer may have gone back.
            done = min(done, self._lowest_needed(self._queue.cache.low()))
            if self._acknowledged is None or done > self._acknowledged:
                await self._receiver.acknowledge(done)
                self._acknowledged = done
            return busy_s

    def _lowest_needed(self, low: SequenceToken) -> SequenceToken:
        """The first token that any subscription needs. `low` is the first token that the subscriptions in the
        cache need.
        """
        return min([low, *self._table.reread_positions()]) if self._queue.is_rewindable else low

"""The failed deliveries of one consumer: how many events to deliver next, and when an event is given up.

Invariant: after a failure events are retried one at a time, to find the one that fails.
"""

from __future__ import annotations

import asyncio
import logging

from rt.streams.agent.served_queue import ServedQueue
from rt.streams.agent.subscription_store import SubscriptionRecord
from rt.streams.core.errors import DeliveryFailed
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken
from rt.streams.observer import DeadLetter

logger = logging.getLogger("rt.streams")


class PoisonPolicy:
    """The policy of the provider, applied to one consumer."""

    __slots__ = ("_at", "_attempt", "_queue", "_record", "_since", "batch_events")

    def __init__(self, queue: ServedQueue, record: SubscriptionRecord) -> None:
        self._queue = queue
        self._record = record
        self._at: SequenceToken | None = None
        """Where the last try failed."""
        self._since = 0.0
        self._attempt = 0
        self.batch_events = queue.options.batch_events_max
        """How many events to deliver next."""

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._at is not None

    def succeeded(self) -> None:
        self._at = None
        if self.batch_events < self._queue.options.batch_events_max:
            self.batch_events = min(2 * self.batch_events, self._queue.options.batch_events_max)

    def failed(self, at: SequenceToken, error: BaseException) -> bool:
        """Record a failed try. Returns whether it was tried for long enough."""
        now = asyncio.get_running_loop().time()
        if self._at != at:
            self._at, self._since, self._attempt = at, now, 0
        self._attempt += 1
        self.batch_events = 1
        self._queue.counts.failures += 1
        logger.info("delivery_failed stream=%s token=%s error=%r", self._record.stream, at, error)
        return now - self._since >= self._queue.options.deliver_for_s

    def wait_s(self) -> float:
        """How long to wait until the next try, in seconds."""
        return self._queue.backoff(self._attempt)

    async def discard(self, batch: EventBatch, failed: DeliveryFailed) -> bool:
        """Send its one event to the dead letters. Returns False if they do not accept it."""
        assert self._queue.dead_letters is not None
        at, stream = batch.first, self._record.stream
        try:
            await self._queue.dead_letters(DeadLetter(self._record.id, stream, at, batch.events[0], failed))
        except Exception as error:  # noqa: BLE001 - the event is retried
            logger.warning("dead_letter_store_failed stream=%s token=%s error=%r", stream, at, error)
            return False
        self._queue.counts.dead_letters += 1
        self._at = None
        return True

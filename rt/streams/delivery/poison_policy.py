"""The failed deliveries of one consumer: how many events to deliver next, and when an event is given up.

Invariant: after a failure events are retried one at a time, to find the one that fails.
"""

from __future__ import annotations

import asyncio
import logging

from rt.errors import UndecodableValue
from rt.streams.core.delivery import DeliveryOptions
from rt.streams.core.delivery import PoisonPolicy as Policy
from rt.streams.core.errors import DeliveryFailed
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.observer import DeadLetter
from rt.streams.subscriptions.subscription_store import SubscriptionRecord

logger = logging.getLogger("rt.streams")


class PoisonPolicy:
    """The policy of one consumer. Fields that are unset in `own` are taken from the provider's options."""

    __slots__ = (
        "_at",
        "_attempt",
        "_begun_at",
        "_most_events",
        "_queue",
        "_record",
        "_since",
        "batch_events",
        "on_poison",
        "own",
    )

    def __init__(self, queue: ServedQueue, record: SubscriptionRecord, own: DeliveryOptions) -> None:
        self._queue = queue
        self.own = own
        default: Policy = "block" if record.is_implicit else "fault"
        self.on_poison: Policy = own.on_poison or queue.options.on_poison or default
        self._record = record
        self._at: SequenceToken | None = None
        """Where the last try failed."""
        self._since = 0.0
        """When the first try at `_at` failed. `_begun_at`: when that try started."""
        self._begun_at = 0.0
        self._attempt = 0
        self._most_events = own.batch_size or queue.options.batch_events_max
        self.batch_events = self._most_events
        """How many events to deliver next."""

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._at is not None

    def age_s(self, now: float) -> float:
        """How long the tries at one position have been failing at `now`, in the loop's time."""
        return 0.0 if self._at is None else now - self._begun_at

    def succeeded(self) -> None:
        self._at = None
        if self.batch_events < self._most_events:
            self.batch_events = min(2 * self.batch_events, self._most_events)

    def take_single_events(self) -> None:
        """Deliver one event at a time from now on."""
        self.batch_events = self._most_events = 1

    def failed(self, at: SequenceToken, error: BaseException, begun_at: float) -> bool:
        """Record a failed try, which started at `begun_at`. Returns whether the event was tried for long
        enough. If an event cannot be decoded, it needs no other try.
        """
        now = asyncio.get_running_loop().time()
        if self._at != at:
            self._at, self._since, self._begun_at, self._attempt = at, now, begun_at, 0
        self._attempt += 1
        self.batch_events = 1
        self._queue.counts.failures += 1
        if (left_out := self._queue.warnings.admit(now)) is not None:
            logger.warning(
                "delivery_failed stream=%s subscription=%s token=%s try=%d error=%r left_out=%d",
                self._record.stream,
                self._record.label,
                at,
                self._attempt,
                error,
                left_out,
            )
        is_final = isinstance(error, UndecodableValue)
        return is_final or now - self._since >= self._queue.options.deliver_for_s

    def failure(self, what: str, at: SequenceToken, cause: Exception) -> DeliveryFailed:
        """The error that reports the failure at `at`: the consumer does not do `what`."""
        failed = DeliveryFailed(
            f"a consumer does not {what}",
            where=f"{self._record.stream}, token {at}",
            got=f"{type(cause).__name__}: {cause}"[:500],
        )
        failed.__cause__ = cause
        return failed

    def wait_s(self) -> float:
        """How long to wait until the next try, in seconds."""
        return self._queue.backoff(self._attempt)

    async def discard(self, batch: EventBatch, failed: DeliveryFailed) -> bool:
        """Send the only event of `batch` to the dead letters. Returns False if they do not accept it."""
        at, stream = batch.first, self._record.stream
        try:
            letter = DeadLetter(self._record.label, stream, at, batch.events[0], failed)
            await self._queue.dead_letters(letter)
        except Exception as error:  # noqa: BLE001 - the event is retried
            logger.warning("dead_letter_store_failed stream=%s token=%s error=%r", stream, at, error)
            return False
        self._queue.counts.dead_letters += 1
        self._at = None
        return True

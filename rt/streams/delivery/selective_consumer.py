"""A consumer that gets some events of its stream, decoded events, or batches that wait until they are full.

    cache ──window──► filter, serializer ──► full, or waited for long enough ──► observer

Invariants:
- The position moves past an event only if the observer accepted it, the filter refused it, or it went to the
  dead letters. Events that wait for more events are still needed.
- If an event cannot be examined or decoded, this is a failed try of that event alone.
- Events wait for more events in the cache only. While the cache is full, they are delivered at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from rt.serializers import Serializer
from rt.streams.core.delivery import DeliveryOptions
from rt.streams.core.errors import ConsumerGone
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.event_selection import EventSelection, Selected
from rt.streams.delivery.consumer import Consumer
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.observer import StreamObserver
from rt.streams.subscriptions.subscription_store import SubscriptionRecord

if TYPE_CHECKING:
    from rt.streams.agent.subscription_table import SubscriptionTable

_WINDOW_MAX: Final = 1000
"""The maximum number of events that are examined for one delivery, if the delivery takes fewer events."""
_TURN_EVENTS: Final = 256
"""After this many refused events, other work has its turn."""


class SelectiveConsumer(Consumer):
    """`serializer` decodes its events; None: they are delivered as they are."""

    __slots__ = ("_due_at", "_kept", "_selected", "_selection", "_timer", "_window", "_within_s")

    def __init__(
        self,
        queue: ServedQueue,
        table: SubscriptionTable,
        record: SubscriptionRecord,
        observer: StreamObserver,
        delivery: DeliveryOptions,
        serializer: Serializer[Any] | None,
    ) -> None:
        super().__init__(queue, table, record, observer, delivery)
        self._selection = EventSelection(delivery.where, serializer)
        self._within_s = delivery.batch_within_s
        self._window = 1
        self._kept: Selected | None = None
        """The selection from the events that wait for more events."""
        self._selected: Selected | None = None
        """The selection that is being delivered."""
        self._due_at: float | None = None
        """When the waiting events are delivered even if they are few, in the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        self._take = self._take_selected

    @property
    def window(self) -> int:
        """At least the number of events that one delivery takes, and more if the filter refuses most
        events.
        """
        return max(self.policy.batch_events, self._window)

    def deliver_now(self) -> bool:
        if self._timer is None:
            return False
        self._due_at = self._queue.now()
        self._cancel_timer()
        self.wake()
        return True

    async def close(self) -> None:
        self._cancel_timer()
        await super().close()

    def _take_selected(self, events_max: int) -> EventBatch | None:
        """Events to select from; None if there are none, or they wait for others."""
        self._cancel_timer()
        self.cursor.await_no_more()
        if self._within_s is None or events_max == 1:
            return self.cursor.take(self.window)
        most = max(events_max, _WINDOW_MAX)
        batch = self.cursor.take(most)
        if batch is None:
            self._kept = self._due_at = None
            return None
        selected = self._kept = self._selected_of(batch)
        missing = min(events_max - len(selected), most - len(batch))
        if self._gaps or selected.error is not None or not selected.originals or missing <= 0:
            return batch
        now = self._queue.now()
        if self._due_at is None:
            self._due_at = now + self._within_s
        if now >= self._due_at:
            return batch
        self.cursor.await_more(missing)
        self._timer = asyncio.get_running_loop().call_at(self._due_at, self._on_time)
        return None

    async def hand_out(self, batch: EventBatch) -> None:
        if self._gaps:
            before = batch.place_of(self._gaps.first.resumed)
            if not before:
                await self._pass_gap()
                return
            batch, self._kept = batch.slice(0, before), None
        self._calls.begun_at = self._queue.now()
        selected = self._selected_of(batch)
        self._kept = self._due_at = None
        self._window = min(2 * selected.examined, _WINDOW_MAX)
        if selected.batch is not None:
            self._selected = selected
            try:
                await super().hand_out(selected.batch)
            finally:
                self._selected = None
            if self.wanted == selected.batch.end:  # The filter refused the following events.
                self._queue.counts.filtered += selected.examined - len(selected)
                self.pass_over(selected.end)
        elif selected.examined:
            self._queue.counts.filtered += selected.examined
            self._move(selected.end, 0)
            if selected.examined >= _TURN_EVENTS:
                await asyncio.sleep(0)
        elif isinstance(selected.error, ConsumerGone):
            raise selected.error
        elif selected.error is not None:
            await self._failed(batch.slice(0, 1), selected.error)

    def _selected_of(self, batch: EventBatch) -> Selected:
        """The selection from `batch`. The part that was selected before is not examined again."""
        kept, events_max = self._kept, self.policy.batch_events
        if kept is None or kept.first != batch.first or kept.error is not None or len(kept) > events_max:
            return self._selection.select(batch, events_max)
        rest = batch.from_token(kept.end)
        if rest is None or len(kept) == events_max:
            return kept
        return kept.and_then(self._selection.select(rest, events_max - len(kept)))

    def _original(self, batch: EventBatch) -> EventBatch:
        selected = self._selected
        return batch if selected is None or batch is not selected.batch else selected.original

    def _on_time(self) -> None:
        self._timer = None
        self.wake()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

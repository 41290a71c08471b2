"""Delivers a stream's events to one consumer, at its own pace.

    waiting ──event──► delivering ──nothing left──► waiting
                        │    ▲
             evicted    ▼    │  has reached what the cache holds
                      catching up

Invariants:
- A consumer gets its stream's events in order. It advances only past events that it accepted, events that it
  reported in its token, and events that went to the dead letters.
- After it has ended in any way, it pins nothing.
- While there is nothing to deliver, it has no task. `ConsumerTasks` runs it when it is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from rt.streams.core.delivery import DeliveryOptions
from rt.streams.core.errors import ConsumerGone, DeliveryFailed, StreamError, SubscriptionFaulted
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, checked_token
from rt.streams.delivery.catch_up_reader import CatchUpReader
from rt.streams.delivery.gap_reports import GapReports
from rt.streams.delivery.observer_calls import ObserverCalls
from rt.streams.delivery.poison_policy import PoisonPolicy
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.observer import StreamObserver
from rt.streams.queue.adapter import QueueGap
from rt.streams.queue.queue_cache import CacheCursor
from rt.streams.subscriptions.subscription_store import SubscriptionRecord

if TYPE_CHECKING:
    from rt.streams.agent.subscription_table import SubscriptionTable

_AS_OPTIONS: Final = DeliveryOptions()


class _Ended(Exception):
    """Ends the run of a consumer. Does not leave this module."""


class Consumer:
    """One subscription while its queue is served here. Its cursor is parked until `seat`.

    It reports to `table`, which stores its position and its end.
    """

    __slots__ = (
        "_calls",
        "_catching_up",
        "_gaps",
        "_is_begun",
        "_is_closed",
        "_is_greeted",
        "_is_named",
        "_is_woken",
        "_queue",
        "_table",
        "_take",
        "_went_back_at",
        "cursor",
        "is_catching_up",
        "is_stopping",
        "policy",
        "record",
    )

    def __init__(
        self,
        queue: ServedQueue,
        table: SubscriptionTable,
        record: SubscriptionRecord,
        observer: StreamObserver,
        delivery: DeliveryOptions = _AS_OPTIONS,
    ) -> None:
        self._queue = queue
        self._table = table
        self.record = record
        self.cursor: CacheCursor = queue.cache.cursor(record.stream, self)
        self._take: Callable[[int], EventBatch | None] = self.cursor.take
        """Returns the next events to deliver from the cache."""
        self.is_catching_up = False
        self.is_stopping = False
        """Whether it gets no more events."""
        self.policy = PoisonPolicy(queue, record, delivery)
        self._calls = ObserverCalls(record.stream, observer, queue.deadlines)
        self._catching_up = CatchUpReader(queue, self)
        self._is_woken = False
        """Whether it runs or will run."""
        self._is_begun = False
        self._is_greeted = False
        self._is_closed = False
        self._is_named = True
        self._gaps = GapReports(record.stream, self._calls, self.policy)
        self._went_back_at: SequenceToken | None = None
        """The token of the delivery to which it last answered with an earlier position."""

    @property
    def wanted(self) -> SequenceToken:
        """The first token that it needs."""
        return self.cursor.wanted

    @property
    def is_idle(self) -> bool:
        """Whether it has everything that was read."""
        return not self._is_woken and not self.is_catching_up and not self.cursor.has_more

    @property
    def is_failing(self) -> bool:
        """Whether its last delivery, or the last read of its history, failed."""
        return self.policy.is_failing or self._catching_up.is_failing

    def waited_s(self, now: float) -> float:
        """How long its call under way has lasted, or its tries at one position have failed."""
        return max(self._calls.age_s(now), self.policy.age_s(now))

    def needs_before(self, low: SequenceToken) -> bool:
        """Whether it still needs an event before `low`, which has been read, or was by an earlier owner."""
        if self.is_catching_up:
            return True
        return self.wanted < low and (self.cursor.has_more or self._queue.cache.end < low)

    def seat(self, wanted: SequenceToken, *, is_named: bool = True) -> None:
        """Take the position `wanted` at once, in the cache or else in the history, so that no event from
        there on is dropped.

        If the queue cannot be read again, take the position of its oldest event, and report a gap. If the
        caller named no token, no gap is reported for the missing start of a queue.
        """
        queue, stream = self._queue, self.record.stream
        self._is_named = is_named
        if queue.cache.covers(stream, wanted):
            self.join_cache(wanted)
            return
        self.cursor.park()
        self.cursor.wanted = wanted
        if queue.is_rewindable:
            self.start_catch_up()
            return
        oldest = queue.cache.oldest(stream)
        self.add_gap(QueueGap(wanted, oldest, "the queue cannot be read again"))
        self.join_cache(oldest)

    def begin(self) -> None:
        self._is_begun = True
        self.wake()

    def wake(self) -> None:
        if not self._is_woken and self._is_begun and not self.is_stopping:
            self._is_woken = True
            self._queue.tasks.add(self)

    def start_catch_up(self) -> None:
        """Leave the cache and read the history, from the same position."""
        self.cursor.park()
        if not self.is_catching_up:
            self.is_catching_up = True
            self._table.on_catch_up_started(self)
        self.wake()

    @property
    def window(self) -> int:
        """How many events to examine for the next delivery."""
        return self.policy.batch_events

    def deliver_now(self) -> bool:
        """Deliver the events that wait for more events. Returns whether there are any."""
        return False

    def add_gap(self, gap: QueueGap, *, is_late: bool = False) -> None:
        """Report the gap before the events after it. `is_late`: also if those were passed."""
        is_beginning = not self._is_named and gap.wanted <= SequenceToken(0)
        if not is_beginning and (is_late or gap.resumed >= self.wanted) and self._gaps.add(gap):
            self.wake()

    async def stop(self, deadline: float) -> None:
        """Deliver nothing more. A call under way may last until `deadline`, in the loop's time.

        Its position stays pinned until `close`. Does not wait if the observer itself calls it.
        """
        self.is_stopping = True
        await self._calls.end(deadline)

    async def close(self) -> None:
        """Unpin its position and call `on_close`, once. Call after `stop`. Does not wait for an observer that
        hangs.
        """
        self.cursor.close()
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._calls.close()
        finally:
            self._table.on_closed(self)

    # Position

    def join_cache(self, wanted: SequenceToken) -> None:
        """Move into the cache, which covers `wanted`, with the gaps between there and its end."""
        if self.is_catching_up:
            self.is_catching_up = False
            self._table.on_caught_up(self)
        self.cursor.place(wanted)
        for gap in self._queue.gaps:
            if gap.resumed > wanted:
                self.add_gap(gap)

    def pass_over(self, end: SequenceToken) -> None:
        """Skip to `end`: there is nothing for this consumer before `end`."""
        if end > self.wanted:
            self._move(end, 0)

    def go_to(self, wanted: SequenceToken) -> None:
        """Move to the position that the consumer reports."""
        if wanted < self.wanted:
            self.seat(wanted)
        else:
            self.cursor.advance(wanted)
        self._table.on_advanced(self, 0)

    def _move(self, wanted: SequenceToken, events: int) -> None:
        self.cursor.advance(wanted)
        self._table.on_advanced(self, events)

    # The task

    async def run(self, task: asyncio.Task[None]) -> None:
        """Deliver until there is nothing left. `task` is the task that runs this. `ConsumerTasks` calls it.

        If the task is cancelled, but not by `stop`, the consumer runs again in another task. It stays woken
        until then, so that it does not count as idle.
        """
        self._calls.task = task
        is_again = False
        try:
            await self._run()
        except asyncio.CancelledError as error:
            if not self.is_stopping:
                self.policy.failed(self.wanted, error, self._calls.begun_at)
                is_again = True
                asyncio.get_running_loop().call_later(self.policy.wait_s(), self._queue.tasks.add, self)
            raise
        except Exception as error:  # noqa: BLE001 - the agent stops, and reports why
            self._queue.fail(error)
        finally:
            self._calls.task = None
            self._is_woken = is_again

    async def _run(self) -> None:
        try:
            if not self._is_greeted:
                await self._greet()
            queue = self._queue
            while not self.is_stopping and (self.cursor.has_more or self.is_catching_up or self._gaps):
                if queue.is_halted:
                    break
                if self.is_catching_up:
                    await self._catching_up.run()
                elif (batch := self._take(self.policy.batch_events)) is not None:
                    await self.hand_out(batch)
                elif self._gaps:
                    await self._gaps.report(self._failed)
                else:
                    break
        except ConsumerGone:
            await self._end(self._table.unregister(self), None)
        except _Ended:
            pass

    async def _greet(self) -> None:
        """Ask the observer for its position, and move there."""
        while not self._is_greeted and not self.is_stopping and self._queue.is_owned():
            try:
                last = await self._calls.run(self._calls.observer.last_token())
                wanted = self.wanted if last is None else checked_token(last).next
            except ConsumerGone:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a consumer raises
                await self._failed(None, error)
                continue
            self._is_greeted = True
            self.policy.succeeded()
            if self._calls.observer.takes_single_events:
                self.policy.take_single_events()
            if (gap := self._queue.disbelief(wanted, self.wanted)) is not None:
                self.add_gap(gap)
                wanted = gap.resumed
            if wanted != self.wanted:
                self.go_to(wanted)

    async def hand_out(self, batch: EventBatch) -> None:
        """Report a gap if it comes first; otherwise deliver the events before the next gap.

        Advance if the events were accepted. Otherwise wait until the next try is due; the caller makes it.
        """
        if self._gaps:
            before = batch.place_of(self._gaps.first.resumed)
            if not before:
                await self._pass_gap()
                return
            batch = batch.slice(0, before)
        try:
            answer = await self._calls.run(self._calls.observer.on_batch(batch))
            wanted = self.cursor.end_of(batch) if answer is None else checked_token(answer).next
            if answer is not None and not self._may_continue(batch, wanted):
                what = "the consumer returned a token before the events that it was given"
                raise DeliveryFailed(what, got=answer)
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            await self._failed(batch, error)
            return
        self.policy.succeeded()
        if wanted < self.wanted:
            self._went_back_at = batch.first
            self.go_to(wanted)
            await asyncio.sleep(0)  # It may go back without end, and never wait.
        else:
            self._went_back_at = None
            self._move(wanted, len(batch.events))

    def _original(self, batch: EventBatch) -> EventBatch:
        """Its events as they are in the queue."""
        return batch

    def _may_continue(self, batch: EventBatch, wanted: SequenceToken) -> bool:
        """Whether a consumer that answered `batch` comes forward, or goes back further than the last time."""
        at = batch.first
        return wanted not in {self.wanted, at} and (wanted >= self.wanted or at != self._went_back_at)

    async def report_gaps(self, end: SequenceToken) -> None:
        """Report the gaps before `end`."""
        gaps, queue = self._gaps, self._queue
        while gaps and gaps.first.resumed <= end and not (self.is_stopping or queue.is_halted):
            await self._pass_gap()

    async def _pass_gap(self) -> None:
        """Report the next gap, which nothing precedes, and continue after it. So it is not met again."""
        gap = self._gaps.first
        if await self._gaps.report(self._failed):
            self.pass_over(gap.resumed)

    # Failures

    async def _failed(self, batch: EventBatch | None, error: Exception) -> bool:
        """Wait for the next try of one event, or apply the policy if the event was tried for long enough.

        Returns whether it was tried for long enough.
        """
        at = self.wanted if batch is None else batch.first
        is_over = self.policy.failed(at, error, self._calls.begun_at)
        if self.is_stopping:
            return False
        is_over = is_over and (batch is None or len(batch) == 1)
        if not (is_over and await self._is_resolved(batch, at, error)):
            await asyncio.sleep(self.policy.wait_s())
        return is_over

    async def _is_resolved(self, batch: EventBatch | None, at: SequenceToken, cause: Exception) -> bool:
        """Apply the policy. Whether the event is resolved, so that the consumer continues after it."""
        what = (
            "take an event" if batch is not None else "take a gap" if self._is_greeted else "say where it is"
        )
        failed = self.policy.failure(what, at, cause)
        on_poison = self.policy.on_poison
        if on_poison == "fault":
            gone = SubscriptionFaulted("the subscription was given up", where=failed.where, got=failed.got)
            await self._end(self._table.give_up(self, failed), gone)
            raise _Ended
        if on_poison == "block" or batch is None:
            return False
        if not await self.policy.discard(self._original(batch), failed):
            return False
        self._move(batch.end, 0)
        await self._calls.report(failed)
        return True

    async def _end(self, ending: Awaitable[None], error: StreamError | None) -> None:
        """Close the cursor before anything is awaited, so that nothing stays pinned."""
        self.is_stopping = True
        if self.is_catching_up:
            self.is_catching_up = False
            self._table.on_caught_up(self)
        self.cursor.close()
        await ending
        if error is not None:
            with contextlib.suppress(ConsumerGone):  # It has ended already.
                await self._calls.report(error)
        await self.close()

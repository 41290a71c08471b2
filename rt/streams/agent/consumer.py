"""Delivers a stream's events to one consumer, at its own pace.

    waiting ──event──► delivering ──nothing left──► waiting
                        │    ▲
             evicted    ▼    │  has reached what the cache holds
                      catching up

Invariants:
- A consumer gets its stream's events in order. It advances only past events that it accepted, reported in its
  token, or that went to the dead letters.
- However it ends, it then pins nothing.
- While there is nothing to deliver, it has no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Final, Protocol, TypeVar

from rt.streams.agent.catch_up_reader import CatchUpReader
from rt.streams.agent.delivery_retry import RetryState
from rt.streams.agent.options import StreamOptions
from rt.streams.agent.queue_cache import CacheCursor, QueueCache
from rt.streams.agent.read_slots import ReadSlots
from rt.streams.agent.subscription_store import SubscriptionRecord
from rt.streams.core.errors import ConsumerGone, DeliveryFailed, StreamError, SubscriptionFaulted
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.metrics import QueueCounts
from rt.streams.core.stream_id import SequenceToken, checked_token
from rt.streams.observer import DeadLetter, DeadLetters, StreamGap, StreamObserver
from rt.streams.queue.adapter import HistoryReader, QueueGap

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_CANCELLED_S: Final = 5.0
"""How long a cancelled call of a consumer, or its `on_close`, may take, in seconds."""


_CALL: ContextVar[object | None] = ContextVar("rt_streams_call", default=None)
"""The observer call that the current code runs in. Waiting for that call would deadlock."""


class DeliveryHost(Protocol):
    """What a consumer needs from the agent that serves its queue."""

    cache: QueueCache
    counts: QueueCounts
    gaps: list[QueueGap]
    """The gaps between the oldest event of the cache and its end."""
    options: StreamOptions
    dead_letters: DeadLetters | None
    is_rewindable: bool
    is_open: bool
    read_slots: ReadSlots
    """The read slots for catching up."""

    def backoff(self, attempt: int) -> float:
        """Seconds to wait after failed try number `attempt`, counted from 1."""

    def moved(self, consumer: Consumer, events: int) -> None:
        """Record `events` more accepted events. Must ignore the position of a consumer that is no longer
        served.
        """

    def catch_up_started(self, consumer: Consumer) -> None:
        """It starts to catch up, so its position must be stored separately."""

    def caught_up(self, consumer: Consumer) -> None:
        """It is back in the cache."""

    def closed(self, consumer: Consumer) -> None:
        """Nothing of it runs any more."""

    async def history(self, consumer: Consumer) -> HistoryReader:
        """Read its stream from its position."""

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault the subscription durably, if this consumer serves it. The consumer has ended already."""

    async def unregister(self, consumer: Consumer) -> None:
        """End the subscription durably, if this consumer serves it. The consumer has ended already."""

    def fail(self, error: BaseException) -> None:
        """Report a failure outside this consumer."""


class _Ended(Exception):
    """Ends the task of a consumer. Does not leave this module."""


class Consumer:
    """One subscription while its queue is served here. Its cursor is parked until `seat`."""

    __slots__ = (
        "_call",
        "_catching_up",
        "_closing",
        "_gaps",
        "_host",
        "_is_begun",
        "_is_greeted",
        "_is_named",
        "_task",
        "_went_back_at",
        "cursor",
        "is_catching_up",
        "is_stopping",
        "observer",
        "record",
        "tries",
    )

    def __init__(self, host: DeliveryHost, record: SubscriptionRecord, observer: StreamObserver) -> None:
        self._host = host
        self.record = record
        self.observer = observer
        self.cursor: CacheCursor = host.cache.cursor(record.stream, self)
        self.is_catching_up = False
        """Whether it is catching up."""
        self.is_stopping = False
        """Whether it gets no more events."""
        self.tries = RetryState(host.options.batch_events_max)
        self._catching_up = CatchUpReader(host, self)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_begun = False
        self._is_greeted = False
        self._call: object | None = None
        """The observer call under way."""
        self._is_named = True
        self._gaps: deque[StreamGap] = deque()
        self._went_back_at: SequenceToken | None = None
        """The token delivered when it last answered with an earlier position."""

    @property
    def wanted(self) -> SequenceToken:
        """The first token that it needs."""
        return self.cursor.wanted

    @property
    def is_idle(self) -> bool:
        """Whether it has everything that was read."""
        return self._task is None and not self.is_catching_up and not self.cursor.has_more

    @property
    def is_failing(self) -> bool:
        """Whether its last delivery, or the last read of its history, failed."""
        return self.tries.are_failing or self._catching_up.is_failing

    def needs_before(self, low: SequenceToken) -> bool:
        """Whether it still needs an event before `low`, which has been read."""
        return self.is_catching_up or (self.cursor.has_more and self.wanted < low)

    def seat(self, wanted: SequenceToken, *, is_named: bool = True) -> None:
        """Take the position `wanted` at once, in the cache or else in the history, so that nothing from there
        on is dropped.

        If the queue cannot be read again: at its oldest event, with a gap reported. No gap is reported for
        the missing beginning of a queue if the caller named no token.
        """
        host, stream = self._host, self.record.stream
        self._is_named = is_named
        if host.cache.covers(stream, wanted):
            self.join_cache(wanted)
            return
        self.cursor.park()
        self.cursor.wanted = wanted
        if host.is_rewindable:
            self._leave_cache()
            return
        oldest = host.cache.oldest(stream)
        self.add_gap(QueueGap(wanted, oldest, "the queue cannot be read again"))
        self.join_cache(oldest)

    def begin(self) -> None:
        """Start to deliver."""
        self._is_begun = True
        self.wake()

    def wake(self) -> None:
        """There may be something to deliver."""
        if self._task is None and self._is_begun and not self.is_stopping:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def start_catch_up(self) -> None:
        """Leave the cache, whose room others need, and start to catch up."""
        self.cursor.park()
        self._leave_cache()

    def add_gap(self, gap: QueueGap) -> None:
        """Report the gap before the events after it."""
        reported = StreamGap(self.record.stream, gap.wanted, gap.resumed, gap.reason)
        is_beginning = not self._is_named and gap.wanted <= SequenceToken(0)
        if not is_beginning and gap.resumed >= self.wanted and reported not in self._gaps:
            self._gaps.append(reported)
            self.wake()

    async def stop(self, deadline: float) -> None:
        """Deliver nothing more. A call under way may last until `deadline`, in the loop's time.

        Its position stays pinned until `close`. Does not wait if the observer itself calls it.
        """
        self.is_stopping = True
        task, call = self._task, self._call
        if task is not None and (call is None or _CALL.get() is not call):
            if call is None:
                task.cancel()
            left = deadline - asyncio.get_running_loop().time()
            if left > 0:
                await asyncio.wait([task], timeout=left)
            task.cancel()
            _, stuck = await asyncio.wait([task], timeout=_CANCELLED_S)
            if stuck:
                logger.error(
                    "consumer_not_cancelled stream=%s observer=%r", self.record.stream, self.observer
                )

    async def close(self) -> None:
        """Unpin its position and call `on_close`, once. Call after `stop`. Does not wait for an observer that
        hangs.
        """
        self.cursor.close()
        if self._closing is not None:
            return
        self._closing = asyncio.get_running_loop().create_task(self._call_on_close())
        try:
            _, late = await asyncio.wait([self._closing], timeout=_CANCELLED_S)
            if late:
                self._closing.cancel()
                logger.error("consumer_not_closed stream=%s observer=%r", self.record.stream, self.observer)
        finally:
            self._host.closed(self)

    async def _call_on_close(self) -> None:
        try:
            await self.observer.on_close()
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises; there is no caller to report it to
            logger.warning("consumer_close_failed stream=%s error=%r", self.record.stream, error)

    # Position

    def join_cache(self, wanted: SequenceToken) -> None:
        """Move into the cache, which covers `wanted`, with the gaps between there and its end."""
        if self.is_catching_up:
            self.is_catching_up = False
            self._host.caught_up(self)
        self.cursor.place(wanted)
        for gap in self._host.gaps:
            if gap.resumed > wanted:
                self.add_gap(gap)

    def pass_over(self, end: SequenceToken) -> None:
        """Skip to `end`: there is nothing for it before."""
        if end > self.wanted:
            self._move(end, 0)

    def _leave_cache(self) -> None:
        if not self.is_catching_up:
            self.is_catching_up = True
            self._host.catch_up_started(self)
        self.wake()

    def go_to(self, wanted: SequenceToken) -> None:
        """Move to where the consumer says that it is."""
        if wanted < self.wanted:
            self.seat(wanted)
        else:
            self.cursor.advance(wanted)
        self._host.moved(self, 0)

    def _move(self, wanted: SequenceToken, events: int) -> None:
        self.cursor.advance(wanted)
        self._host.moved(self, events)

    # The task

    async def _run(self) -> None:
        try:
            if not self._is_greeted:
                await self._greet()
            while not self.is_stopping:
                if self.is_catching_up:
                    await self._catching_up.run()
                elif (batch := self.cursor.take(self.tries.events)) is not None:
                    await self.hand_out(batch)
                elif self._gaps:
                    await self._report_gap()
                else:
                    break
        except ConsumerGone:
            await self._end(self._host.unregister(self), None)
        except _Ended:
            pass
        except Exception as error:  # noqa: BLE001 - the agent stops, and reports why
            self._host.fail(error)
        finally:
            self._task = None

    async def _greet(self) -> None:
        """Ask the observer for its position, and move there."""
        while not self._is_greeted and not self.is_stopping:
            try:
                last = await self._called(self.observer.last_token())
                wanted = self.wanted if last is None else checked_token(last).next
            except ConsumerGone:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a consumer raises
                await self._failed(None, error)
                continue
            self._is_greeted = True
            self.tries.succeeded()
            if wanted != self.wanted:
                self.go_to(wanted)

    async def hand_out(self, batch: EventBatch) -> None:
        """Report a gap if it comes first; otherwise deliver the events before the next gap.

        Advance if they were accepted; otherwise wait until the next try, which the caller makes.
        """
        if self._gaps:
            before = batch.place_of(self._gaps[0].resumed)
            if not before:
                await self._report_gap()
                return
            batch = batch.slice(0, before)
        at = batch.first
        try:
            answer = await self._called(self.observer.on_batch(batch))
            wanted = batch.end if answer is None else checked_token(answer).next
            if wanted in {self.wanted, at} or (wanted < self.wanted and at == self._went_back_at):
                raise DeliveryFailed(
                    "the consumer returned a token before the events that it was given", got=answer
                )
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            await self._failed(batch, error)
            return
        self.tries.succeeded()
        if wanted < self.wanted:
            self._went_back_at = at
            self.go_to(wanted)
        else:
            self._went_back_at = None
            self._move(wanted, len(batch))

    async def report_gaps(self, end: SequenceToken) -> None:
        """Report the gaps before `end`."""
        while self._gaps and self._gaps[0].resumed <= end and not self.is_stopping:
            await self._report_gap()

    async def _report_gap(self) -> None:
        """Report the next gap. If the consumer raises, it is reported again, like events."""
        gap = self._gaps[0]
        try:
            await self._called(self.observer.on_gap(gap))
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            is_over = await self._failed(None, error)
            if not is_over or self._host.dead_letters is None:
                return
            logger.warning("gap_handler_failed stream=%s error=%r", gap.stream, error)
        else:
            self.tries.succeeded()
        self._gaps.popleft()
        self._host.counts.gaps_reported += 1

    # Failures

    async def _failed(self, batch: EventBatch | None, error: Exception) -> bool:
        """Wait for the next try, of one event; or apply the policy if it was tried for long enough.

        Returns whether it was.
        """
        host = self._host
        at = self.wanted if batch is None else batch.first
        is_over = self.tries.failed(at, asyncio.get_running_loop().time()) >= host.options.deliver_for_s
        host.counts.failures += 1
        logger.info("delivery_failed stream=%s token=%s error=%r", self.record.stream, at, error)
        if self.is_stopping:
            return False
        is_over = is_over and (batch is None or len(batch) == 1)
        if not (is_over and await self._decided(batch, at, error)):
            await asyncio.sleep(host.backoff(self.tries.count))
        return is_over

    async def _decided(self, batch: EventBatch | None, at: SequenceToken, cause: Exception) -> bool:
        """Apply the policy. Whether the event is resolved, so that the consumer continues after it."""
        host = self._host
        what = "an event" if batch is not None else "a gap" if self._is_greeted else "where it is"
        failed = DeliveryFailed(
            f"a consumer does not {'take' if self._is_greeted else 'say'} {what}",
            where=f"{self.record.stream}, token {at}",
            got=f"{type(cause).__name__}: {cause}"[:500],
        )
        failed.__cause__ = cause
        if host.options.on_poison == "fault":
            gone = SubscriptionFaulted("the subscription was given up", where=failed.where, got=failed.got)
            await self._end(host.give_up(self, failed), gone)
            raise _Ended
        if host.options.on_poison == "block" or batch is None or host.dead_letters is None:
            return False
        letter = DeadLetter(self.record.id, self.record.stream, at, batch.events[0], failed)
        try:
            await host.dead_letters(letter)
        except Exception as error:  # noqa: BLE001 - the event is retried
            logger.warning("dead_letter_store_failed stream=%s token=%s error=%r", letter.stream, at, error)
            return False
        host.counts.dead_letters += 1
        self._move(batch.end, 0)
        self.tries.passed_over()
        await self._call_on_error(failed)
        return True

    async def _call_on_error(self, error: StreamError) -> None:
        try:
            await self._called(self.observer.on_error(error))
        except ConsumerGone:
            raise
        except Exception as failure:  # noqa: BLE001 - it was notified
            logger.warning("error_handler_failed stream=%s error=%r", self.record.stream, failure)

    async def _end(self, ending: Awaitable[None], error: StreamError | None) -> None:
        """Close the cursor before anything is awaited, so that nothing stays pinned."""
        self.is_stopping = True
        if self.is_catching_up:
            self.is_catching_up = False
            self._host.caught_up(self)
        self.cursor.close()
        await ending
        if error is not None:
            with contextlib.suppress(ConsumerGone):  # It has ended already.
                await self._call_on_error(error)
        await self.close()

    async def _called(self, call: Awaitable[T]) -> T:
        self._call = object()
        token = _CALL.set(self._call)
        task = asyncio.current_task()
        try:
            return await call
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            raise DeliveryFailed("the consumer's own task was cancelled") from None
        finally:
            self._call = None
            _CALL.reset(token)

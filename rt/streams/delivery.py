"""Handing a stream's events to one consumer, at its own pace.

    waiting ──event──► delivering ──nothing left──► waiting
                         │    ▲
         left behind in  ▼    │  has reached what the cache holds
              the cache  reading for itself

Laws. A consumer is handed its stream's events in order, from where it is; it goes on only behind what it has
taken, what it says that it has, or what went to the dead letters. However it ends, it pins nothing then.
While there is nothing for it, it has no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from rt.streams.adapters import HistoryReader, QueueGap
from rt.streams.batches import EventBatch
from rt.streams.cache import Cursor, QueueCache
from rt.streams.errors import ConsumerGone, DeliveryFailed, StreamError, SubscriptionFaulted
from rt.streams.ids import SequenceToken
from rt.streams.metrics import QueueCounts
from rt.streams.observing import DeadLetter, DeadLetters, StreamGap, StreamObserver
from rt.streams.options import StreamOptions
from rt.streams.registry import SubscriptionRecord

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_CANCELLED_S = 5.0
"""How long a consumer's code may go on when it was cancelled."""
_NOTHING_NEW_S = 0.05
"""How long to wait where reading again brought nothing, though there is more to come."""


class DeliveryHost(Protocol):
    """What a consumer asks of the agent that serves its queue."""

    cache: QueueCache
    counts: QueueCounts
    gaps: list[QueueGap]
    """Those that lie between the oldest event of the cache and its end."""
    options: StreamOptions
    dead_letters: DeadLetters | None
    is_rewindable: bool

    def backoff(self, attempt: int) -> float:
        """Seconds to wait behind failed try number `attempt`, from 1."""

    def moved(self, consumer: Consumer, events: int) -> None:
        """It has taken so many more."""

    def fell_behind(self, consumer: Consumer) -> None:
        """It reads for itself from now on, so that its place has to be kept apart."""

    def caught_up(self, consumer: Consumer) -> None:
        """It is back in the cache."""

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """One of the few places for those who read for themselves."""

    def others_wait(self) -> bool:
        """Whether somebody waits for such a place."""

    async def history(self, consumer: Consumer) -> HistoryReader:
        """Read its stream from where it is."""

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault the subscription, durably. It is ended already."""

    async def unregister(self, consumer: Consumer) -> None:
        """End the subscription, durably. It is ended already."""

    def fail(self, error: BaseException) -> None:
        """Something broke that is not this consumer's."""


class _Ended(Exception):
    """Ends the task of a consumer; never leaves this module."""


class Consumer:
    """One subscription while its queue is served here. Its cursor is parked until `seat`."""

    __slots__ = (
        "_attempts",
        "_failed_at",
        "_failing_since",
        "_gaps",
        "_host",
        "_is_begun",
        "_is_calling",
        "_is_greeted",
        "_is_named",
        "_is_stopping",
        "_limit",
        "_task",
        "_went_back_at",
        "cursor",
        "is_behind",
        "observer",
        "record",
    )

    def __init__(self, host: DeliveryHost, record: SubscriptionRecord, observer: StreamObserver) -> None:
        self._host = host
        self.record = record
        self.observer = observer
        self.cursor: Cursor = host.cache.cursor(record.stream, self)
        self.is_behind = False
        """Whether it reads for itself."""
        self._task: asyncio.Task[None] | None = None
        self._limit = host.options.batch_events_max
        self._is_begun = False
        self._is_greeted = False
        self._is_calling = False
        self._is_stopping = False
        self._is_named = True
        self._gaps: deque[StreamGap] = deque()
        self._failed_at: SequenceToken | None = None
        self._failing_since = 0.0
        self._attempts = 0
        self._went_back_at: SequenceToken | None = None
        """What it was handed when it answered that it lacks something before."""

    @property
    def wanted(self) -> SequenceToken:
        """The first token that it has not got."""
        return self.cursor.wanted

    @property
    def is_idle(self) -> bool:
        """Whether it has everything that was read."""
        return self._task is None and not self.is_behind and not self.cursor.has_more

    @property
    def is_failing(self) -> bool:
        """Whether it did not take what it was handed last."""
        return self._failed_at is not None

    def seat(self, wanted: SequenceToken, *, is_named: bool = True) -> None:
        """Stand at `wanted`: in the cache, or else behind it; at once, so that nothing from there on can go.

        Where a queue cannot be read again: at the oldest event that it has, with the gap told. If no token
        was named, what the queue has lost of its beginning is no gap.
        """
        host, stream = self._host, self.record.stream
        self._is_named = is_named
        if host.cache.covers(stream, wanted):
            self._leave_history()
            self._place(wanted)
            return
        if host.is_rewindable:
            self.cursor.park()
            self.cursor.wanted = wanted
            self._go_behind()
            return
        oldest = host.cache.oldest(stream)
        self.note_gap(QueueGap(wanted, oldest, "the queue cannot be read again"))
        self._place(oldest)

    def begin(self) -> None:
        """Hand out from now on."""
        self._is_begun = True
        self.wake()

    def wake(self) -> None:
        """There may be something for it."""
        if self._task is None and self._is_begun and not self._is_stopping:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def fall_behind(self) -> None:
        """Leave the cache, for others want its room, and read for itself."""
        self.cursor.park()
        self._go_behind()

    def note_gap(self, gap: QueueGap) -> None:
        """Tell it before what lies behind the gap."""
        told = StreamGap(self.record.stream, gap.wanted, gap.resumed, gap.reason)
        is_beginning = not self._is_named and gap.wanted <= SequenceToken(0)
        if not is_beginning and gap.resumed >= self.wanted and told not in self._gaps:
            self._gaps.append(told)
            self.wake()

    async def stop(self, deadline: float) -> None:
        """Hand out nothing more. A call under way may last until `deadline`, in the loop's time.

        Its place stays, and stays pinned, until `close`. An observer that asks for it waits for nothing.
        """
        self._is_stopping = True
        task = self._task
        if task is not None and task is not asyncio.current_task():
            if not self._is_calling:
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
        """Pin nothing more. Behind `stop`."""
        self.cursor.close()
        try:
            await self.observer.on_close()
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises; there is nobody left to tell
            logger.warning("consumer_close_failed stream=%s error=%r", self.record.stream, error)

    # The task

    async def _run(self) -> None:
        try:
            if not self._is_greeted:
                await self._greet()
            while not self._is_stopping:
                if self.is_behind:
                    await self._catch_up()
                    continue
                batch = self.cursor.take(self._limit)
                if self._gaps:
                    batch = await self._before_gap(batch)
                    if batch is None:
                        continue
                if batch is None:
                    break
                await self._hand_out(batch)
        except ConsumerGone:
            await self._end(self._host.unregister(self), None)
        except _Ended:
            pass
        except Exception as error:  # noqa: BLE001 - the agent stops, and says why
            self._host.fail(error)
        finally:
            self._task = None

    async def _greet(self) -> None:
        """Ask it where it is, and go there."""
        last: SequenceToken | None = None
        while not self._is_greeted:
            try:
                last = await self._called(self.observer.last_token())
                self._is_greeted = True
            except ConsumerGone:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a consumer raises
                await self._failed(None, error)
        self._succeeded()
        if last is not None and last.next != self.wanted:
            self._go_to(last.next)

    async def _hand_out(self, batch: EventBatch) -> None:
        """Once; move on if it took them, else wait for the next try."""
        at = batch.first
        try:
            answer = await self._called(self.observer.on_batch(batch))
            wanted = batch.end if answer is None else answer.next
            if wanted in {self.wanted, batch.first} or (wanted < self.wanted and at == self._went_back_at):
                raise DeliveryFailed(
                    "the consumer answered that it has not got what it was handed", got=answer
                )
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            await self._failed(batch, error)
            return
        self._succeeded()
        if wanted < self.wanted:
            self._went_back_at = at
            self._go_to(wanted)
        else:
            self._went_back_at = None
            self._move(wanted, len(batch))

    def _go_to(self, wanted: SequenceToken) -> None:
        """To where the consumer says that it is."""
        if wanted < self.wanted:
            self.seat(wanted)
        else:
            self.cursor.advance(wanted)
        self._host.moved(self, 0)

    def _move(self, wanted: SequenceToken, events: int) -> None:
        self.cursor.advance(wanted)
        self._host.moved(self, events)

    async def _before_gap(self, batch: EventBatch | None) -> EventBatch | None:
        """What comes before the next gap; None when that was told instead."""
        gap = self._gaps[0]
        if batch is not None and (place := batch.place_of(gap.resumed)):
            return batch.slice(0, place)
        self._gaps.popleft()
        self._host.counts.gaps_told += 1
        try:
            await self._called(self.observer.on_gap(gap))
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - it was told
            logger.warning("gap_not_taken stream=%s error=%r", gap.stream, error)
        return None

    # Failures

    def _succeeded(self) -> None:
        self._failed_at = None
        self._limit = min(2 * self._limit, self._host.options.batch_events_max)

    async def _failed(self, batch: EventBatch | None, error: Exception) -> None:
        """Wait for the next try, which is of one event; or decide what becomes of that."""
        now = asyncio.get_running_loop().time()
        at = self.wanted if batch is None else batch.first
        if self._failed_at != at:
            self._failed_at, self._failing_since, self._attempts = at, now, 0
        self._attempts += 1
        self._limit = 1
        self._host.counts.failures += 1
        logger.info("delivery_failed stream=%s token=%s error=%r", self.record.stream, at, error)
        is_over = now - self._failing_since >= self._host.options.deliver_for_s
        if is_over and (batch is None or len(batch) == 1) and await self._decided(batch, at, error):
            return
        await asyncio.sleep(self._host.backoff(self._attempts))

    async def _decided(self, batch: EventBatch | None, at: SequenceToken, cause: Exception) -> bool:
        """Whether the event is dealt with, by policy, so that the consumer goes on behind it."""
        host = self._host
        failed = DeliveryFailed(
            "a consumer does not take an event"
            if batch is not None
            else "a consumer does not say where it is",
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
        except Exception as error:  # noqa: BLE001 - then the event is tried on
            logger.warning("dead_letter_not_kept stream=%s token=%s error=%r", letter.stream, at, error)
            return False
        host.counts.dead_letters += 1
        self._move(batch.end, 0)
        self._failed_at = None
        await self._tell(failed)
        return True

    async def _tell(self, error: StreamError) -> None:
        try:
            await self._called(self.observer.on_error(error))
        except Exception as failure:  # noqa: BLE001 - it was told
            logger.warning("error_not_taken stream=%s error=%r", self.record.stream, failure)

    async def _end(self, ending: Awaitable[None], told: StreamError | None) -> None:
        """The cursor is closed before anything is waited for, so that nothing stays pinned."""
        self._is_stopping = True
        self._leave_history()
        self.cursor.close()
        await ending
        if told is not None:
            await self._tell(told)
        await self.close()

    async def _called(self, call: Awaitable[T]) -> T:
        self._is_calling = True
        task = asyncio.current_task()
        try:
            return await call
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            raise DeliveryFailed("the consumer's own task was cancelled") from None
        finally:
            self._is_calling = False

    # Reading for itself

    def _go_behind(self) -> None:
        if not self.is_behind:
            self.is_behind = True
            self._host.fell_behind(self)
        self.wake()

    def _place(self, wanted: SequenceToken) -> None:
        """In the cache, with the gaps that lie between there and its end."""
        self.cursor.place(wanted)
        for gap in self._host.gaps:
            if gap.resumed > wanted:
                self.note_gap(gap)

    def _leave_history(self) -> None:
        if self.is_behind:
            self.is_behind = False
            self._host.caught_up(self)

    def _has_joined(self) -> bool:
        """Back into the cache, if that has all from here on."""
        if not self._host.cache.covers(self.record.stream, self.wanted):
            return False
        self._place(self.wanted)
        self._leave_history()
        return True

    async def _catch_up(self) -> None:
        """Until the cache has what comes next, or others want to read."""
        async with self._host.turn():
            if self._has_joined():
                return
            reader = await self._host.history(self)
            try:
                while not self._is_stopping and not self._has_joined():
                    if not await self._read_on(reader) or self._host.others_wait():
                        return
            finally:
                await reader.close()

    async def _read_on(self, reader: HistoryReader) -> bool:
        """Hand out what one read brings; False if the reader is not where the consumer is."""
        before = self.wanted
        read = await reader.read(self._host.options.catch_up_events)
        if read.gap is not None:
            self.note_gap(read.gap)
        for batch in read.batches:
            rest = batch.behind(self.wanted)
            while rest is not None:
                if self._is_stopping:
                    return False
                at = self.wanted
                part: EventBatch | None = rest.slice(0, self._limit)
                if self._gaps:
                    part = await self._before_gap(part)
                if part is None:
                    continue
                await self._hand_out(part)
                if self.wanted < at or not self.is_behind:
                    return False
                rest = rest.behind(self.wanted)
        while self._gaps and self._gaps[0].resumed <= read.end:
            await self._before_gap(None)
        if read.end > self.wanted:
            self._move(read.end, 0)
        if self.wanted == before:
            await asyncio.sleep(_NOTHING_NEW_S)
        return True

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
from contextvars import ContextVar
from typing import Final, Protocol, TypeVar

from rt.streams.adapters import HistoryReader, QueueGap
from rt.streams.batches import EventBatch
from rt.streams.cache import Cursor, QueueCache
from rt.streams.catching_up import CatchingUp
from rt.streams.errors import ConsumerGone, DeliveryFailed, StreamError, SubscriptionFaulted
from rt.streams.ids import SequenceToken, checked_token
from rt.streams.metrics import QueueCounts
from rt.streams.observing import DeadLetter, DeadLetters, StreamGap, StreamObserver
from rt.streams.options import StreamOptions
from rt.streams.registry import SubscriptionRecord
from rt.streams.tries import Tries
from rt.streams.turns import Turns

logger = logging.getLogger("rt.streams")

T = TypeVar("T")

_CANCELLED_S: Final = 5.0
"""How long a consumer's code may go on when it was cancelled, and how long its `on_close` may last."""


_CALL: ContextVar[object | None] = ContextVar("rt_streams_call", default=None)
"""The call of an observer that what runs now was asked for by: it must not be waited for there."""


class DeliveryHost(Protocol):
    """What a consumer asks of the agent that serves its queue."""

    cache: QueueCache
    counts: QueueCounts
    gaps: list[QueueGap]
    """Those that lie between the oldest event of the cache and its end."""
    options: StreamOptions
    dead_letters: DeadLetters | None
    is_rewindable: bool
    is_open: bool
    turns: Turns
    """The few places for those who read for themselves."""

    def backoff(self, attempt: int) -> float:
        """Seconds to wait behind failed try number `attempt`, from 1."""

    def moved(self, consumer: Consumer, events: int) -> None:
        """It has taken so many more. One that is not served any more says nothing of a place."""

    def fell_behind(self, consumer: Consumer) -> None:
        """It reads for itself from now on, so that its place has to be kept apart."""

    def caught_up(self, consumer: Consumer) -> None:
        """It is back in the cache."""

    def closed(self, consumer: Consumer) -> None:
        """Nothing of it runs any more."""

    async def history(self, consumer: Consumer) -> HistoryReader:
        """Read its stream from where it is."""

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault the subscription, durably, if this one serves it. It is ended already."""

    async def unregister(self, consumer: Consumer) -> None:
        """End the subscription, durably, if this one serves it. It is ended already."""

    def fail(self, error: BaseException) -> None:
        """Something broke that is not this consumer's."""


class _Ended(Exception):
    """Ends the task of a consumer; never leaves this module."""


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
        "is_behind",
        "is_stopping",
        "observer",
        "record",
        "tries",
    )

    def __init__(self, host: DeliveryHost, record: SubscriptionRecord, observer: StreamObserver) -> None:
        self._host = host
        self.record = record
        self.observer = observer
        self.cursor: Cursor = host.cache.cursor(record.stream, self)
        self.is_behind = False
        """Whether it reads for itself."""
        self.is_stopping = False
        """Whether it is to be handed nothing more."""
        self.tries = Tries(host.options.batch_events_max)
        self._catching_up = CatchingUp(host, self)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_begun = False
        self._is_greeted = False
        self._call: object | None = None
        """The one that is under way."""
        self._is_named = True
        self._gaps: deque[StreamGap] = deque()
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
        """Whether it did not take what it was handed last, or cannot be handed anything."""
        return self.tries.are_failing or self._catching_up.is_failing

    def lacks_before(self, low: SequenceToken) -> bool:
        """Whether it has not got everything before `low`, which has been read."""
        return self.is_behind or (self.cursor.has_more and self.wanted < low)

    def seat(self, wanted: SequenceToken, *, is_named: bool = True) -> None:
        """Stand at `wanted`: in the cache, or else behind it; at once, so that nothing from there on can go.

        Where a queue cannot be read again: at the oldest event that it has, with the gap told. If no token
        was named, what the queue has lost of its beginning is no gap.
        """
        host, stream = self._host, self.record.stream
        self._is_named = is_named
        if host.cache.covers(stream, wanted):
            self.join_cache(wanted)
            return
        self.cursor.park()
        self.cursor.wanted = wanted
        if host.is_rewindable:
            self._go_behind()
            return
        oldest = host.cache.oldest(stream)
        self.note_gap(QueueGap(wanted, oldest, "the queue cannot be read again"))
        self.join_cache(oldest)

    def begin(self) -> None:
        """Hand out from now on."""
        self._is_begun = True
        self.wake()

    def wake(self) -> None:
        """There may be something for it."""
        if self._task is None and self._is_begun and not self.is_stopping:
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
        """Pin nothing more, and tell the observer, once. Behind `stop`; one that hangs is not waited for."""
        self.cursor.close()
        if self._closing is not None:
            return
        self._closing = asyncio.get_running_loop().create_task(self._tell_closed())
        try:
            _, late = await asyncio.wait([self._closing], timeout=_CANCELLED_S)
            if late:
                self._closing.cancel()
                logger.error("consumer_not_closed stream=%s observer=%r", self.record.stream, self.observer)
        finally:
            self._host.closed(self)

    async def _tell_closed(self) -> None:
        try:
            await self.observer.on_close()
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises; there is nobody left to tell
            logger.warning("consumer_close_failed stream=%s error=%r", self.record.stream, error)

    # Where it stands

    def join_cache(self, wanted: SequenceToken) -> None:
        """Stand in the cache, which covers `wanted`, with the gaps that lie between there and its end."""
        if self.is_behind:
            self.is_behind = False
            self._host.caught_up(self)
        self.cursor.place(wanted)
        for gap in self._host.gaps:
            if gap.resumed > wanted:
                self.note_gap(gap)

    def pass_over(self, end: SequenceToken) -> None:
        """There is nothing for it before `end`."""
        if end > self.wanted:
            self._move(end, 0)

    def _go_behind(self) -> None:
        if not self.is_behind:
            self.is_behind = True
            self._host.fell_behind(self)
        self.wake()

    def go_to(self, wanted: SequenceToken) -> None:
        """To where the consumer says that it is."""
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
                if self.is_behind:
                    await self._catching_up.run()
                elif (batch := self.cursor.take(self.tries.events)) is not None:
                    await self.hand_out(batch)
                elif self._gaps:
                    await self._tell_gap()
                else:
                    break
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
        """Tell of the gap that comes first; or else hand out what lies before the next one.

        Move on if that was taken, else wait for the next try, which the caller makes.
        """
        if self._gaps:
            before = batch.place_of(self._gaps[0].resumed)
            if not before:
                await self._tell_gap()
                return
            batch = batch.slice(0, before)
        at = batch.first
        try:
            answer = await self._called(self.observer.on_batch(batch))
            wanted = batch.end if answer is None else checked_token(answer).next
            if wanted in {self.wanted, at} or (wanted < self.wanted and at == self._went_back_at):
                raise DeliveryFailed(
                    "the consumer answered that it has not got what it was handed", got=answer
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

    async def tell_gaps(self, end: SequenceToken) -> None:
        """Of those before `end`."""
        while self._gaps and self._gaps[0].resumed <= end and not self.is_stopping:
            await self._tell_gap()

    async def _tell_gap(self) -> None:
        """Of the next one. What the consumer does not hear is told again, as events are handed out again."""
        gap = self._gaps[0]
        try:
            await self._called(self.observer.on_gap(gap))
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            is_over = await self._failed(None, error)
            if not is_over or self._host.dead_letters is None:
                return
            logger.warning("gap_not_taken stream=%s error=%r", gap.stream, error)
        else:
            self.tries.succeeded()
        self._gaps.popleft()
        self._host.counts.gaps_told += 1

    # Failures

    async def _failed(self, batch: EventBatch | None, error: Exception) -> bool:
        """Wait for the next try, which is of one event; or decide what becomes of that.

        Whether it was tried for long enough.
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
        """Whether the event is dealt with, by policy, so that the consumer goes on behind it."""
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
        except Exception as error:  # noqa: BLE001 - then the event is tried on
            logger.warning("dead_letter_not_kept stream=%s token=%s error=%r", letter.stream, at, error)
            return False
        host.counts.dead_letters += 1
        self._move(batch.end, 0)
        self.tries.passed_over()
        await self._tell(failed)
        return True

    async def _tell(self, error: StreamError) -> None:
        try:
            await self._called(self.observer.on_error(error))
        except ConsumerGone:
            raise
        except Exception as failure:  # noqa: BLE001 - it was told
            logger.warning("error_not_taken stream=%s error=%r", self.record.stream, failure)

    async def _end(self, ending: Awaitable[None], told: StreamError | None) -> None:
        """The cursor is closed before anything is waited for, so that nothing stays pinned."""
        self.is_stopping = True
        if self.is_behind:
            self.is_behind = False
            self._host.caught_up(self)
        self.cursor.close()
        await ending
        if told is not None:
            with contextlib.suppress(ConsumerGone):  # It is gone already.
                await self._tell(told)
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

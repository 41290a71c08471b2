"""The agent of a queue: reads it into the cache, wakes consumers, keeps the books.

    receiver ──read──► cache ──cursor each──► consumers
       ▲ acknowledge      │ what all of them have
       └──── registry ◄───┘ durable first

Laws. Nothing is read while the cache has no room. A stream that is met for the first time gets its implicit
consumers in the same step in which its events are taken in, so that nothing passes them by. The queue is told
only of what every subscription has, served here or not, and only when that is durable. Where anything breaks
that is no consumer's, the agent stops, and says so: whoever starts another one goes on from the books.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from rt.streams.adapters import HistoryReader, QueueAdapter, QueueGap, QueueRead, QueueReceiver
from rt.streams.balancing import Fence
from rt.streams.cache import QueueCache
from rt.streams.delivery import Consumer
from rt.streams.directory import Consumers
from rt.streams.errors import DeliveryFailed, NoSuchSubscription, NotRewindable
from rt.streams.ids import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.metrics import QueueCounts, QueueStatus
from rt.streams.observing import DeadLetters, StreamObserver
from rt.streams.options import StreamOptions
from rt.streams.registry import QueueRegistry, Stores, SubscriptionRecord, implicit_id

logger = logging.getLogger("rt.streams")

_SAVE_SHARE: Final = 20
"""Books are kept for a twentieth of the time at most: with many consumers, less often than asked for."""
_FULL_WAIT_S: Final = 1.0
"""How long to wait for consumers to get on, before looking again who is slow."""


@dataclass(slots=True, eq=False)
class _Met:
    """A stream of which something came, or that somebody wants."""

    seen_at: float
    has_implicit: bool = False
    """Whether its implicit consumers were looked for."""
    consumers: list[Consumer] = field(default_factory=list)


class PullingAgent:
    """Serves `queue` from `start` to `stop`, for whom `consumers` says, which all agents of a host share."""

    def __init__(
        self,
        queue: QueueId,
        fence: Fence,
        adapter: QueueAdapter,
        stores: Stores,
        consumers: Consumers,
        options: StreamOptions,
        counts: QueueCounts,
        *,
        dead_letters: DeadLetters | None = None,
        draw: random.Random | None = None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.queue = queue
        self.fence = fence
        self.options = options
        self.dead_letters = dead_letters
        self.is_rewindable = adapter.is_rewindable
        self.counts = counts
        self.cache: QueueCache
        self.gaps: list[QueueGap] = []
        self._adapter = adapter
        self._stores = stores
        self._known = consumers
        self._draw = draw or random.Random()
        self._on_failure = on_failure
        self._registry: QueueRegistry
        self._receiver: QueueReceiver
        self._served: dict[str, Consumer] = {}
        self._streams: dict[StreamId, _Met] = {}
        self._behind: dict[Consumer, None] = {}
        self._moved: dict[Consumer, None] = {}
        self._unattended: dict[str, None] = {}
        """Recorded, not faulted, and nobody here to consume: they keep their places."""
        self._progress = asyncio.Event()
        self._turns = asyncio.Semaphore(options.catch_ups_max)
        self._waiting_turns = 0
        self._acknowledged: SequenceToken | None = None
        self._is_saving = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_failed = False
        self.is_open = False
        self._look_for_idle_at = 0.0

    # Life

    async def start(self) -> None:
        """Open the books and the queue, and begin. Raises what they raise; then nothing is left open."""
        async with contextlib.AsyncExitStack() as undo:
            self._registry = await self._opened_registry()
            undo.push_async_callback(self._registry.close)
            await self._registry.commit()
            self._receiver = await self._adapter.receiver(self.queue, self._start())
            undo.push_async_callback(self._receiver.close)
            self.cache = QueueCache(
                self._registry.low or self._receiver.start,
                events_max=self.options.cache_events,
                bytes_max=self.options.cache_bytes,
            )
            for record in list(self._registry.records()):
                self._take_over(record)
            undo.pop_all()
        self.is_open = True
        self._look_for_idle_at = _now() + self.options.inactive_s / 10
        self._tasks = [self._guarded(self._pump()), self._guarded(self._keep_books())]

    async def stop(self, drain_s: float, *, keeps_books: bool = True) -> None:
        """End: let deliveries under way end for up to `drain_s`, then note and acknowledge what was taken.

        Without `keeps_books` nothing is noted or acknowledged. What goes wrong is logged.
        """
        if not self.is_open:
            return
        self.is_open = False
        deadline = _now() + drain_s
        await _cancelled(self._tasks)
        consumers = list(self._served.values())
        await asyncio.gather(*(consumer.stop(deadline) for consumer in consumers))
        steps: list[Callable[[], Awaitable[None]]] = [self._receiver.close, self._registry.close]
        if keeps_books and not self._has_failed:
            steps.insert(0, self.save)
        steps += [consumer.close for consumer in consumers]
        for step in steps:
            try:
                await step()
            except Exception as error:  # noqa: BLE001 - the rest is to be closed all the same
                logger.warning(
                    "agent_stop_failed queue=%s step=%s error=%r", self.queue, step.__name__, error
                )

    def _start(self) -> SequenceToken | None:
        """Where to read from: what some are still to read again is wanted here as well, and let pass."""
        low = self._registry.low
        if low is None or not self.is_rewindable:
            return low
        places = [self._registry.place(each.id) for each in self._registry.records() if each.fault is None]
        return min([low, *(place for place in places if place is not None)])

    def fail(self, error: BaseException) -> None:
        """Something broke that is not a consumer's: say so, once."""
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(error)

    async def _opened_registry(self) -> QueueRegistry:
        """Opened in a thread; one that nobody waits for any more is closed."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_registry))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await (await opening).close()
            raise

    def _open_registry(self) -> QueueRegistry:
        store = self._stores(self.queue)
        try:
            return QueueRegistry(store, self.queue, self.fence)
        except BaseException:
            store.close()
            raise

    def _guarded(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - whoever started the agent decides
                self.fail(error)

        return asyncio.create_task(run())

    # Reading

    async def _pump(self) -> None:
        while True:
            self.cache.purge()
            if not (room := self.cache.room):
                await self._wait_for_room()
                continue
            read = await self._receiver.receive(room, self.options.receive_s)
            if read is not None:
                self._take_in(read)
            await asyncio.sleep(0)

    async def _wait_for_room(self) -> None:
        """Send the slow ones off to read for themselves, if they are the fewer; else wait for them."""
        slow = self.cache.slow()
        if self.is_rewindable and 2 * len(slow) <= len(self._served) - len(self._behind):
            for cursor in slow:
                cursor.owner.fall_behind()
            return
        self.counts.waits += 1
        self._progress.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FULL_WAIT_S):
                await self._progress.wait()

    def _take_in(self, read: QueueRead) -> None:
        """One step: nothing else runs between a stream's first event and its consumers."""
        now = _now()
        self.counts.reads += 1
        if read.gap is not None:
            self._tell_all(read.gap)
        for batch in read.batches:
            self.counts.events += len(batch)
            met = self._streams.get(batch.stream)
            if met is None or not met.has_implicit:
                self.meet(batch.stream)
            else:
                met.seen_at = now
        for cursor in self.cache.add(read.batches, read.end):
            cursor.owner.wake()

    def _tell_all(self, gap: QueueGap) -> None:
        self.counts.gaps += 1
        self.gaps = [known for known in self.gaps if known.resumed > self.cache.start]
        self.gaps.append(gap)
        for consumer in self._served.values():
            if not consumer.is_behind:
                consumer.note_gap(gap)

    # Who is served

    def _stream(self, stream: StreamId) -> _Met:
        met = self._streams.get(stream)
        if met is None:
            met = self._streams[stream] = _Met(_now())
        return met

    def meet(self, stream: StreamId) -> None:
        """A stream that has implicit consumers gets those that it has not yet, each from where it was."""
        self._stream(stream).has_implicit = True
        for pattern in self._known.patterns_of(stream):
            subscription_id = implicit_id(pattern, stream)
            if subscription_id in self._served or self._registry.record(subscription_id) is not None:
                continue  # Served already, or faulted.
            record = SubscriptionRecord(subscription_id, stream, None, pattern)
            wanted = self._registry.place(subscription_id) or self.cache.end
            if (observer := self._observer(record, wanted)) is not None:
                self._serve(record, observer, wanted).begin()

    def meet_again(self) -> None:
        """There is another pattern: it counts for the streams that are known, from now on."""
        for stream in list(self._streams):
            self.meet(stream)

    def _observer(self, record: SubscriptionRecord, wanted: SequenceToken) -> StreamObserver | None:
        """Who consumes it here, if anybody does; one that cannot be made is a fault of the subscription."""
        try:
            return self._known.observer(record)
        except Exception as error:  # noqa: BLE001 - whatever a factory raises
            logger.warning("observer_not_made stream=%s error=%r", record.stream, error)
            self.counts.faults += 1
            self._registry.fault(record, f"{type(error).__name__}: {error}"[:1000], wanted)
            return None

    def _take_over(self, record: SubscriptionRecord) -> None:
        """One that was recorded: it is served if its observer is known here, and keeps its place if not."""
        place = self._registry.place(record.id) or self._registry.low or SequenceToken(0)
        if record.fault is not None:
            return
        observer = self._observer(record, place)
        if observer is None:
            if (left := self._registry.record(record.id)) is not None and left.fault is None:
                self._registry.put(record, place)
                self._unattended[record.id] = None
            return
        self._serve(record, observer, place).begin()
        self._drop_record(self._served[record.id])

    def _drop_record(self, consumer: Consumer) -> None:
        """An implicit one comes by itself, with its place, unless it reads for itself."""
        if consumer.record.is_implicit and not consumer.is_behind:
            self._registry.unrecord(consumer.record.id)

    def _serve(
        self,
        record: SubscriptionRecord,
        observer: StreamObserver,
        wanted: SequenceToken,
        *,
        is_named: bool = True,
    ) -> Consumer:
        """Pinned at `wanted` when this returns; it is handed nothing before `begin`."""
        consumer = Consumer(self, record, observer)
        self._served[record.id] = consumer
        self._stream(record.stream).consumers.append(consumer)
        consumer.seat(wanted, is_named=is_named)
        self._moved[consumer] = None
        return consumer

    def _leave(self, consumer: Consumer) -> None:
        """Not served any more; its cursor is closed already, or will be."""
        if self._served.get(consumer.record.id) is consumer:
            del self._served[consumer.record.id]
        self._behind.pop(consumer, None)
        self._moved.pop(consumer, None)
        met = self._streams.get(consumer.record.stream)
        if met is not None and consumer in met.consumers:
            met.consumers.remove(consumer)

    def _forget_idle_streams(self) -> None:
        """Streams of which nothing came for long leave the memory, with consumers that come by themselves."""
        now = _now()
        if now < self._look_for_idle_at:
            return
        self._look_for_idle_at = now + self.options.inactive_s / 10
        for stream, met in list(self._streams.items()):
            is_quiet = now - met.seen_at >= self.options.inactive_s
            if is_quiet and all(each.record.is_implicit and each.is_idle for each in met.consumers):
                for consumer in list(met.consumers):
                    self._leave(consumer)
                    consumer.cursor.close()
                    self._tasks.append(asyncio.create_task(consumer.close()))
                del self._streams[stream]
        self._tasks = [task for task in self._tasks if not task.done()]

    # Subscriptions that are asked for

    async def subscribe(
        self,
        stream: StreamId,
        observer: StreamObserver,
        consumer: str | None,
        start: SequenceToken | StartPosition,
    ) -> str:
        """Returns the new subscription's id when it is durable. Pinned before anything is waited for."""
        record = SubscriptionRecord(uuid4().hex, stream, consumer)
        wanted = self._start_of(stream, start)
        served = self._serve(record, observer, wanted, is_named=isinstance(start, SequenceToken))
        self._registry.put(record, served.wanted)
        try:
            await self._registry.commit()
        except BaseException:
            self._registry.remove(record.id)
            self._leave(served)
            await served.close()
            raise
        self._known.attach(record.id, observer)
        served.begin()
        return record.id

    def _start_of(self, stream: StreamId, start: SequenceToken | StartPosition) -> SequenceToken:
        if start is StartPosition.LATEST:
            return self.cache.end
        if start is StartPosition.EARLIEST_AVAILABLE:
            return SequenceToken(0) if self.is_rewindable else self.cache.oldest(stream)
        assert isinstance(start, SequenceToken)
        if not self.is_rewindable and not self.cache.covers(stream, start):
            oldest = self.cache.oldest(stream)
            raise NotRewindable(
                "the queue cannot be read again", where=stream, got=start, wanted=f"{oldest} or later"
            )
        return start

    async def resume(
        self, subscription_id: str, observer: StreamObserver, start: SequenceToken | None
    ) -> None:
        """Go on with another observer, from `start`, else from where it was; a fault is taken back.

        `NoSuchSubscription`, `NotRewindable`: nothing has changed.
        """
        record = self._registry.record(subscription_id)
        before = self._served.get(subscription_id)
        if before is not None:
            record = before.record
        if record is None:
            raise NoSuchSubscription("no such subscription", where=self.queue, got=subscription_id)
        if start is not None:
            self._start_of(record.stream, start)
        place = before.wanted if before is not None else self._registry.place(subscription_id)
        record = SubscriptionRecord(record.id, record.stream, record.consumer, record.pattern)
        self._unattended.pop(record.id, None)
        served = self._serve(record, observer, start or place or self.cache.low())
        if before is not None:
            self._leave(before)
            await before.stop(_now() + self.options.drain_s)
            if start is None and before.wanted > served.wanted:
                served.cursor.advance(before.wanted)
            await before.close()
        self._registry.put(record, served.wanted)
        self._drop_record(served)
        await self._registry.commit()
        self._known.attach(record.id, observer)
        served.begin()

    async def unsubscribe(self, subscription_id: str) -> None:
        """End it, durably; nothing if there is none. A call of its observer under way is waited for."""
        consumer = self._served.get(subscription_id)
        if consumer is not None:
            self._leave(consumer)
            await consumer.stop(_now() + self.options.drain_s)
            await consumer.close()
        self._unattended.pop(subscription_id, None)
        self._known.detach(subscription_id)
        self._registry.remove(subscription_id)
        await self._registry.commit()

    def subscriptions(self, stream: StreamId | None = None) -> list[SubscriptionRecord]:
        """Those of a stream, or all: served, faulted, or waiting for somebody to resume them."""
        found = {record.id: record for record in self._registry.records()}
        found.update((each.record.id, each.record) for each in self._served.values())
        return [record for record in found.values() if stream in {None, record.stream}]

    def status(self) -> QueueStatus:
        """How it is doing, for people and metrics."""
        cache, known_end = self.cache, self._receiver.known_end
        low = cache.low()
        end = cache.end if known_end is None else max(known_end, cache.end)
        return QueueStatus(
            self.queue.name,
            "failed" if self._has_failed else "served",
            consumers=len(self._served),
            behind=len(self._behind),
            failing=sum(consumer.is_failing for consumer in self._served.values()),
            slow=len(cache.slow()),
            faulted=sum(record.fault is not None for record in self._registry.records()),
            unattended=len(self._unattended),
            low=low.sequence_number + (low.event_index > 0),
            lag=max(0, end.sequence_number - low.sequence_number - (low.event_index > 0)),
            cache_events=cache.events,
            cache_bytes=cache.bytes,
            pressure=cache.pressure,
        )

    # The books

    async def _keep_books(self) -> None:
        wait = self.options.save_every_s
        while True:
            await asyncio.sleep(wait)
            before = _now()
            self._forget_idle_streams()
            await self.save()
            wait = max(self.options.save_every_s, _SAVE_SHARE * (_now() - before))

    async def save(self) -> None:
        """Make durable what consumers have, then tell the queue."""
        async with self._is_saving:
            low = self.cache.low()
            places = {}
            for consumer in self._moved:
                if not consumer.is_behind and consumer.wanted > low:
                    places[consumer.record.id] = consumer.wanted
            self._moved = {}
            for consumer in self._behind:
                self._registry.put(consumer.record, consumer.wanted)
            if self._registry.low is not None or self.counts.reads:
                self._registry.note(low, places, self._has_all_before_low)
            if self._registry.is_dirty:
                await self._registry.commit()
                self.counts.saves += 1
            done = min([low, *self._held()])
            if self._acknowledged is None or done > self._acknowledged:
                await self._receiver.acknowledge(done)
                self._acknowledged = done

    def _held(self) -> list[SequenceToken]:
        """The places of those that are to read again what others have; where that can be done."""
        if not self.is_rewindable:
            return []
        places = [self._registry.place(each) for each in self._unattended]
        return [consumer.wanted for consumer in self._behind] + [each for each in places if each is not None]

    def _has_all_before_low(self, subscription_id: str) -> bool:
        consumer = self._served.get(subscription_id)
        if consumer is not None:
            return not consumer.is_behind
        return self._registry.record(subscription_id) is None

    # What consumers ask for

    def backoff(self, attempt: int) -> float:
        """Twice as long each time, with half of it drawn."""
        most: float = min(self.options.retry_max_s, self.options.retry_min_s * 2.0 ** min(attempt - 1, 30))
        return most * self._draw.uniform(0.5, 1.0)

    def moved(self, consumer: Consumer, events: int) -> None:
        """It has taken so many more."""
        self.counts.delivered += events
        self._moved[consumer] = None
        self._progress.set()

    def fell_behind(self, consumer: Consumer) -> None:
        """It reads for itself."""
        self.counts.catch_ups += 1
        self._behind[consumer] = None

    def caught_up(self, consumer: Consumer) -> None:
        """It is back in the cache; an implicit one needs no record any more."""
        self._behind.pop(consumer, None)
        self._moved[consumer] = None
        self._drop_record(consumer)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One of the places for those who read for themselves; in the order in which they ask."""
        self._waiting_turns += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting_turns -= 1
        try:
            yield
        finally:
            self._turns.release()

    def others_wait(self) -> bool:
        """Whether somebody waits for such a place."""
        return self._waiting_turns > 0

    async def history(self, consumer: Consumer) -> HistoryReader:
        """Read its stream from where it is."""
        return await self._adapter.history(self.queue, consumer.record.stream, consumer.wanted)

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault it, durably."""
        self.counts.faults += 1
        self._leave(consumer)
        self._registry.fault(consumer.record, str(error)[:1000], consumer.wanted)
        await self._registry.commit()
        logger.warning("subscription_faulted stream=%s error=%s", consumer.record.stream, error)

    async def unregister(self, consumer: Consumer) -> None:
        """End it, durably."""
        self._leave(consumer)
        self._known.detach(consumer.record.id)
        self._registry.remove(consumer.record.id)
        await self._registry.commit()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)

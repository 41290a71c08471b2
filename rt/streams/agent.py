"""The agent of a queue: reads it into the cache, wakes consumers, keeps the books.

    receiver ──read──► cache ──cursor each──► consumers
       ▲ acknowledge      │ what all of them have
       └──── registry ◄───┘ durable first

Laws. Nothing is read while the cache has no room. The consumers of a stream are there before its events are
taken in, and nothing else runs between. The queue is told only of what every subscription has, served here or
not, and only when that is durable. Where anything breaks that is no consumer's, the agent stops, and says so:
whoever starts another one goes on from the books.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

from rt.errors import RtError
from rt.streams.adapters import HistoryReader, QueueAdapter, QueueGap, QueueRead, QueueReceiver
from rt.streams.balancing import Fence
from rt.streams.cache import QueueCache
from rt.streams.delivery import Consumer
from rt.streams.directory import Consumers
from rt.streams.errors import DeliveryFailed
from rt.streams.ids import QueueId, SequenceToken
from rt.streams.metrics import QueueCounts, QueueStatus
from rt.streams.observing import DeadLetters
from rt.streams.options import StreamOptions
from rt.streams.registry import QueueRegistry, Stores
from rt.streams.roster import Roster
from rt.streams.subscribing import Subscribing
from rt.streams.turns import Turns

logger = logging.getLogger("rt.streams")

_SAVE_SHARE: Final = 20
"""Books are kept for a twentieth of the time at most: with many consumers, less often than asked for."""
_FULL_WAIT_S: Final = 1.0
"""How long to wait for consumers to get on, before looking again who is slow."""


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
        self.subscriptions: Subscribing
        """Those that are asked for; while it is open."""
        self._registry: QueueRegistry
        self._receiver: QueueReceiver
        self._roster: Roster
        self._progress = asyncio.Event()
        self.turns = Turns(options.catch_ups_max)
        self._acknowledged: SequenceToken | None = None
        self._is_saving = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_failed = False
        self.is_open = False
        self._stopping: asyncio.Task[None] | None = None
        self._keeps_books = True
        self._look_for_idle_at = 0.0
        self._refusals = 0
        """Times that the queue was to be asked again, one after the other."""

    # Life

    async def start(self) -> None:
        """Open the books and the queue, and begin. Raises what they raise; then nothing is left open."""
        undo = contextlib.AsyncExitStack()
        try:
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
            self._roster = Roster(self, self._registry, self._known)
            self.subscriptions = Subscribing(self, self._roster, self._registry, self._known)
            for record in list(self._registry.records()):
                self._roster.take_over(record, _now())
        except BaseException:
            await _through(undo.aclose())
            raise
        self.is_open = True
        self._look_for_idle_at = _now() + self.options.inactive_s / 10
        self._tasks = [self._guarded(self._pump()), self._guarded(self._keep_books())]

    async def stop(self, drain_s: float, *, keeps_books: bool = True) -> None:
        """End: let deliveries under way end for up to `drain_s`, then note and acknowledge what was taken.

        Without `keeps_books` nothing is noted or acknowledged. What goes wrong is logged. It ends though
        whoever asked is cancelled; who asks again waits for the same end, and may want it sooner.
        """
        self._keeps_books = self._keeps_books and keeps_books
        if self.is_stopping:
            await self._stop_consumers(_now() + drain_s)
        elif self.is_open:
            self.is_open = False
            self._stopping = asyncio.create_task(self._stop(_now() + drain_s))
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    @property
    def is_stopping(self) -> bool:
        """Whether its end is under way."""
        return self._stopping is not None and not self._stopping.done()

    async def _stop(self, deadline: float) -> None:
        await _cancelled(self._tasks)
        consumers = await self._stop_consumers(deadline)
        steps: list[Callable[[], Awaitable[None]]] = [self._receiver.close, self._registry.close]
        if self._keeps_books and not self._has_failed:
            steps.insert(0, self.save)
        for step in steps:
            try:
                await step()
            except Exception as error:  # noqa: BLE001 - the rest is to be closed all the same
                logger.warning(
                    "agent_stop_failed queue=%s step=%s error=%r", self.queue, step.__name__, error
                )
        await _closed(consumers)

    async def _stop_consumers(self, deadline: float) -> list[Consumer]:
        consumers = [*self._roster.served.values(), *self._roster.leaving]
        await asyncio.gather(*(consumer.stop(deadline) for consumer in consumers))
        return consumers

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
            await _through(_close_opened(opening))
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
            if (read := await self._receive(room)) is not None:
                self._take_in(read)
            await asyncio.sleep(0)

    async def _receive(self, room: int) -> QueueRead | None:
        """What comes next; None also where the queue says that it is to be asked again."""
        try:
            read = await self._receiver.receive(room, self.options.receive_s)
        except RtError as error:
            if not error.retriable:
                raise
            self._refusals += 1
            wait_s = self.backoff(self._refusals)
            logger.warning("queue_refuses queue=%s again_s=%.1f error=%r", self.queue, wait_s, error)
            await asyncio.sleep(wait_s)
            return None
        self._refusals = 0
        return read

    async def _wait_for_room(self) -> None:
        """Send the slow ones off to read for themselves, if they are the fewer; else wait for them."""
        slow = self.cache.slow()
        if self.is_rewindable and 2 * len(slow) <= len(self._roster.served) - len(self._roster.behind):
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
            self._roster.meet(batch.stream, now)
        for cursor in self.cache.add(read.batches, read.end):
            cursor.owner.wake()

    def _tell_all(self, gap: QueueGap) -> None:
        self.counts.gaps += 1
        self.gaps = [known for known in self.gaps if known.resumed > self.cache.start]
        self.gaps.append(gap)
        for consumer in self._roster.served.values():
            if not consumer.is_behind:
                consumer.note_gap(gap)

    def meet_again(self) -> None:
        """There is another pattern: it counts for the streams that are known, from now on."""
        self._roster.meet_again(_now())

    def status(self) -> QueueStatus:
        """How it is doing, for people and metrics."""
        cache, known_end = self.cache, self._receiver.known_end
        low = cache.low()
        end = cache.end if known_end is None else max(known_end, cache.end)
        return QueueStatus(
            self.queue.name,
            "failed" if self._has_failed else "served",
            consumers=len(self._roster.served),
            behind=len(self._roster.behind),
            failing=sum(consumer.is_failing for consumer in self._roster.served.values()),
            slow=len(cache.slow()),
            faulted=sum(record.fault is not None for record in self._registry.records()),
            unattended=len(self._roster.unattended),
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
            if before >= self._look_for_idle_at:
                self._look_for_idle_at = before + self.options.inactive_s / 10
                await _closed(self._roster.forget_idle(before, self.options.inactive_s))
            await self.save()
            wait = max(self.options.save_every_s, _SAVE_SHARE * (_now() - before))

    async def save(self) -> None:
        """Make durable what consumers have, then tell the queue."""
        async with self._is_saving:
            low = self.cache.low()
            if self._registry.low is not None or self.counts.reads:
                self._roster.note(low)
            done = self._lacked_from(low)
            if self._registry.is_dirty:
                await self._registry.commit()
                self.counts.saves += 1
            # Of what was taken during the commit nothing is durable; and somebody may have gone back.
            done = min(done, self._lacked_from(self.cache.low()))
            if self._acknowledged is None or done > self._acknowledged:
                await self._receiver.acknowledge(done)
                self._acknowledged = done

    def _lacked_from(self, low: SequenceToken) -> SequenceToken:
        """The first token that a subscription lacks, `low` being that of those in the cache."""
        return min([low, *self._roster.lacking()]) if self.is_rewindable else low

    # What consumers ask for

    def backoff(self, attempt: int) -> float:
        """Twice as long each time, with half of it drawn."""
        most: float = min(self.options.retry_max_s, self.options.retry_min_s * 2.0 ** min(attempt - 1, 30))
        return most * self._draw.uniform(0.5, 1.0)

    def moved(self, consumer: Consumer, events: int) -> None:
        """It has taken so many more. One that is not served any more says nothing of a place."""
        self.counts.delivered += events
        if self._roster.serves(consumer):
            self._roster.moved[consumer] = None
        self._progress.set()

    def fell_behind(self, consumer: Consumer) -> None:
        """It reads for itself."""
        self.counts.catch_ups += 1
        if self._roster.serves(consumer):
            self._roster.behind[consumer] = None

    def caught_up(self, consumer: Consumer) -> None:
        """It is back in the cache."""
        self._roster.behind.pop(consumer, None)
        if self._roster.serves(consumer):
            self._roster.moved[consumer] = None

    def closed(self, consumer: Consumer) -> None:
        """Nothing of it runs any more."""
        self._roster.leaving.pop(consumer, None)

    async def history(self, consumer: Consumer) -> HistoryReader:
        """Read its stream from where it is."""
        return await self._adapter.history(self.queue, consumer.record.stream, consumer.wanted)

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault it, durably, if it is this one that is served."""
        if not self._roster.leave(consumer):
            return
        self.counts.faults += 1
        self._registry.fault(consumer.record, str(error)[:1000], consumer.wanted)
        await self._registry.commit()
        logger.warning("subscription_faulted stream=%s error=%s", consumer.record.stream, error)

    async def unregister(self, consumer: Consumer) -> None:
        """End it, durably, if it is this one that is served."""
        if not self._roster.leave(consumer):
            return
        self._known.detach(consumer.record.id)
        self._registry.remove(consumer.record.id)
        await self._registry.commit()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _through(work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end, however often whoever waits is cancelled meanwhile."""
    doing = asyncio.ensure_future(work)
    while not doing.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(doing)
    doing.result()


async def _close_opened(opening: asyncio.Future[QueueRegistry]) -> None:
    try:
        await (await opening).close()
    except Exception as error:  # noqa: BLE001 - nobody waits for it any more
        logger.warning("books_not_closed error=%r", error)


async def _closed(consumers: Iterable[Consumer]) -> None:
    await asyncio.gather(*(consumer.close() for consumer in consumers))


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)

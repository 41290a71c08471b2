"""The agent of a queue: reads it into the cache, wakes consumers, records their positions.

    receiver ──read──► cache ──a cursor each──► consumers
       ▲ acknowledge      │ the position that all have reached
       └── subscription store (durable first)

Invariants:
- While the cache is full, nothing is read.
- The consumers of a stream exist before its events enter the cache, and no other task runs in between.
- The queue is acknowledged only up to what every subscription has, served here or not, and only after that is
  durable.
- On any failure outside a consumer the agent stops and reports it. The next agent continues from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

from rt.errors import RtError
from rt.streams.agent.consumer import Consumer
from rt.streams.agent.consumer_factories import ConsumerFactories
from rt.streams.agent.options import StreamOptions
from rt.streams.agent.queue_cache import QueueCache
from rt.streams.agent.read_slots import ReadSlots
from rt.streams.agent.subscription_service import SubscriptionService
from rt.streams.agent.subscription_store import Stores, SubscriptionStore
from rt.streams.agent.subscription_table import SubscriptionTable
from rt.streams.balancer.balancer import Fence
from rt.streams.core.errors import DeliveryFailed
from rt.streams.core.metrics import QueueCounts, QueueStatus
from rt.streams.core.stream_id import QueueId, SequenceToken
from rt.streams.observer import DeadLetters
from rt.streams.queue.adapter import HistoryReader, QueueAdapter, QueueGap, QueueRead, QueueReceiver

logger = logging.getLogger("rt.streams")

_SAVE_SHARE: Final = 20
"""Saving uses at most a twentieth of the time. With many consumers it is less frequent than
`save_every_s`.
"""
_FULL_WAIT_S: Final = 1.0
"""How long to wait for consumers to advance before checking again which are slow, in seconds."""


class PullingAgent:
    """Serves `queue` from `start` to `stop`. All agents of a host share `consumers`."""

    def __init__(
        self,
        queue: QueueId,
        fence: Fence,
        adapter: QueueAdapter,
        stores: Stores,
        consumers: ConsumerFactories,
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
        self.subscriptions: SubscriptionService
        """Valid while the agent is open."""
        self._registry: SubscriptionStore
        self._receiver: QueueReceiver
        self._table: SubscriptionTable
        self._progress = asyncio.Event()
        self.read_slots = ReadSlots(options.catch_ups_max)
        self._acknowledged: SequenceToken | None = None
        self._is_saving = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_failed = False
        self.is_open = False
        self._stopping: asyncio.Task[None] | None = None
        self._keeps_books = True
        self._look_for_idle_at = 0.0
        self._refusals = 0
        """Consecutive retriable errors of the queue."""

    # Lifecycle

    async def start(self) -> None:
        """Open the subscription store and the queue, and start. Raises their errors; then nothing stays
        open.
        """
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
            self._table = SubscriptionTable(self, self._registry, self._known)
            self.subscriptions = SubscriptionService(self, self._table, self._registry, self._known)
            for record in list(self._registry.records()):
                self._table.take_over(record, _now())
        except BaseException:
            await _through(undo.aclose())
            raise
        self.is_open = True
        self._look_for_idle_at = _now() + self.options.inactive_s / 10
        self._tasks = [self._guarded(self._pump()), self._guarded(self._save_periodically())]

    async def stop(self, drain_s: float, *, saves_positions: bool = True) -> None:
        """Let deliveries under way finish for up to `drain_s` seconds, then save and acknowledge positions.

        Without `saves_positions` nothing is saved or acknowledged. Errors are logged. It completes even if
        the caller is cancelled. Another call waits for the same end and may shorten the drain.
        """
        self._keeps_books = self._keeps_books and saves_positions
        if self.is_stopping:
            await self._stop_consumers(_now() + drain_s)
        elif self.is_open:
            self.is_open = False
            self._stopping = asyncio.create_task(self._stop(_now() + drain_s))
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    @property
    def is_stopping(self) -> bool:
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
            except Exception as error:  # noqa: BLE001 - the remaining steps must run
                logger.warning(
                    "agent_stop_failed queue=%s step=%s error=%r", self.queue, step.__name__, error
                )
        await _closed(consumers)

    async def _stop_consumers(self, deadline: float) -> list[Consumer]:
        consumers = [*self._table.served.values(), *self._table.leaving]
        await asyncio.gather(*(consumer.stop(deadline) for consumer in consumers))
        return consumers

    def _start(self) -> SequenceToken | None:
        """Where to read from: at the oldest position of any subscription. Others skip what they already
        have.
        """
        low = self._registry.low
        if low is None or not self.is_rewindable:
            return low
        places = [self._registry.place(each.id) for each in self._registry.records() if each.fault is None]
        return min([low, *(place for place in places if place is not None)])

    def fail(self, error: BaseException) -> None:
        """Report a failure outside a consumer, once."""
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(error)

    async def _opened_registry(self) -> SubscriptionStore:
        """Open it in a thread. If the caller is cancelled, it is closed again."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_registry))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await _through(_close_opened(opening))
            raise

    def _open_registry(self) -> SubscriptionStore:
        store = self._stores(self.queue)
        try:
            return SubscriptionStore(store, self.queue, self.fence)
        except BaseException:
            store.close()
            raise

    def _guarded(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the agent's owner decides
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
        """The next read; None also after a retriable error of the queue."""
        try:
            read = await self._receiver.receive(room, self.options.receive_s)
        except RtError as error:
            if not error.retriable:
                raise
            self._refusals += 1
            wait_s = self.backoff(self._refusals)
            logger.warning("queue_rejected queue=%s again_s=%.1f error=%r", self.queue, wait_s, error)
            await asyncio.sleep(wait_s)
            return None
        self._refusals = 0
        return read

    async def _wait_for_room(self) -> None:
        """Evict the slow consumers from the cache, if they are a minority; otherwise wait for them."""
        slow = self.cache.slow()
        if self.is_rewindable and 2 * len(slow) <= len(self._table.served) - len(self._table.catching_up):
            for cursor in slow:
                cursor.owner.start_catch_up()
            return
        self.counts.waits += 1
        self._progress.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FULL_WAIT_S):
                await self._progress.wait()

    def _take_in(self, read: QueueRead) -> None:
        """No other task runs between a stream's first event and the creation of its consumers."""
        now = _now()
        self.counts.reads += 1
        if read.gap is not None:
            self._report_gap(read.gap)
        for batch in read.batches:
            self.counts.events += len(batch)
            self._table.add_stream(batch.stream, now)
        for cursor in self.cache.add(read.batches, read.end):
            cursor.owner.wake()

    def _report_gap(self, gap: QueueGap) -> None:
        self.counts.gaps += 1
        self.gaps = [known for known in self.gaps if known.resumed > self.cache.start]
        self.gaps.append(gap)
        for consumer in self._table.served.values():
            if not consumer.is_catching_up:
                consumer.add_gap(gap)

    def apply_patterns(self) -> None:
        """Apply a new pattern to the known streams."""
        self._table.apply_patterns(_now())

    def status(self) -> QueueStatus:
        cache, known_end = self.cache, self._receiver.known_end
        low = cache.low()
        end = cache.end if known_end is None else max(known_end, cache.end)
        return QueueStatus(
            self.queue.name,
            "failed" if self._has_failed else "served",
            consumers=len(self._table.served),
            behind=len(self._table.catching_up),
            failing=sum(consumer.is_failing for consumer in self._table.served.values()),
            slow=len(cache.slow()),
            faulted=sum(record.fault is not None for record in self._registry.records()),
            unattended=len(self._table.unattended),
            low=low.sequence_number + (low.event_index > 0),
            lag=max(0, end.sequence_number - low.sequence_number - (low.event_index > 0)),
            cache_events=cache.events,
            cache_bytes=cache.bytes,
            pressure=cache.pressure,
        )

    # Saving positions

    async def _save_periodically(self) -> None:
        wait = self.options.save_every_s
        while True:
            await asyncio.sleep(wait)
            before = _now()
            if before >= self._look_for_idle_at:
                self._look_for_idle_at = before + self.options.inactive_s / 10
                await _closed(self._table.forget_idle(before, self.options.inactive_s))
            await self.save()
            wait = max(self.options.save_every_s, _SAVE_SHARE * (_now() - before))

    async def save(self) -> None:
        """Make the positions durable, then acknowledge them to the queue."""
        async with self._is_saving:
            low = self.cache.low()
            if self._registry.low is not None or self.counts.reads:
                self._table.note(low)
            done = self._lowest_needed(low)
            if self._registry.is_dirty:
                await self._registry.commit()
                self.counts.saves += 1
            # Events accepted during the commit are not durable yet, and a consumer may have gone back.
            done = min(done, self._lowest_needed(self.cache.low()))
            if self._acknowledged is None or done > self._acknowledged:
                await self._receiver.acknowledge(done)
                self._acknowledged = done

    def _lowest_needed(self, low: SequenceToken) -> SequenceToken:
        """The first token that some subscription needs. `low` is the same for those in the cache."""
        return min([low, *self._table.reread_positions()]) if self.is_rewindable else low

    # DeliveryHost

    def backoff(self, attempt: int) -> float:
        """Doubles with each attempt. Half of it is random."""
        most: float = min(self.options.retry_max_s, self.options.retry_min_s * 2.0 ** min(attempt - 1, 30))
        return most * self._draw.uniform(0.5, 1.0)

    def moved(self, consumer: Consumer, events: int) -> None:
        """Record `events` more accepted events. Does nothing more if the consumer is no longer served."""
        self.counts.delivered += events
        if self._table.serves(consumer):
            self._table.moved[consumer] = None
        self._progress.set()

    def catch_up_started(self, consumer: Consumer) -> None:
        self.counts.catch_ups += 1
        if self._table.serves(consumer):
            self._table.catching_up[consumer] = None

    def caught_up(self, consumer: Consumer) -> None:
        self._table.catching_up.pop(consumer, None)
        if self._table.serves(consumer):
            self._table.moved[consumer] = None

    def closed(self, consumer: Consumer) -> None:
        self._table.leaving.pop(consumer, None)

    async def history(self, consumer: Consumer) -> HistoryReader:
        return await self._adapter.history(self.queue, consumer.record.stream, consumer.wanted)

    async def give_up(self, consumer: Consumer, error: DeliveryFailed) -> None:
        """Fault the subscription durably, if this consumer serves it."""
        if not self._table.leave(consumer):
            return
        self.counts.faults += 1
        self._registry.fault(consumer.record, str(error)[:1000], consumer.wanted)
        await self._registry.commit()
        logger.warning("subscription_faulted stream=%s error=%s", consumer.record.stream, error)

    async def unregister(self, consumer: Consumer) -> None:
        """End the subscription durably, if this consumer serves it."""
        if not self._table.leave(consumer):
            return
        self._known.detach(consumer.record.id)
        self._registry.remove(consumer.record.id)
        await self._registry.commit()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _through(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, even if the caller is cancelled meanwhile."""
    doing = asyncio.ensure_future(work)
    while not doing.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(doing)
    doing.result()


async def _close_opened(opening: asyncio.Future[SubscriptionStore]) -> None:
    try:
        await (await opening).close()
    except Exception as error:  # noqa: BLE001 - no caller waits for it any more
        logger.warning("subscription_store_close_failed error=%r", error)


async def _closed(consumers: Iterable[Consumer]) -> None:
    await asyncio.gather(*(consumer.close() for consumer in consumers))


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)

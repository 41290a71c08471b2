"""The agent of a queue: reads it into the cache, wakes consumers, has their positions saved.

    receiver ──read──► cache ──a cursor each──► consumers
       ▲ acknowledge      │ the position that all have reached
       └── subscription store (durable first)

Invariants:
- While the cache is full, nothing is read.
- The consumers of a stream exist before its events enter the cache, and no other task runs in between.
- On any failure outside a consumer the agent stops and reports it. The next agent continues from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

from rt.errors import RtError
from rt.streams.agent.pattern_starts import PatternStarts
from rt.streams.agent.position_saver import PositionSaver
from rt.streams.agent.reset_check import ResetCheck
from rt.streams.agent.subscription_service import SubscriptionService
from rt.streams.agent.subscription_table import SubscriptionTable
from rt.streams.balancer.balancer import Fence
from rt.streams.core.metrics import STUCK_CALLS_MAX, QueueStatus
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.delivery.consumer import Consumer
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.queue.adapter import QueueRead, QueueReceiver
from rt.streams.queue.queue_cache import QueueCache
from rt.streams.requests.desk import RequestDesk
from rt.streams.subscriptions.consumer_factories import ConsumerFactories
from rt.streams.subscriptions.subscription_store import Stores, SubscriptionStore

logger = logging.getLogger("rt.streams")

_FULL_WAIT_S: Final = 1.0
"""How long to wait for consumers to advance before checking again which are slow, in seconds."""
REWIND: Final = 256
"""The queue is read from this many positions before the position that all subscriptions have reached. A
consumer that keeps its token continues after its own last event, which is a little before that position. So
it needs no history.
"""
_HUNG_S: Final = 5.0
"""If a consumer has not advanced past an event for this many seconds, it no longer holds up other
consumers.
"""


class PullingAgent:
    """Serves `queue` from `start` to `stop`. All agents of a host share `factories`."""

    def __init__(
        self, queue: ServedQueue, fence: Fence, stores: Stores, factories: ConsumerFactories
    ) -> None:
        self.queue = queue
        self.fence = fence
        self._stores = stores
        self._factories = factories
        self.subscriptions: SubscriptionService
        """Valid while the agent is open."""
        self._store: SubscriptionStore
        self._receiver: QueueReceiver
        self._table: SubscriptionTable
        self._saver: PositionSaver
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._saves_positions = True
        self._new_from: SequenceToken | None = None
        """When this agent was opened, all subscriptions without a position of their own had all events before
        this token. Events that are read before it are for consumers that go back.
        """
        self._refusals = 0
        """Consecutive retriable errors of the queue."""

    # Lifecycle

    async def start(self) -> None:
        """Open the subscription store and the queue, and start. Raises their errors; then nothing stays
        open.
        """
        undo = contextlib.AsyncExitStack()
        try:
            self._store = await self._opened_store()
            undo.push_async_callback(self._store.close)
            check = ResetCheck(self.queue, self._store)
            await check.enter()
            starts = PatternStarts(self.queue, self._store, self._factories)
            await starts.resolve()
            await self._store.commit()
            self._new_from = starts.first or self._store.low
            begin = starts.first or self._rewound()
            self._receiver = await self.queue.adapter.receiver(
                self.queue.id, begin, self._store.store_id, self._needed(begin)
            )
            undo.push_async_callback(self._receiver.close)
            self._serve(starts, begin or self._receiver.start)
        except BaseException:
            await _through(undo.aclose())
            raise
        self.queue.is_open = True
        self._tasks = [self._guarded(each) for each in (self._pump(), self._saver.run(), check.run())]
        if (requested := self._store.requested) is not None:
            desk = RequestDesk(self.queue.id, requested, self._store, self.subscriptions.carry_out)
            self._tasks.append(self._guarded(desk.run()))

    def _serve(self, starts: PatternStarts, start: SequenceToken) -> None:
        """Serve the recorded subscriptions. The cache begins at `start`."""
        queue, store, options = self.queue, self._store, self.queue.options
        queue.is_paused = store.paused_s is not None
        queue.cache = QueueCache(start, events_max=options.cache_events, bytes_max=options.cache_bytes)
        self._table = SubscriptionTable(queue, store, self._factories, starts)
        self.subscriptions = SubscriptionService(queue, self._table, store, self._factories)
        self._saver = PositionSaver(queue, self._table, store, self._receiver)
        for record in list(store.records()):
            if not record.is_implicit:
                queue.on_taken_over(record.stream, record.label)
            self._table.take_over(record)

    async def stop(self, drain_s: float, *, saves_positions: bool = True) -> None:
        """Let deliveries under way finish for up to `drain_s` seconds, then save and acknowledge positions.

        Without `saves_positions` nothing is saved or acknowledged. Errors are logged. The stop completes even
        if the caller is cancelled. Another call waits for the same stop and may shorten the drain.
        """
        self._saves_positions = self._saves_positions and saves_positions
        if self.is_stopping:
            await self._stop_consumers(self.queue.now() + drain_s)
        elif self.queue.is_open:
            self.queue.is_open = False
            self._stopping = asyncio.create_task(self._stop(self.queue.now() + drain_s))
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    def interrupt(self) -> None:
        """The queue is lost: do not wait for a commit under way. `stop` follows."""
        if self.queue.is_open or self.is_stopping:
            self._store.interrupt()

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None and not self._stopping.done()

    async def _stop(self, deadline: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        consumers = await self._stop_consumers(deadline)
        steps: list[Callable[[], Awaitable[object]]] = [self._receiver.close, self._store.close]
        if self._saves_positions and not self.queue.has_failed:
            steps.insert(0, self._saver.save)
        for step in steps:
            try:
                await step()
            except Exception as error:  # noqa: BLE001 - the remaining steps must run
                logger.warning(
                    "agent_stop_failed queue=%s step=%s error=%r", self.queue.id, step.__name__, error
                )
        await asyncio.gather(*(consumer.close() for consumer in consumers))

    async def _stop_consumers(self, deadline: float) -> list[Consumer]:
        consumers = [*self._table.served.values(), *self._table.leaving]
        await asyncio.gather(*(consumer.stop(deadline) for consumer in consumers))
        return consumers

    def _rewound(self) -> SequenceToken | None:
        """Where the cache begins, unless patterns start earlier. None: at the beginning of the queue."""
        low = self._store.low
        if low is None or not self.queue.is_rewindable:
            return low
        return SequenceToken(max(0, low.sequence_number - REWIND))

    def _needed(self, begin: SequenceToken | None) -> SequenceToken | None:
        """The oldest position of any subscription, if it is before `begin`. Subscriptions before `begin` read
        history.
        """
        if begin is None or not self.queue.is_rewindable:
            return None
        places = [self._store.place(each.id) for each in self._store.records() if each.fault is None]
        return min((place for place in places if place is not None and place < begin), default=None)

    async def _opened_store(self) -> SubscriptionStore:
        """Open the subscription store in its own thread, so that a store that hangs does not delay other
        queues. If the caller is cancelled, the store is closed again.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="rt-streams-store")
        opening = asyncio.get_running_loop().run_in_executor(thread, self._open_store, thread)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await _through(_close_opened(opening))
            raise

    def _open_store(self, thread: Executor) -> SubscriptionStore:
        try:
            store = self._stores(self.queue.id, self.fence)
            try:
                return SubscriptionStore(store, self.queue.id, self.fence, thread)
            except BaseException:
                store.close()
                raise
        except BaseException:
            thread.shutdown(wait=False)
            raise

    def _guarded(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the agent's owner decides
                self.queue.fail(error)

        return asyncio.create_task(run())

    # Reading

    async def _pump(self) -> None:
        while True:
            self.queue.cache.purge()
            if self.queue.is_paused:
                await self.queue.continued.wait()
            if not (room := self.queue.cache.room):
                await self._wait_for_room()
                continue
            if (read := await self._receive(room)) is not None:
                self._take_in(read)
            await asyncio.sleep(0)

    async def _receive(self, room: int) -> QueueRead | None:
        """The next read; None also after a retriable error of the queue."""
        try:
            read = await self._receiver.receive(room, self.queue.options.receive_s)
        except RtError as error:
            if not error.retriable:
                raise
            self._refusals += 1
            wait_s = self.queue.backoff(self._refusals)
            logger.warning("queue_rejected queue=%s again_s=%.1f error=%r", self.queue.id, wait_s, error)
            await asyncio.sleep(wait_s)
            return None
        self._refusals = 0
        return read

    async def _wait_for_room(self) -> None:
        """Evict the slow consumers from the cache, if they are a minority or do not advance at all; otherwise
        wait for them. Before that, slow consumers that wait for more events get the available events.
        """
        hurried = [cursor for cursor in self.queue.cache.slow() if cursor.owner.deliver_now()]
        if not hurried and self.queue.is_rewindable and (slow := self._dispensable()):
            for consumer in slow:
                consumer.start_catch_up()
            return
        self.queue.counts.waits += 1
        self.queue.progressed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FULL_WAIT_S):
                await self.queue.progressed.wait()

    def _dispensable(self) -> list[Consumer]:
        """The consumers that hold up the others.

        If all consumers hang or fail, they stay in the cache for a while. Then they need not read the
        history.
        """
        slow = [cursor.owner for cursor in self.queue.cache.slow()]
        active = len(self._table.served) - len(self._table.catching_up)
        if 2 * len(slow) <= active:
            return slow
        now, options = self.queue.now(), self.queue.options
        hung = [each for each in slow if each.waited_s(now) > _HUNG_S]
        if len(hung) < active:
            return hung
        return [each for each in hung if each.waited_s(now) > options.stuck_after_s]

    def _take_in(self, read: QueueRead) -> None:
        """No other task runs between a stream's first event and the creation of its consumers."""
        self.queue.counts.reads += 1
        for gap in read.gaps:
            is_old = self._is_old(gap.resumed) and not gap.is_reset
            self.queue.add_gap(gap, is_counted=not is_old)
            for consumer in self._table.served.values():
                if not (consumer.is_catching_up or (is_old and consumer.wanted >= gap.resumed)):
                    consumer.add_gap(gap)
        now = self.queue.now()
        for batch in read.batches:
            self.queue.counts.events += len(batch.events)
            if self._new_from is None or not self._is_old(batch.end):
                self._table.add_stream(batch.stream, now)
        for cursor in self.queue.cache.add(read.batches, read.end):
            cursor.owner.wake()

    def _is_old(self, end: SequenceToken) -> bool:
        """Whether a batch or gap that ends at `end` is only for consumers that go back."""
        return self._new_from is not None and end <= self._new_from

    def knows(self, stream: StreamId) -> bool:
        """Whether the queue had events of the stream not long ago. A subscription alone does not count: it
        may be from an earlier placement.
        """
        known = self._table.streams.get(stream)
        return known is not None and known.has_implicit

    def serves_explicit(self, stream: StreamId) -> bool:
        """Whether an explicit subscription to the stream is served here."""
        known = self._table.streams.get(stream)
        return known is not None and any(not each.record.is_implicit for each in known.consumers)

    def apply_patterns(self) -> None:
        """Apply a new pattern to the known streams."""
        self._table.apply_patterns()

    def status(self) -> QueueStatus:
        cache, known_end = self.queue.cache, self._receiver.known_end
        low = cache.low()
        end = cache.end if known_end is None else max(known_end, cache.end)
        served, stuck = self._table.served.values(), self._table.stuck_calls()
        return QueueStatus(
            self.queue.id.name,
            "failed" if self.queue.has_failed else "served",
            consumers=len(served),
            behind=len(self._table.catching_up),
            failing=sum(consumer.is_failing for consumer in served),
            slow=len(cache.slow()),
            stuck=len(stuck),
            stuck_calls=tuple(heapq.nlargest(STUCK_CALLS_MAX, stuck)),
            explicit=tuple(self._table.explicit(end)),
            is_paused=self.queue.is_paused,
            faulted=sum(record.fault is not None for record in self._store.records()),
            unattended=len(self._table.unattended),
            low=low.sequence_number + (low.event_index > 0),
            lag=max(0, end.sequence_number - low.sequence_number - (low.event_index > 0)),
            cache_events=cache.events,
            cache_bytes=cache.bytes,
            pressure=cache.pressure,
        )


async def _through(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, even if the caller is cancelled meanwhile."""
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

"""One host's part of streams: it starts, serves queues, registers consumers, and stops."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from rt.errors import InvalidOption, Timeout
from rt.exposition import exposition
from rt.log.format.headers import HeadersInput, checked_headers
from rt.log.read.start_position import StartTime
from rt.names import check_name, name_from_host
from rt.serializers import Serializer
from rt.streams.agent.agent import PullingAgent
from rt.streams.agent.manager import PullingManager
from rt.streams.balancer.balancer import Fence, FixedBalancer, QueueBalancer
from rt.streams.core.delivery import DeliveryOptions, PoisonPolicy, check_events
from rt.streams.core.errors import NotWritable, OwnerTimeout, QueueElsewhere, StreamMisplaced, wrong_state
from rt.streams.core.metrics import QueueCounts, QueueStatus, metrics_of
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.dead_letters import checked_serializers, publish_letter
from rt.streams.delivery.options import StreamOptions
from rt.streams.delivery.served_queue import ServedQueue
from rt.streams.event_tracing import StreamTracing
from rt.streams.observer import DeadLetters, ObserverFactory, StreamObserver
from rt.streams.queue.adapter import QueueAdapter, QueueAdapterFactory, StreamDirection
from rt.streams.requests.request import QueueAnswer, QueueRequest, RequestingStores, decode_answer
from rt.streams.stores import memory_stores
from rt.streams.stream import Stream, Subscription
from rt.streams.subscriptions.consumer_factories import ConsumerFactories
from rt.streams.subscriptions.start_place import Start, check_start, known_start
from rt.streams.subscriptions.subscription_store import Stores

logger = logging.getLogger("rt.streams")

_SERVED_S: Final = 30.0
"""How long a call waits for a queue that this host is about to serve."""
_OWNER_S: Final = 60.0
"""How long a request waits for the owner of a queue. If that host was lost, the next one must wait for its
lease to end, 30 s by default.
"""


class StreamProvider:
    """The streams of `queues`, as one host serves and uses them. Use with `async with`, in one event loop.

    `balancer` decides which queues this host serves (default: all). `stores` opens the subscription store of
    each queue (default: in memory, so a new process starts without subscriptions). `dead_letters` stores the
    events that consumers do not accept, where `on_poison` is "dead-letter"; by default they are published to
    the stream `dead-letters/<namespace>` (`rt.streams.dead_letters`), so the queues must be writable.
    `serializers` encode what is published, and decode it for consumers, by namespace; without one, events are
    passed on as they are. `tracing` traces them, such as `rt.otel.StreamTracing`. `host` is this host's name
    in metrics.
    """

    def __init__(
        self,
        name: str,
        queues: QueueAdapterFactory,
        *,
        balancer: QueueBalancer | None = None,
        stores: Stores | None = None,
        options: StreamOptions | None = None,
        dead_letters: DeadLetters | None = None,
        serializers: Mapping[str, Serializer[Any]] | None = None,
        tracing: StreamTracing | None = None,
        host: str | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self.name: Final = check_name(name, kind="provider")
        self.host: Final = check_name(host or name_from_host(socket.gethostname()), kind="host")
        self.options: Final = options or StreamOptions()
        self._factory = queues
        self._balancer = balancer or FixedBalancer()
        self._stores = stores or memory_stores()
        opener: object = self._stores
        self._requesting = opener if isinstance(opener, RequestingStores) else None
        """Set if any host can ask the owner of a queue."""
        self._dead_letters = dead_letters or partial(publish_letter, self.publish)
        self._has_letters = dead_letters is not None
        self._tracing = tracing
        self._serializers = checked_serializers(serializers or {})
        self._needs_letters = self.options.on_poison == "dead-letter"
        self._draw = draw or random.Random()
        self._consumers = ConsumerFactories()
        self._adapter: QueueAdapter | None = None
        self._manager: PullingManager | None = None
        self._is_closed = False
        self._stopping: asyncio.Task[None] | None = None

    # Consumers

    def consumer(
        self,
        name: str,
        factory: ObserverFactory,
        *,
        on_poison: PoisonPolicy | None = None,
        where: Callable[[Any], object] | None = None,
        batch_size: int | None = None,
        batch_within_s: float | None = None,
    ) -> None:
        """Register the factory of observers for subscriptions of consumer `name`. Call before `start`.

        The options are those of `implicit`.
        """
        self._require_not_started("consumer")
        self.check_letters(on_poison)
        delivery = DeliveryOptions(on_poison, where, batch_size, batch_within_s)
        self._consumers.add_factory(name, factory, delivery)

    def implicit(
        self,
        name: str,
        pattern: str,
        factory: ObserverFactory,
        *,
        start: Start | None = None,
        on_poison: PoisonPolicy | None = None,
        where: Callable[[Any], object] | None = None,
        batch_size: int | None = None,
        batch_within_s: float | None = None,
    ) -> None:
        """Give every stream whose topic matches `pattern` (`*`, `?`, `[…]`) a subscription called `name`.

        All hosts of a provider must register the same subscriptions. Known streams get the subscription from
        now on. If `on_poison` is None, the policy of the options applies.

        Only events for which `where` returns a true value are delivered. A delivery has at most `batch_size`
        events (None: `batch_events_max`). If there are fewer events, they wait up to `batch_within_s` seconds
        for more events (None: they do not wait).

        `start`: where the streams start in a queue whose subscription store does not know `name` yet:
        "earliest", "latest", a position, a token, or a time (None: the start of the options). After that the
        store knows `name`, and `start` is ignored. With a `start`, call before `start()`.
        """
        if start is not None:
            self._require_not_started("implicit(start=...)")
        self.check_letters(on_poison)
        delivery = DeliveryOptions(on_poison, where, batch_size, batch_within_s)
        self._consumers.add_pattern(name, pattern, factory, delivery, start)
        for agent in self._manager.agents() if self._manager is not None else ():
            agent.apply_patterns()

    def check_letters(self, on_poison: PoisonPolicy | None) -> None:
        """`rt.InvalidOption` if dead letters are needed, and there is no place for them."""
        needs_letters = self._needs_letters or on_poison == "dead-letter"
        if self._adapter is None:
            self._needs_letters = needs_letters  # `start` checks it.
            return
        if not needs_letters or self._has_letters:
            return
        if self._adapter.direction is StreamDirection.READ_ONLY:
            raise InvalidOption(
                "there is no place for dead letters: the queues are read-only",
                where=self.name,
                got="on_poison='dead-letter'",
                hint="Give each Cluster a writer, or the provider dead_letters=.",
            )

    # Lifecycle

    async def start(self) -> None:
        """Start serving the queues that the balancer assigns. Call once."""
        self._require_not_started("start")
        adapter = await self._factory.adapter()
        if self._is_closed or self._adapter is not None:
            await adapter.close()
        self._require_not_started("start")
        self._adapter = adapter
        self.check_letters(None)
        if self._adapter.direction is not StreamDirection.WRITE_ONLY:
            queues = self._factory.mapper.queues
            self._manager = PullingManager(self._balancer, queues, self._agent, drain_s=self.options.drain_s)
            await self._manager.start()
            await self._balancer.start(self._factory.mapper)

    async def stop(self) -> None:
        """Give up every queue cleanly: drain, save positions, acknowledge, release.

        May be called twice: both calls wait for the same end. It completes even if the caller is cancelled.
        """
        if self._stopping is None:
            self._is_closed = True
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            if self._manager is not None:
                try:
                    await self._balancer.stop()
                finally:
                    await self._manager.stop()
        finally:
            if self._adapter is not None:
                await self._adapter.close()

    async def __aenter__(self) -> Self:
        self._require_not_started("start")
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # Use

    def stream(self, namespace: str, key: str) -> Stream:
        """The handle of a stream, which need not exist yet."""
        return Stream(self, StreamId(namespace, key))

    async def publish(self, stream: StreamId, events: Sequence[Any], headers: HeadersInput = ()) -> None:
        """Append events to the queue that carries the stream. Any host may serve that queue."""
        adapter = self._require_adapter()
        if adapter.direction is StreamDirection.READ_ONLY:
            what, hint = "the queues of this provider are read-only", "Give each Cluster a writer."
            raise NotWritable(what, where=self.name, got=stream, hint=hint)
        events = check_events(events)
        if (serializer := self._serializers.get(stream.namespace)) is not None:
            events = [serializer.dumps(event) for event in events]
        own = checked_headers(headers) if headers else ()
        if not events:
            return
        queue = self._factory.mapper.queue_for(stream)
        if self._tracing is not None:
            with self._tracing.publish(stream, len(events), own) as traced:
                await adapter.publish(queue, stream, events, traced)
        elif own:
            await adapter.publish(queue, stream, events, own)
        else:
            await adapter.publish(queue, stream, events)

    async def known_start(
        self, stream: StreamId, start: Start, queue: QueueId | None = None
    ) -> SequenceToken | StartPosition:
        """A time as its token in the stream's queue, or in `queue`. Raises errors of the queue."""
        place = queue or self._factory.mapper.queue_for(stream)
        return await known_start(self._require_adapter(), place, check_start(start))

    async def token_at(self, stream: StreamId, time: datetime) -> SequenceToken:
        """See `Stream.token_at`."""
        queue, start = self._factory.mapper.queue_for(stream), StartTime.of(time)
        return await self._require_adapter().token_at(queue, start.timestamp_ns)

    async def agent_of(
        self, stream: StreamId, timeout: float = _SERVED_S, queue: QueueId | None = None
    ) -> PullingAgent:
        """The agent of the stream's queue, or of `queue`. Waits if this host is about to serve it."""
        queue = queue or self._factory.mapper.queue_for(stream)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._require_adapter()
                    if self._manager is None or queue not in self._balancer.my_queues():
                        hint = "Only cluster_stores forward requests: call it on that host."
                        if self._requesting is not None:
                            hint = "Name a consumer that all hosts register: that of the owner is called."
                        raise QueueElsewhere(
                            "this host does not serve the queue", where=queue, got=stream, hint=hint
                        )
                    if (agent := self._manager.agent(queue)) is not None:
                        return agent
                    await self._manager.changed()
        except TimeoutError as error:
            what, hint = "the agent of the queue was not ready in time", "Look for agent_failed in the log."
            raise Timeout(what, where=queue, expected=f"{timeout} s", hint=hint) from error

    async def agent_or_elsewhere(
        self, stream: StreamId, subscription: Subscription | None = None
    ) -> PullingAgent | QueueElsewhere:
        """The agent of the queue, or of the subscription; the error of `agent_of` if another can be asked."""
        try:
            return await (self.agent_of(stream) if subscription is None else self.agent_with(subscription))
        except QueueElsewhere as error:
            if self._requesting is not None:
                return error
            raise

    async def ask_owner(
        self, elsewhere: QueueElsewhere, stream: StreamId, request: QueueRequest, queue: QueueId | None = None
    ) -> QueueAnswer:
        """Have the owner of the stream's queue, or of `queue`, carry it out. Its errors; `OwnerTimeout`."""
        if self._requesting is None:
            raise elsewhere
        queue = queue or self._factory.mapper.queue_for(stream)
        try:
            answer = await self._requesting.ask_owner(queue, request.encode(), _OWNER_S)
        except OwnerTimeout:
            if self._manager is not None:
                self._manager.counts(queue).owner_timeouts += 1
            raise
        return decode_answer(answer).check()

    def attach(
        self, subscription_id: str, observer: StreamObserver, delivery: DeliveryOptions | None = None
    ) -> None:
        """Use this observer for the subscription when its queue comes to this host."""
        self._consumers.attach(subscription_id, observer, delivery or DeliveryOptions())

    def other_agents(self, stream: StreamId) -> list[PullingAgent]:
        """The agents on this host for other queues than the stream's queue."""
        queue = self._factory.mapper.queue_for(stream)
        agents = self._manager.agents() if self._manager is not None else []
        return [agent for agent in agents if agent.queue.id != queue]

    async def agent_with(self, subscription: Subscription) -> PullingAgent:
        """The agent of the subscription: that of the stream's queue, or one of an earlier placement."""
        stream = subscription.stream
        if subscription.queue is not None:
            return await self.agent_of(stream, queue=subscription.queue)
        others = [agent for agent in self.other_agents(stream) if agent.subscriptions.has(subscription.id)]
        if self._manager is not None and others:
            own = self._manager.agent(self._factory.mapper.queue_for(stream))
            others = [] if own is not None and own.subscriptions.has(subscription.id) else others
        return others[0] if others else await self.agent_of(stream)

    def check_place(self, stream: StreamId) -> None:
        """Raise `StreamMisplaced` if an agent on this host reads events of the stream from another queue than
        the stream's queue. Raise `rt.InvalidOption` if the events of the stream are not read.
        """
        if not self._require_adapter().reads(stream):
            raise InvalidOption(
                "the events of the stream are not read",
                where=stream,
                hint="Add its topic to ClusterQueues(…, topics=[…]), on all hosts.",
            )
        queue = self._factory.mapper.queue_for(stream)
        for agent in self.other_agents(stream):
            if agent.knows(stream):
                raise StreamMisplaced(
                    "the events of the stream are in another queue",
                    where=stream,
                    got=agent.queue.id,
                    expected=queue,
                    hint="Say where it is: ClusterQueues(…, placement={'pattern': 'cluster'}). An implicit "
                    "subscription gets the events of every queue.",
                )

    def status(self) -> list[QueueStatus]:
        return [] if self._manager is None else [status for status, _ in self._manager.status()]

    def metrics(self) -> str:
        """All samples in the text format of Prometheus."""
        found = [] if self._manager is None else self._manager.status()
        return exposition(metrics_of(self.name, self.host, found))

    # Internals

    def _agent(
        self, queue: QueueId, fence: Fence, counts: QueueCounts, on_failure: Callable[[BaseException], None]
    ) -> PullingAgent:
        adapter, options = self._require_adapter(), self.options
        served = ServedQueue(queue, adapter, options, counts, self._dead_letters, self._draw, on_failure)
        served.is_owned = partial(self._balancer.owns, queue, fence)
        served.serializers, served.tracing = self._serializers, self._tracing
        served.on_taken_over = partial(self._note_taken_over, queue)
        if len(self._factory.mapper.queues) > 1:
            served.on_new_stream = partial(self._note_new_stream, queue, counts)
        return PullingAgent(served, fence, self._stores, self._consumers)

    def _note_new_stream(self, queue: QueueId, counts: QueueCounts, stream: StreamId) -> None:
        """The queue has events of a stream that had none before, or none for a long time."""
        expected = self._factory.mapper.queue_for(stream)
        if expected == queue or self._manager is None:
            return
        counts.misplaced += 1
        agent = self._manager.agent(expected)
        if agent is not None and agent.serves_explicit(stream):
            logger.error("stream_misplaced stream=%s queue=%s expected=%s", stream, queue, expected)

    def _note_taken_over(self, queue: QueueId, stream: StreamId, label: str) -> None:
        """The queue's store has a subscription of the stream."""
        expected = self._factory.mapper.queue_for(stream)
        if expected != queue:
            what = "subscription_misplaced subscription=%s stream=%s queue=%s expected=%s"
            logger.error(what, label, stream, queue, expected)

    def _require_adapter(self) -> QueueAdapter:
        if self._adapter is None or self._is_closed:
            raise wrong_state(self.name, is_closed=self._is_closed)
        return self._adapter

    def _require_not_started(self, what: str) -> None:
        if self._adapter is not None or self._is_closed:
            raise wrong_state(self.name, what, is_closed=self._is_closed)

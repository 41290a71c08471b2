"""The API of streams: publish, subscribe, resume, unsubscribe.

Invariant: when `subscribe` returns, the subscription is durable in the subscription store of its queue. Every
event published after that is delivered, on whichever host then serves the queue and knows the consumer.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from rt.errors import Closed, InvalidOption, StorageError, Timeout
from rt.exposition import exposition
from rt.names import check_name, name_from_host
from rt.objects import MemoryStore, SqliteStore, Store
from rt.option_checks import check_path
from rt.streams.agent.agent import PullingAgent
from rt.streams.agent.manager import PullingManager
from rt.streams.agent.options import StreamOptions
from rt.streams.agent.served_queue import ServedQueue
from rt.streams.agent.subscription_store import Stores, SubscriptionRecord
from rt.streams.agent.subscription_table import ConsumerFactories
from rt.streams.balancer.balancer import Fence, FixedBalancer, QueueBalancer
from rt.streams.core.errors import NotWritable, QueueElsewhere
from rt.streams.core.metrics import QueueCounts, QueueStatus, metrics_of
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.observer import DeadLetters, ObserverFactory, StreamObserver
from rt.streams.queue.adapter import QueueAdapter, QueueAdapterFactory, StreamDirection

_SERVED_S: Final = 30.0
"""How long a call waits for a queue that this host is about to serve."""


def memory_stores() -> Stores:
    """Subscription stores in memory. They last as long as this object; reopening one returns the same
    data.
    """
    stores: dict[QueueId, MemoryStore] = {}

    def opened(queue: QueueId) -> Store:
        before = stores.get(queue)
        stores[queue] = MemoryStore(None if before is None else before.content())
        return stores[queue]

    return opened


def directory_stores(directory: str | os.PathLike[str]) -> Stores:
    """One subscription store file per queue in `directory`, which hosts on one machine may share.

    Raises `rt.StorageError` if there is no such directory.
    """
    root = os.path.abspath(check_path(directory, name="directory"))
    if not os.path.isdir(root):
        raise StorageError(
            "the directory of the subscription stores does not exist",
            where=root,
            hint="Correct the path, or create the directory.",
        )
    return lambda queue: SqliteStore(os.path.join(root, f"{queue.name}.db"))


class Subscription:
    """A handle that names a subscription, on whichever host it is served."""

    def __init__(self, provider: StreamProvider, stream: StreamId, subscription_id: str) -> None:
        self._provider = provider
        self.stream: Final = stream
        self.id: Final = subscription_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subscription) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    async def resume(self, observer: StreamObserver, start: SequenceToken | None = None) -> None:
        """Continue with `observer`, from `start` or from the stored position; also after a fault.

        The previous observer is no longer called when this returns. `NoSuchSubscription`, `NotRewindable`,
        `QueueElsewhere`.
        """
        agent = await self._provider.agent_of(self.stream)
        await agent.subscriptions.resume(self.id, observer, start)

    async def unsubscribe(self) -> None:
        """End it permanently. Does nothing if it has ended."""
        agent = await self._provider.agent_of(self.stream)
        await agent.subscriptions.unsubscribe(self.id)


class Stream:
    def __init__(self, provider: StreamProvider, stream: StreamId) -> None:
        self._provider = provider
        self.id: Final = stream

    async def publish(self, events: Sequence[Any]) -> None:
        """Append the events, in order. The queue's adapter defines how durable they are on return."""
        await self._provider.publish(self.id, events)

    async def subscribe(
        self,
        observer: StreamObserver,
        *,
        start: SequenceToken | StartPosition = StartPosition.LATEST,
        consumer: str | None = None,
    ) -> Subscription:
        """Deliver this stream's events to `observer`, from `start` on.

        With `consumer`, a name that other hosts have a factory for, the subscription continues on the host
        that serves the queue next. Without it, it waits there until a program resumes it. `NotRewindable`,
        `QueueElsewhere`; `ValueError` if `start` is not a valid position. After `CommitUnknown` the
        subscription may exist.
        """
        if consumer is not None:
            check_name(consumer, kind="consumer")
        agent = await self._provider.agent_of(self.id)
        return Subscription(
            self._provider, self.id, await agent.subscriptions.subscribe(self.id, observer, consumer, start)
        )

    async def subscriptions(self) -> list[tuple[Subscription, SubscriptionRecord]]:
        """The subscriptions of this stream with their stored records."""
        agent = await self._provider.agent_of(self.id)
        return [
            (Subscription(self._provider, self.id, record.id), record)
            for record in agent.subscriptions.found(self.id)
        ]


class StreamProvider:
    """The streams of `queues`, as one host serves and uses them. Use with `async with`, in one event loop.

    `balancer` decides which queues this host serves (default: all). `stores` opens the subscription store of
    each queue (default: in memory, so a new process starts without subscriptions). `dead_letters` stores the
    events that consumers do not accept; it is required if `options.on_poison` is "dead-letter". `host` is
    this host's name in metrics.
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
        host: str | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self.name: Final = check_name(name, kind="provider")
        self.host: Final = check_name(host or name_from_host(socket.gethostname()), kind="host")
        self.options: Final = options or StreamOptions()
        if (self.options.on_poison == "dead-letter") != (dead_letters is not None):
            raise InvalidOption(
                "on_poison and dead_letters must be set together",
                got=f"on_poison={self.options.on_poison!r}, dead_letters={dead_letters!r}",
                hint="Give both on_poison='dead-letter' and dead_letters=, or neither.",
            )
        self._factory = queues
        self._balancer = balancer or FixedBalancer()
        self._stores = stores or memory_stores()
        self._dead_letters = dead_letters
        self._draw = draw or random.Random()
        self._consumers = ConsumerFactories()
        self._adapter: QueueAdapter | None = None
        self._manager: PullingManager | None = None
        self._is_closed = False
        self._stopping: asyncio.Task[None] | None = None

    # Consumers

    def consumer(self, name: str, factory: ObserverFactory) -> None:
        """Register the factory of observers for subscriptions of consumer `name`. Call before `start`."""
        self._require_not_started("consumer")
        self._consumers.add_factory(name, factory)

    def implicit(self, name: str, pattern: str, factory: ObserverFactory) -> None:
        """Give every stream whose topic matches `pattern` (`*`, `?`, `[…]`) a subscription called `name`.

        All hosts of a provider must register the same ones. Known streams get it from now on.
        """
        self._consumers.add_pattern(name, pattern, factory)
        for agent in self._manager.agents() if self._manager is not None else ():
            agent.apply_patterns()

    # Lifecycle

    async def start(self) -> None:
        """Start serving the queues that the balancer assigns. Call once."""
        self._require_not_started("start")
        adapter = await self._factory.adapter()
        if self._is_closed:
            await adapter.close()
        self._require_not_started("start")
        self._adapter = adapter
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

    async def publish(self, stream: StreamId, events: Sequence[Any]) -> None:
        """Append events to the queue that carries the stream, whichever host serves it."""
        adapter = self._require_adapter()
        if adapter.direction is StreamDirection.READ_ONLY:
            raise NotWritable("the queues of this provider are read-only", where=self.name, got=stream)
        if events:
            await adapter.publish(self._factory.mapper.queue_for(stream), stream, events)

    async def agent_of(self, stream: StreamId, timeout: float = _SERVED_S) -> PullingAgent:
        """The agent of the stream's queue. Waits if this host is about to serve it. `QueueElsewhere`."""
        queue = self._factory.mapper.queue_for(stream)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._require_adapter()
                    if self._manager is None or queue not in self._balancer.my_queues():
                        hint = "Subscribe on that host, or register an implicit subscription on all hosts."
                        raise QueueElsewhere(
                            "this host does not serve the queue", where=queue, got=stream, hint=hint
                        )
                    if (agent := self._manager.agent(queue)) is not None:
                        return agent
                    await self._manager.changed()
        except TimeoutError as error:
            what = "the agent of the queue was not ready in time"
            raise Timeout(
                what, where=queue, expected=f"{timeout} s", hint="Look for agent_failed in the log."
            ) from error

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
        return PullingAgent(served, fence, self._stores, self._consumers)

    def _require_adapter(self) -> QueueAdapter:
        if self._adapter is None or self._is_closed:
            raise Closed("the provider is not started or is closed", where=self.name)
        return self._adapter

    def _require_not_started(self, what: str) -> None:
        if self._adapter is not None or self._is_closed:
            raise Closed(
                f"cannot call {what}: the provider was already started or is closed", where=self.name
            )

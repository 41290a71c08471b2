"""Streams as programs see them: publish, subscribe, resume, unsubscribe.

Law: a subscription that was returned is durable in the books of its queue, and pinned: every event that is
published after `subscribe` has returned is handed out, on whichever host serves the queue then and has the
consumer.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from rt.errors import Closed, InvalidOption, Timeout
from rt.names import check_name, name_from_host
from rt.objects import MemoryStore, SqliteStore, Store
from rt.streams.adapters import QueueAdapter, QueueAdapterFactory, StreamDirection
from rt.streams.agent import PullingAgent
from rt.streams.balancing import Fence, FixedBalancer, QueueBalancer
from rt.streams.directory import Consumers
from rt.streams.errors import NotWritable, QueueElsewhere
from rt.streams.ids import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.manager import PullingManager
from rt.streams.metrics import QueueCounts, QueueStatus, exposition
from rt.streams.observing import DeadLetters, ObserverFactory, StreamObserver
from rt.streams.options import StreamOptions
from rt.streams.registry import Stores, SubscriptionRecord

_SERVED_S: Final = 30.0
"""How long a call waits for a queue that this host is about to serve."""


def memory_stores() -> Stores:
    """Books that end with this object: what is opened again is the same."""
    stores: dict[QueueId, MemoryStore] = {}

    def opened(queue: QueueId) -> Store:
        before = stores.get(queue)
        stores[queue] = MemoryStore(None if before is None else before.content())
        return stores[queue]

    return opened


def directory_stores(directory: str | os.PathLike[str]) -> Stores:
    """Books in a file for each queue below `directory`, which hosts of one machine may share."""
    root = os.path.abspath(os.fspath(directory))
    return lambda queue: SqliteStore(os.path.join(root, f"{queue.name}.db"))


class Subscription:
    """A handle. It names a subscription wherever that is served."""

    def __init__(self, provider: StreamProvider, stream: StreamId, subscription_id: str) -> None:
        self._provider = provider
        self.stream: Final = stream
        self.id: Final = subscription_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subscription) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    async def resume(self, observer: StreamObserver, start: SequenceToken | None = None) -> None:
        """Go on with `observer`, from `start` or where it was; also after a fault, or with nobody attached.

        The observer before is called no more when this returns. `NoSuchSubscription`, `NotRewindable`,
        `QueueElsewhere`.
        """
        agent = await self._provider.agent_of(self.stream)
        await agent.subscriptions.resume(self.id, observer, start)

    async def unsubscribe(self) -> None:
        """End it for good; nothing if it has ended."""
        agent = await self._provider.agent_of(self.stream)
        await agent.subscriptions.unsubscribe(self.id)


class Stream:
    """One logical stream of a provider."""

    def __init__(self, provider: StreamProvider, stream: StreamId) -> None:
        self._provider = provider
        self.id: Final = stream

    async def publish(self, events: Sequence[Any]) -> None:
        """Append the events, in order. What that promises is the queue's: see its adapter."""
        await self._provider.publish(self.id, events)

    async def subscribe(
        self,
        observer: StreamObserver,
        *,
        start: SequenceToken | StartPosition = StartPosition.LATEST,
        consumer: str | None = None,
    ) -> Subscription:
        """Hand this stream's events to `observer`, from `start` on.

        With the name of a `consumer` whose factory other hosts have, it goes on there when they serve the
        queue; without, it waits there for somebody to resume it. `NotRewindable`, `QueueElsewhere`;
        `ValueError` for a start that is no place. After `CommitUnknown` it may be in the books.
        """
        if consumer is not None:
            check_name(consumer, kind="consumer")
        agent = await self._provider.agent_of(self.id)
        return Subscription(
            self._provider, self.id, await agent.subscriptions.subscribe(self.id, observer, consumer, start)
        )

    async def subscriptions(self) -> list[tuple[Subscription, SubscriptionRecord]]:
        """All that it has, with what the books say of each."""
        agent = await self._provider.agent_of(self.id)
        return [
            (Subscription(self._provider, self.id, record.id), record)
            for record in agent.subscriptions.found(self.id)
        ]


class StreamProvider:
    """The streams of `queues`, as one host serves and uses them; `async with`, in one event loop.

    `balancer` says which queues this host serves (default: all). `stores` keep the books of each queue
    (default: in memory, so that a new process begins anew). `dead_letters` keeps what consumers do not take,
    if `options.on_poison` is "dead-letter". `host` is this host's name in metrics.
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
                "dead letters want a policy and somebody to keep them",
                got=f"on_poison={self.options.on_poison!r}, dead_letters={dead_letters!r}",
                hint="Give both on_poison='dead-letter' and dead_letters=, or neither.",
            )
        self._factory = queues
        self._balancer = balancer or FixedBalancer()
        self._stores = stores or memory_stores()
        self._dead_letters = dead_letters
        self._draw = draw or random.Random()
        self._consumers = Consumers()
        self._adapter: QueueAdapter | None = None
        self._manager: PullingManager | None = None
        self._is_closed = False
        self._stopping: asyncio.Task[None] | None = None

    # Consumers

    def consumer(self, name: str, factory: ObserverFactory) -> None:
        """Serve subscriptions of consumer `name`, whoever made them, by what `factory` makes.

        Before `start`.
        """
        self._require_not_started("consumer")
        self._consumers.add_factory(name, factory)

    def implicit(self, name: str, pattern: str, factory: ObserverFactory) -> None:
        """Every stream whose topic matches `pattern` (`*`, `?`, `[…]`) has a subscription, called `name`.

        Hosts of one provider have the same ones. Streams that are known already have it from now on.
        """
        self._consumers.add_pattern(name, pattern, factory)
        for agent in self._manager.agents() if self._manager is not None else ():
            agent.meet_again()

    # Life

    async def start(self) -> None:
        """Begin to serve what the balancer gives. Once."""
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
        """Give every queue up in peace: drain, note, acknowledge, release.

        Twice is allowed, and waits for the same end, which comes though whoever asked is cancelled.
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
        """A stream; it need not have been heard of."""
        return Stream(self, StreamId(namespace, key))

    async def publish(self, stream: StreamId, events: Sequence[Any]) -> None:
        """Append events to the queue that carries the stream, whichever host serves that."""
        adapter = self._require_adapter()
        if adapter.direction is StreamDirection.READ_ONLY:
            raise NotWritable("the queues of this provider are only read", where=self.name, got=stream)
        if events:
            await adapter.publish(self._factory.mapper.queue_for(stream), stream, events)

    async def agent_of(self, stream: StreamId, timeout: float = _SERVED_S) -> PullingAgent:
        """The agent of the stream's queue, waited for if the queue is to be served here. `QueueElsewhere`."""
        queue = self._factory.mapper.queue_for(stream)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._require_adapter()
                    if self._manager is None or queue not in self._balancer.my_queues():
                        hint = "Subscribe on that host, or have an implicit subscription on all hosts."
                        raise QueueElsewhere(
                            "another host serves the queue, or none yet", where=queue, got=stream, hint=hint
                        )
                    if (agent := self._manager.agent(queue)) is not None:
                        return agent
                    await self._manager.changed()
        except TimeoutError as error:
            what = "the agent of the queue was not ready in time"
            raise Timeout(what, where=queue, wanted=f"{timeout} s", hint="Look for agent_failed.") from error

    def status(self) -> list[QueueStatus]:
        """Every queue of the provider, as this host sees it."""
        return [] if self._manager is None else [status for status, _ in self._manager.status()]

    def metrics(self) -> str:
        """For Prometheus."""
        return exposition(self.name, self.host, [] if self._manager is None else self._manager.status())

    # Within

    def _agent(
        self, queue: QueueId, fence: Fence, counts: QueueCounts, on_failure: Callable[[BaseException], None]
    ) -> PullingAgent:
        return PullingAgent(
            queue,
            fence,
            self._require_adapter(),
            self._stores,
            self._consumers,
            self.options,
            counts,
            dead_letters=self._dead_letters,
            draw=self._draw,
            on_failure=on_failure,
        )

    def _require_adapter(self) -> QueueAdapter:
        if self._adapter is None or self._is_closed:
            raise Closed("the provider is not started, or closed", where=self.name)
        return self._adapter

    def _require_not_started(self, what: str) -> None:
        if self._adapter is not None or self._is_closed:
            raise Closed(f"too late for {what}: the provider was started", where=self.name)

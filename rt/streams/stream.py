"""Handles of streams and subscriptions: publish, subscribe, resume, unsubscribe.

Invariant: when `subscribe` returns, the subscription is durable in the subscription store of its queue. Every
event published after that is delivered, on whichever host then serves the queue and knows the consumer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from rt.log.format.headers import HeadersInput
from rt.names import check_name
from rt.streams.core.delivery import DeliveryOptions, PoisonPolicy
from rt.streams.core.errors import NoSuchSubscription, QueueElsewhere
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.observer import StreamObserver, check_observer
from rt.streams.requests.request import QueueRequest
from rt.streams.subscriptions.start_place import Start, check_start
from rt.streams.subscriptions.subscription_store import SubscriptionRecord

if TYPE_CHECKING:
    from rt.streams.provider import StreamProvider


class Subscription:
    """A handle that names a subscription, on whichever host it is served.

    `queue` is set if the subscription is from an earlier placement of its stream, in another queue.
    """

    def __init__(
        self, provider: StreamProvider, stream: StreamId, subscription_id: str, queue: QueueId | None = None
    ) -> None:
        self._provider = provider
        self.stream: Final = stream
        self.id: Final = subscription_id
        self.queue: Final = queue

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subscription) and (other.id, other.queue) == (self.id, self.queue)

    def __hash__(self) -> int:
        return hash(self.id)

    async def resume(self, observer: StreamObserver, start: Start | None = None) -> None:
        """Continue with `observer`, from `start` or from the stored position; also after a fault. A time as
        `start` rewinds to the first event from then on.

        The previous observer is no longer called when this returns. If another host serves the queue, that
        host continues with its own consumer, and `observer` is called when the queue moves to this host.
        Raises `NoSuchSubscription`, `NotRewindable`, `QueueElsewhere`, `OwnerTimeout`.
        """
        check_observer(observer)
        agent = await self._provider.agent_or_elsewhere(self.stream, self)
        if not isinstance(agent, QueueElsewhere):
            try:
                await agent.subscriptions.resume(self.id, observer, start)
                return
            except QueueElsewhere as elsewhere:  # The queue left this host first. Nothing was written.
                agent = elsewhere
        known = None
        if start is not None:
            known = await self._provider.known_start(self.stream, start, self.queue)
        request = QueueRequest("resume", self.id, start=known, needs_consumer=True)
        await self._provider.ask_owner(agent, self.stream, request, self.queue)
        self._provider.attach(self.id, observer)

    async def unsubscribe(self) -> None:
        """End the subscription permanently, on any host. Does nothing if it has ended. Raises
        `OwnerTimeout`.
        """
        agent = await self._provider.agent_or_elsewhere(self.stream, self)
        if isinstance(agent, QueueElsewhere):
            with contextlib.suppress(NoSuchSubscription):
                await self._provider.ask_owner(agent, self.stream, QueueRequest("end", self.id), self.queue)
            return
        await agent.subscriptions.unsubscribe(self.id)


class Stream:
    def __init__(self, provider: StreamProvider, stream: StreamId) -> None:
        self._provider = provider
        self.id: Final = stream

    async def publish(self, events: Sequence[Any], *, headers: HeadersInput = ()) -> None:
        """Append the events, in order. The queue's adapter defines how durable they are on return.

        The serializer of the namespace, if any, encodes them. If the serializer raises an error, no event is
        appended. Consumers find the `headers` of each event in `EventBatch.headers`.
        """
        await self._provider.publish(self.id, events, headers)

    async def subscribe(
        self,
        observer: StreamObserver,
        *,
        start: Start = StartPosition.LATEST,
        consumer: str | None = None,
        name: str | None = None,
        on_poison: PoisonPolicy | None = None,
        where: Callable[[Any], object] | None = None,
        batch_size: int | None = None,
        batch_within_s: float | None = None,
    ) -> Subscription:
        """Deliver this stream's events to `observer`, from `start` on: "earliest", "latest", a position, a
        token, or a time (a `datetime` with its timezone).

        With a `name`, the stream has one subscription of that name. If it exists, it continues at its
        position, with `observer` instead of an earlier one, also after a fault; then `start` is ignored. So a
        program that subscribes at each start names its subscriptions. Without a name, each call creates
        another subscription, which retains the log until `unsubscribe`.

        With `consumer`, a name for which other hosts have a factory, the subscription continues on the host
        that serves the queue next. Without it, the subscription waits there until a program resumes it. The
        `consumer` of the latest call is used. `on_poison`, `where`, `batch_size` and `batch_within_s` (see
        `StreamProvider.implicit`) apply as long as `observer` is called. If another host serves the queue,
        the request goes there: its `consumer` gets the events, and `observer` gets them when the queue moves
        to this host. Raises `NotRewindable`, `QueueElsewhere`, `OwnerTimeout`, `StreamMisplaced`;
        `ValueError` if `start` is not a valid position. After `CommitUnknown` or `OwnerTimeout` the
        subscription may exist.
        """
        check_observer(observer)
        if consumer is not None:
            check_name(consumer, kind="consumer")
        if name is not None:
            check_name(name, kind="subscription")
        check_start(start)
        delivery = DeliveryOptions(on_poison, where, batch_size, batch_within_s)
        agent = await self._provider.agent_or_elsewhere(self.id)
        self._provider.check_place(self.id)
        self._provider.check_letters(on_poison)
        if not isinstance(agent, QueueElsewhere):
            try:
                made = await agent.subscriptions.subscribe(self.id, observer, consumer, start, name, delivery)
                return Subscription(self._provider, self.id, made)
            except QueueElsewhere as elsewhere:  # The queue left this host first. Nothing was written.
                agent = elsewhere
        if consumer is None:
            raise agent
        known = await self._provider.known_start(self.id, start)
        request = QueueRequest("subscribe", topic=self.id.topic, consumer=consumer, name=name, start=known)
        answer = await self._provider.ask_owner(agent, self.id, request)
        self._provider.attach(answer.subscription, observer, delivery)
        return Subscription(self._provider, self.id, answer.subscription)

    async def token_at(self, time: datetime) -> SequenceToken:
        """Return the token of the first event of the stream's queue, of any stream, with that timestamp or a
        later one; the end of the queue if there is no such event yet. Timestamps come from the publishers,
        and are not necessarily ascending.

        `NotRewindable` for a queue without timestamps. Raises errors of the queue.
        """
        return await self._provider.token_at(self.id, time)

    async def subscriptions(self) -> list[tuple[Subscription, SubscriptionRecord]]:
        """The subscriptions of this stream with their stored records. Subscriptions of an earlier placement
        are included if this host serves their queue.
        """
        provider, stream = self._provider, self.id
        agent = await provider.agent_of(stream)
        own = [(Subscription(provider, stream, each.id), each) for each in agent.subscriptions.found(stream)]
        return own + [
            (Subscription(provider, stream, each.id, other.queue.id), each)
            for other in provider.other_agents(stream)
            for each in other.subscriptions.found(stream)
            if not each.is_implicit
        ]

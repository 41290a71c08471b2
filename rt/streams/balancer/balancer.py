"""Which host serves which queue: the interfaces of balancers and hosts.

Invariants:
- One host at a time serves a queue. A balancer names a queue only while this host owns it, and gives it up
  only after the host has reported that nothing of the queue runs there.
- If ownership expires, the host is notified to stop at once. Events that it delivered before it stopped may
  be delivered again by the next owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NewType, Protocol

from rt.errors import InvalidOption
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import QueueMapper

Fence = NewType("Fence", int)
Fence.__doc__ = (
    "Rises with each new owner of a queue. An earlier owner cannot overwrite what a later one wrote."
)


class QueueListener(Protocol):
    """Serves queues on a host: the pulling manager. Called in the event loop of the balancer."""

    def queues_changed(self) -> None:
        """`my_queues()` may have changed. Must return at once; the host reads it and follows.

        New queues are served. Queues removed without `release` or `revoke` are stopped as if revoked.
        """

    async def release(self, queue: QueueId) -> None:
        """Stop serving `queue`: drain, flush, and return when nothing of it runs here.

        Called while the queue is still in `my_queues()` and owned. Nothing new is read. Deliveries under way
        may finish. Then the delivered events are made durable and acknowledged. After `drain_s` of the host,
        it must stop even if deliveries are not finished; the next owner delivers the rest. Must not raise for
        errors meanwhile. The host must not serve the queue again until the queue was missing from
        `my_queues()` at a `queues_changed`, or returned with a higher fence. Returns at once for a queue that
        is not served here.
        """

    async def revoke(self, queue: QueueId) -> None:
        """This host no longer owns `queue`: stop at once.

        Cancels deliveries under way and acknowledges nothing to the queue. Otherwise like `release`.
        """


class QueueBalancer(Protocol):
    """Which queues this host serves.

    To give a queue up: `await listener.release(queue)` of each listener, with a timeout well below the
    remaining lease time; then release ownership; then remove the queue from `my_queues()` and call
    `queues_changed()`. When ownership expired or was refused: remove it from `my_queues()`, then `await
    listener.revoke(queue)`, then `queues_changed()`. When a queue is won: add it with its fence, then
    `queues_changed()`. A listener that subscribes later reads `my_queues()` itself.
    """

    async def start(self, mapper: QueueMapper) -> None:
        """Start to acquire queues of `mapper.queues`. Call once. Must not wait for any of them."""

    def my_queues(self) -> Mapping[QueueId, Fence]:
        """The queues to serve here now, each with the fence of this ownership. Empty once stopped."""

    def owns(self, queue: QueueId, fence: Fence) -> bool:
        """Whether this host owns `queue` with that fence now, by the clock.

        Asked before each call of a consumer, so it must be fast. Once it was False for an ownership, it must
        stay False.
        """

    def subscribe(self, listener: QueueListener) -> bool:
        """Notify it of changes. False if it is already subscribed."""

    def unsubscribe(self, listener: QueueListener) -> bool:
        """Stop notifying it. False if it was not subscribed."""

    async def stop(self) -> None:
        """Give up every queue as described in the class, and end. No listener is called after that. Must
        allow a second call.
        """


class FixedBalancer:
    """This host serves all queues, or those with the given names, permanently."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self._queues: dict[QueueId, Fence] = {}
        self._listeners: list[QueueListener] = []

    async def start(self, mapper: QueueMapper) -> None:
        """Own the queues. `ValueError` for a name that no queue has."""
        known = {queue.name: queue for queue in mapper.queues}
        if missing := sorted((self._names or frozenset()) - known.keys()):
            raise InvalidOption(f"unknown queues: {', '.join(missing)[:200]}")
        self.assign({queue: Fence(0) for name, queue in known.items() if self._has(name)})

    def assign(self, queues: Mapping[QueueId, Fence]) -> None:
        """Serve these from now on, and notify the listeners."""
        self._queues = dict(queues)
        for listener in tuple(self._listeners):
            listener.queues_changed()

    def my_queues(self) -> Mapping[QueueId, Fence]:
        return dict(self._queues)

    def owns(self, queue: QueueId, fence: Fence) -> bool:
        return self._queues.get(queue) == fence

    def subscribe(self, listener: QueueListener) -> bool:
        if listener in self._listeners:
            return False
        self._listeners.append(listener)
        return True

    def unsubscribe(self, listener: QueueListener) -> bool:
        if listener not in self._listeners:
            return False
        self._listeners.remove(listener)
        return True

    async def stop(self) -> None:
        for listener in tuple(self._listeners):
            for queue in self._queues:
                await listener.release(queue)
        self._queues = {}
        self._listeners.clear()

    def _has(self, name: str) -> bool:
        return self._names is None or name in self._names

"""Which host serves which queue: what is asked of a balancer, and what it asks of a host.

Laws. A queue is served by one host at a time: a balancer names a queue only while the right to it holds, and
gives the right up only when the host has said that nothing of the queue runs there any more. Where the right
lapsed by itself, the host is told that it must stop at once; what it handed out until it heard of it may be
handed out by the next owner as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NewType, Protocol

from rt.streams.ids import QueueId
from rt.streams.mapping import QueueMapper

Fence = NewType("Fence", int)
"""Rises with every new owner of a queue: an earlier one writes nothing over what a later one wrote."""


class QueueListener(Protocol):
    """What serves queues on a host: the pulling manager. Called in the event loop of the balancer."""

    def queues_changed(self) -> None:
        """`my_queues()` may say something else now. Returns at once; the host reads it and follows.

        Queues that came are served. Queues that went without `release` or `revoke` are stopped as if revoked.
        """

    async def release(self, queue: QueueId) -> None:
        """Stop serving `queue`: drain, flush, return when nothing of it runs here any more.

        Called while the queue is still in `my_queues()` and its right holds. It takes no longer than the
        host's `drain_s` (deliveries under way may end, nothing new is read; then what was delivered is made
        durable and acknowledged), and then stops however far it got: what was not delivered is the next
        owner's. Never raises for what went wrong meanwhile. From its beginning on the host does not serve the
        queue again before it was missing from `my_queues()` at a `queues_changed`, or came back with a higher
        fence. A queue that is not served here: returns at once.
        """

    async def revoke(self, queue: QueueId) -> None:
        """The right to `queue` is gone already: stop at once.

        Deliveries under way are cancelled, and nothing is acknowledged to the queue. Otherwise as `release`.
        """


class QueueBalancer(Protocol):
    """Which queues this host serves.

    To give a queue up in peace: `await listener.release(queue)` of each listener, bounded by a time of the
    balancer's own well below what is left of the right; then let the right go; then take the queue out of
    `my_queues()` and call `queues_changed()`. When the right lapsed or was refused: take it out of
    `my_queues()`, then `await listener.revoke(queue)`, then `queues_changed()`. When one is won: add it, with
    its fence, then `queues_changed()`. A listener that is subscribed later reads `my_queues()` by itself.
    """

    async def start(self, mapper: QueueMapper) -> None:
        """Begin to win queues of `mapper.queues`. Once; returns without waiting for any of them."""

    def my_queues(self) -> Mapping[QueueId, Fence]:
        """The queues to be served here now, each with the fence of this ownership. Empty once stopped."""

    def subscribe(self, listener: QueueListener) -> bool:
        """Have it told of changes; False if it is told already."""

    def unsubscribe(self, listener: QueueListener) -> bool:
        """Tell it nothing any more; False if it was not told."""

    async def stop(self) -> None:
        """Give every queue up as above, and end; no listener is called after that. Twice is allowed."""


class FixedBalancer:
    """This host serves all queues, or those of these names, for good."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self._queues: dict[QueueId, Fence] = {}
        self._listeners: list[QueueListener] = []

    async def start(self, mapper: QueueMapper) -> None:
        """Take them. `ValueError` for a name that no queue has."""
        known = {queue.name: queue for queue in mapper.queues}
        if missing := sorted((self._names or frozenset()) - known.keys()):
            raise ValueError(f"no such queue: {', '.join(missing)[:200]}")
        self.assign({queue: Fence(0) for name, queue in known.items() if self._has(name)})

    def assign(self, queues: Mapping[QueueId, Fence]) -> None:
        """Serve these from now on, and tell the listeners."""
        self._queues = dict(queues)
        for listener in tuple(self._listeners):
            listener.queues_changed()

    def my_queues(self) -> Mapping[QueueId, Fence]:
        """The queues to be served here."""
        return dict(self._queues)

    def subscribe(self, listener: QueueListener) -> bool:
        """Have it told of changes; False if it is told already."""
        if listener in self._listeners:
            return False
        self._listeners.append(listener)
        return True

    def unsubscribe(self, listener: QueueListener) -> bool:
        """Tell it nothing any more; False if it was not told."""
        if listener not in self._listeners:
            return False
        self._listeners.remove(listener)
        return True

    async def stop(self) -> None:
        """Give them up."""
        for listener in tuple(self._listeners):
            for queue in self._queues:
                await listener.release(queue)
        self._queues = {}
        self._listeners.clear()

    def _has(self, name: str) -> bool:
        return self._names is None or name in self._names

"""What a consumer implements, and how it is called.

Invariants:
- One task at a time calls a consumer, with the events of one stream, in order.
- Each event is delivered at least once. It is delivered again if it was not recorded as accepted: `on_batch`
  raised, the process died, or the queue moved to another host first.
- A consumer that stores the last token together with its own results, and returns it from `last_token`, gets
  each event once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from msgspec import Struct

from rt.errors import InvalidOption
from rt.streams.core.errors import DeliveryFailed, StreamError
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId

logger = logging.getLogger("rt.streams")


class StreamGap(Struct, frozen=True):
    """Events from `wanted` up to, not including, `resumed` are missing, or may be.

    If the queue lost them, their streams are unknown: every consumer of the queue gets the gap.
    """

    stream: StreamId
    wanted: SequenceToken
    resumed: SequenceToken
    reason: str
    is_reset: bool = False
    """Whether an operator reset the queue there. After a forced reset, forget tokens from `resumed` on: they
    stand for other events now.
    """

    def is_same(self, other: StreamGap) -> bool:
        """Whether both are about the same events, or the same reset."""
        is_one_reset = self.is_reset and other.is_reset and self.resumed == other.resumed
        return self == other or is_one_reset


class DeadLetter(Struct, frozen=True):
    """An event that a consumer did not accept. `subscription` is its name, that of its pattern or of its
    consumer's factory, or its id.
    """

    subscription: str
    stream: StreamId
    token: SequenceToken
    event: Any
    error: DeliveryFailed


DeadLetters: TypeAlias = Callable[[DeadLetter], Awaitable[None]]
"""Stores a dead letter. The consumer continues when it returns; if it raises, the event is retried."""


class StreamObserver:
    """A consumer of one stream. Only `on_batch` must be implemented."""

    @property
    def takes_single_events(self) -> bool:
        """Whether each batch must have one event."""
        return False

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        """Process the events. Return None when all are accepted.

        Return a token to say: I have everything up to and including it, continue after it. It may lie before
        or after these events. Raise if they were not accepted: they are delivered again, at first one at a
        time. `ConsumerGone` ends the subscription.
        """
        raise NotImplementedError

    async def last_token(self) -> SequenceToken | None:
        """The last event that this consumer has. Called before the first delivery. None: use the stored
        position.
        """
        return None

    async def on_gap(self, gap: StreamGap) -> None:
        """Called if events are missing before the next delivered event. If it raises, it is called again."""
        logger.warning(
            "stream_gap stream=%s wanted=%s resumed=%s why=%r",
            gap.stream,
            gap.wanted,
            gap.resumed,
            gap.reason,
        )

    async def on_error(self, error: StreamError) -> None:
        """Called if an event went to the dead letters, or the subscription was faulted."""
        logger.warning("stream_error error=%s", error)

    async def on_close(self) -> None:
        """The last call: the consumer was unsubscribed or faulted, or this host stopped serving the queue.

        If this host serves the queue again, a subscribed observer is used again, starting with `last_token`.
        The agent waits a few seconds at most for this call.
        """


class EventObserver(StreamObserver):
    """A consumer that gets its events one by one. Only `on_event` must be implemented.

    What is said of batches counts for each event: its time limit, its retries, its policy, its position. A
    batch is several times cheaper for each event.
    """

    @property
    def takes_single_events(self) -> bool:
        return True

    async def on_event(self, event: Any, token: SequenceToken) -> SequenceToken | None:
        """Process the event. Return None when it is accepted, or a token as `on_batch` does. Raise if it was
        not accepted: it is delivered again.
        """
        raise NotImplementedError

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        """Not called by you."""
        answer: SequenceToken | None = None
        for token, event in batch:
            answer = await self.on_event(event, token)
        return answer


ObserverFactory: TypeAlias = Callable[[StreamId], StreamObserver]


def check_observer(observer: StreamObserver) -> None:
    """Raise `rt.InvalidOption` if `observer` has no `on_batch`, or is a class instead of an object."""
    if isinstance(observer, type) or not callable(getattr(observer, "on_batch", None)):
        raise InvalidOption("not an observer", got=repr(observer)[:200], expected="a StreamObserver")

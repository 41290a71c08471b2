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
from dataclasses import dataclass
from typing import Any, TypeAlias

from rt.streams.core.errors import DeliveryFailed, StreamError
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId

logger = logging.getLogger("rt.streams")


@dataclass(frozen=True, slots=True)
class StreamGap:
    """Events from `wanted` up to, not including, `resumed` are missing, or may be.

    If the queue lost them, their streams are unknown: every consumer of the queue gets the gap.
    """

    stream: StreamId
    wanted: SequenceToken
    resumed: SequenceToken
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that a consumer did not accept."""

    subscription: str
    stream: StreamId
    token: SequenceToken
    event: Any
    error: DeliveryFailed


DeadLetters: TypeAlias = Callable[[DeadLetter], Awaitable[None]]
"""Stores a dead letter. The consumer continues when it returns; if it raises, the event is retried."""


class StreamObserver:
    """A consumer of one stream. Only `on_batch` must be implemented."""

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
        """Events are missing before the next one delivered. If it raises, it is called again."""
        logger.warning(
            "stream_gap stream=%s wanted=%s resumed=%s why=%r",
            gap.stream,
            gap.wanted,
            gap.resumed,
            gap.reason,
        )

    async def on_error(self, error: StreamError) -> None:
        """An event went to the dead letters, or the subscription was faulted."""
        logger.warning("stream_error error=%s", error)

    async def on_close(self) -> None:
        """The last call: unsubscribed, faulted, or this host stopped serving the queue.

        If this host serves the queue again, a subscribed observer is used again, starting with `last_token`.
        The agent waits a few seconds at most for this call.
        """


ObserverFactory: TypeAlias = Callable[[StreamId], StreamObserver]

"""What a consumer implements, and what it is told.

Laws. A consumer is called by one task at a time, with the events of one stream, in order. Each event is
handed out at least once: one that was handed out and not taken (`on_batch` raised, the process died, the
queue went to another host before that was noted) comes again. A consumer that keeps the last token with its
own work, and says it in `last_token`, sees each event once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rt.streams.batches import EventBatch
from rt.streams.errors import DeliveryFailed, StreamError
from rt.streams.ids import SequenceToken, StreamId

logger = logging.getLogger("rt.streams")


@dataclass(frozen=True, slots=True)
class StreamGap:
    """Events from `wanted` up to, not including, `resumed` are not there any more, or may not be.

    Where the queue lost them, nobody knows of which streams they were: each of its consumers is told.
    """

    stream: StreamId
    wanted: SequenceToken
    resumed: SequenceToken
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that a consumer did not take."""

    subscription: str
    stream: StreamId
    token: SequenceToken
    event: Any
    error: DeliveryFailed


DeadLetters: TypeAlias = Callable[[DeadLetter], Awaitable[None]]
"""Keeps them; the consumer goes on when it returns. If it raises, the event is tried on."""


class StreamObserver:
    """A consumer of one stream. Only `on_batch` must be had."""

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        """Take the events; None when all are taken.

        A token says instead: I have everything up to and including that one, go on behind it, be it before or
        after these. Raising means that they were not taken: they come again, the first one alone at first.
        `ConsumerGone` ends the subscription.
        """
        raise NotImplementedError

    async def last_token(self) -> SequenceToken | None:
        """The last event that this consumer has, asked before it is handed any; None: as noted here."""
        return None

    async def on_gap(self, gap: StreamGap) -> None:
        """Events are missing, and what comes next lies behind them. If it raises, it is told again."""
        logger.warning(
            "stream_gap stream=%s wanted=%s resumed=%s why=%r",
            gap.stream,
            gap.wanted,
            gap.resumed,
            gap.reason,
        )

    async def on_error(self, error: StreamError) -> None:
        """An event went to the dead letters, or the subscription was given up."""
        logger.warning("stream_error error=%s", error)

    async def on_close(self) -> None:
        """It is called no more: unsubscribed, given up, or the queue is not served here for now.

        Where the queue is served here again, a subscribed one is called again, `last_token` first.
        It is waited for for some seconds only.
        """


ObserverFactory: TypeAlias = Callable[[StreamId], StreamObserver]

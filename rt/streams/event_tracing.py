"""The interface that traces the publishing and the delivery of events, and an observer whose deliveries are
traced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from rt.log.format.headers import Headers
from rt.streams.core.errors import StreamError
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.observer import StreamGap, StreamObserver


class StreamTracing(Protocol):
    """Traces events. `rt.otel.StreamTracing` implements it. Called in the event loop. Must not block, and
    must not raise errors of its own.
    """

    def publish(self, stream: StreamId, events: int, headers: Headers) -> AbstractContextManager[Headers]:
        """A context around the publishing of `events` events. Its value is the headers of the events, which
        include `headers`.
        """

    def process(self, batch: EventBatch, subscription: str) -> AbstractContextManager[object]:
        """A context around one delivery of a batch. `subscription`: the name of the subscription, of its
        pattern or of its consumer's factory, or the id of the subscription.
        """


class TracedObserver(StreamObserver):
    """Passes every call on to `observer`."""

    def __init__(self, observer: StreamObserver, tracing: StreamTracing, subscription: str) -> None:
        self._observer = observer
        self._tracing = tracing
        self._subscription = subscription

    @property
    def takes_single_events(self) -> bool:
        return self._observer.takes_single_events

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        with self._tracing.process(batch, self._subscription):
            return await self._observer.on_batch(batch)

    async def last_token(self) -> SequenceToken | None:
        return await self._observer.last_token()

    async def on_gap(self, gap: StreamGap) -> None:
        await self._observer.on_gap(gap)

    async def on_error(self, error: StreamError) -> None:
        await self._observer.on_error(error)

    async def on_close(self) -> None:
        await self._observer.on_close()

"""An observer whose deliveries are traced."""

from __future__ import annotations

from rt.streams.core.errors import StreamError
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken
from rt.streams.observer import StreamGap, StreamObserver
from rt.streams.tracing import StreamTracing


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

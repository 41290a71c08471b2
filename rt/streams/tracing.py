"""What traces the publishing and the delivery of events. `rt.otel.StreamTracing` is one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from rt.log.format.headers import Headers
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import StreamId


class StreamTracing(Protocol):
    """Called in the event loop. Must not block, and must raise nothing of its own."""

    def publish(self, stream: StreamId, events: int, headers: Headers) -> AbstractContextManager[Headers]:
        """Around a publish of so many events. Its value is their headers, those given among them."""

    def process(self, batch: EventBatch, subscription: str) -> AbstractContextManager[object]:
        """Around one delivery of a batch. `subscription`: its name, that of its pattern or of its consumer's
        factory, or its id.
        """

"""Spans of streams: around each publish, and around each delivery to a consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace

from rt.log.format.headers import Headers
from rt.otel.spans import attributes_of, current_span, inject, links_of, tracer_of

if TYPE_CHECKING:
    from rt.streams.core.event_batch import EventBatch
    from rt.streams.core.stream_id import StreamId


class StreamTracing:
    """Traces of a provider of streams: `StreamProvider(tracing=rt.otel.StreamTracing())`.

    The span of a publish is a child of the current one. Its context is in the headers of the events, unless
    they have one. The span of a delivery links to the spans that published its events: to the first 128
    different ones. `tracer_provider` defaults to that of the program.
    """

    def __init__(self, *, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = tracer_of(tracer_provider)

    @contextmanager
    def publish(self, stream: StreamId, events: int, headers: Headers) -> Iterator[Headers]:
        """A span of kind PRODUCER. Yields `headers` with the context of the span."""
        attributes = {
            **attributes_of("publish", _destination(stream), None),
            "messaging.rt.topic": stream.topic,
            "messaging.operation.type": "send",
            "messaging.batch.message_count": events,
        }
        with current_span(self._tracer, trace.SpanKind.PRODUCER, attributes, links_of([headers])):
            yield inject(headers)

    @contextmanager
    def process(self, batch: EventBatch, subscription: str) -> Iterator[trace.Span]:
        """A span of kind CONSUMER."""
        attributes = {
            **attributes_of("process", _destination(batch.stream), None),
            "messaging.rt.topic": batch.stream.topic,
            "messaging.operation.type": "process",
            "messaging.consumer.group.name": subscription,
            "messaging.batch.message_count": len(batch),
            "messaging.rt.position": batch.first.sequence_number,
        }
        links = links_of(batch.headers or ())
        with current_span(self._tracer, trace.SpanKind.CONSUMER, attributes, links) as span:
            yield span


def _destination(stream: StreamId) -> str:
    """The namespace of the stream. There may be too many keys to use them as names of spans."""
    return stream.namespace or stream.key

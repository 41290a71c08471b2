"""Spans around the handling of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace

from rt.log.format.headers import Headers
from rt.log.scan.message_batch import Message, MessageBatch
from rt.otel.attributes import attributes_of, current_span, tracer_of
from rt.otel.context import links_of


@contextmanager
def process(
    messages: Message | MessageBatch | Sequence[Message],
    stream: str,
    *,
    name: str | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> Iterator[trace.Span]:
    """A span of kind CONSUMER around the handling of a message, or one around that of a batch.

    It links to the spans that published the messages; for a batch, to the first 128 different ones. Its
    parent is the current span. `name` is the subscriber's. An exception is recorded and raised.
    """
    attributes: dict[str, str | int] = {
        **attributes_of("process", stream, name),
        "messaging.operation.type": "process",
    }
    if isinstance(messages, Message):
        sets: Iterable[Headers] = [messages.headers]
        attributes["messaging.message.id"] = f"{messages.session}/{messages.number}"
        attributes["messaging.rt.number"] = messages.number
        attributes["messaging.rt.position"] = messages.position
        if messages.topic:
            attributes["messaging.rt.topic"] = messages.topic
    else:
        if isinstance(messages, MessageBatch):
            sets = messages.headers
        else:
            sets = [message.headers for message in messages]
        attributes["messaging.batch.message_count"] = len(messages)
    with current_span(
        tracer_of(tracer_provider), trace.SpanKind.CONSUMER, attributes, links_of(sets)
    ) as span:
        yield span

"""Spans and their attributes; the span around the handling of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from opentelemetry import trace

from rt.log.format.headers import Headers
from rt.log.scan.message_batch import Message, MessageBatch
from rt.otel.context import links_of

Attributes: TypeAlias = Mapping[str, str | int]


def attributes_of(operation: str, stream: str, client: str | None) -> dict[str, str | int]:
    """What all spans and metrics have. `client` is the name of the session or of the subscriber."""
    return {
        "messaging.system": "rt",
        "messaging.operation.name": operation,
        "messaging.destination.name": stream,
        **({} if client is None else {"messaging.client.id": client}),
    }


@contextmanager
def current_span(
    tracer: trace.Tracer, kind: trace.SpanKind, attributes: Attributes, links: list[trace.Link]
) -> Iterator[trace.Span]:
    """A span named after its operation and stream. An exception is recorded, with its class."""
    name = f"{attributes['messaging.operation.name']} {attributes['messaging.destination.name']}"
    with tracer.start_as_current_span(name, kind=kind, attributes=attributes, links=links) as span:
        try:
            yield span
        except Exception as error:
            span.set_attribute("error.type", f"{type(error).__module__}.{type(error).__qualname__}")
            raise


def tracer_of(provider: trace.TracerProvider | None) -> trace.Tracer:
    return trace.get_tracer("rt", tracer_provider=provider)


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

"""Spans, their attributes, and their context in the headers of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from rt.errors import InvalidHeader
from rt.log.format.headers import Headers, HeadersInput, checked_headers
from rt.log.scan.message_batch import Message, MessageBatch

Attributes: TypeAlias = Mapping[str, str | int]

LINKS_MAX: Final = 128
"""Links of the span of a batch: the default limit of the SDK."""


def inject(headers: HeadersInput = (), context: Context | None = None) -> Headers:
    """The headers, and those of the trace context: `traceparent`, `tracestate`, or what else the propagators
    of the program set. `context` defaults to the current one. Headers that carry a context keep it.
    Those without room for one stay as they are, so that tracing prevents no message.
    """
    pairs = checked_headers(headers) if headers else ()
    if pairs and _span_context(pairs).is_valid:
        return pairs
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    known = {key for key, _ in pairs}
    added = [(key, value.encode("utf-8", "replace")) for key, value in carrier.items() if key not in known]
    try:
        return checked_headers([*pairs, *added])
    except InvalidHeader:
        return pairs


def extract(headers: Iterable[tuple[str, bytes]]) -> Context:
    """The context in a message's headers: pass it as `context=` to continue the trace of the publisher."""
    fields = propagate.get_global_textmap().fields
    carrier = {key: value.decode("utf-8", "replace") for key, value in headers if key in fields}
    return propagate.extract(carrier, Context())


def links_of(sets: Iterable[Headers]) -> list[trace.Link]:
    """Links to the contexts in the different sets of headers."""
    found: dict[int, trace.Link] = {}
    for headers in filter(None, dict.fromkeys(sets)):
        context = _span_context(headers)
        if context.is_valid and context.span_id not in found:
            found[context.span_id] = trace.Link(context)
            if len(found) == LINKS_MAX:
                break
    return list(found.values())


def _span_context(headers: Headers) -> trace.SpanContext:
    """The span context. Baggage is left out, because a propagator logs its errors for each message."""
    spans = ((key, value) for key, value in headers if key != "baggage")
    return trace.get_current_span(extract(spans)).get_span_context()


def attributes_of(operation: str, stream: str, client: str | None) -> dict[str, str | int]:
    """The attributes of all spans and metrics. `client` is the name of the session or of the subscriber."""
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

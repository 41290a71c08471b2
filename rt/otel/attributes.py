"""Spans with the attributes that the semantic conventions ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from opentelemetry import trace

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

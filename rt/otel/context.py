"""The context of a trace in the headers of messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from rt.errors import InvalidHeader
from rt.log.format.headers import Headers, HeadersInput, checked_headers

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
    """Without baggage: a propagator logs what is wrong with it, for each message."""
    spans = ((key, value) for key, value in headers if key != "baggage")
    return trace.get_current_span(extract(spans)).get_span_context()

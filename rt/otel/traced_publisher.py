"""A publisher whose calls are traced."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from time import time_ns
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry import trace

import rt.aio
from rt.log.format.constants import Int64s
from rt.log.format.headers import HeadersInput, checked_headers, headers_of_each
from rt.otel.merge_spans import MergeSpans, PendingMerge
from rt.otel.spans import Attributes, attributes_of, current_span, inject, links_of, tracer_of

One_co = TypeVar("One_co", covariant=True)
Many_co = TypeVar("Many_co", covariant=True)


class _PublisherLike(Protocol[One_co, Many_co]):
    @property
    def session(self) -> str:
        """The name of the session."""

    def publish(
        self,
        value: bytes,
        topic: str = "",
        timestamp_ns: int | None = None,
        number: int | None = None,
        headers: HeadersInput = (),
    ) -> One_co:
        """Append one message."""

    def publish_many(
        self,
        values: Iterable[bytes],
        topic: str = "",
        timestamps_ns: Sequence[int] | Int64s | None = None,
        headers: HeadersInput | Sequence[HeadersInput] = (),
    ) -> Many_co:
        """Append many messages."""


class TracedPublisher(Generic[One_co, Many_co]):
    """A publisher whose calls of `publish` and `publish_many` get a span each, of kind PRODUCER.

    `publisher` is an `rt.Publisher` or `rt.aio.Publisher`. The span's context is in the headers of the
    messages, unless they have one. With endpoints, a child span "merge" lasts until this process learns that
    all messages of the call are merged. Messages that are not merged when the publisher closes get none, nor
    do more than 10,000 calls that wait at the same time.

    All other attributes are those of `publisher`: flush, wait and close it as ever. `tracer_provider`
    defaults to that of the program. As thread-safe as `publisher`.
    """

    def __init__(
        self,
        publisher: _PublisherLike[One_co, Many_co],
        *,
        tracer_provider: trace.TracerProvider | None = None,
    ) -> None:
        self._publisher: Any = publisher
        self._tracer = tracer_of(tracer_provider)
        self._merges: MergeSpans | None = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._publisher, name)

    def publish(
        self,
        value: bytes,
        topic: str = "",
        timestamp_ns: int | None = None,
        number: int | None = None,
        headers: HeadersInput = (),
    ) -> One_co:
        """As `publish` of the publisher."""
        own = checked_headers(headers) if headers else ()
        with self._span(topic, links_of([own]), {}) as span:
            result: One_co = self._publisher.publish(value, topic, timestamp_ns, number, inject(own))
            self._accept(span, _numbers(result), {})
            return result

    def publish_many(
        self,
        values: Iterable[bytes],
        topic: str = "",
        timestamps_ns: Sequence[int] | Int64s | None = None,
        headers: HeadersInput | Sequence[HeadersInput] = (),
    ) -> Many_co:
        """As `publish_many` of the publisher. One span, whose context all messages share."""
        values = values if isinstance(values, list) else list(values)
        own = headers_of_each(headers, len(values)) if headers and values else []
        count = {"messaging.batch.message_count": len(values)}
        with self._span(topic, links_of(own), count) as span:
            injected = {one: inject(one) for one in dict.fromkeys(own)}
            sets = [injected[one] for one in own] if own else inject()
            result: Many_co = self._publisher.publish_many(values, topic, timestamps_ns, sets)
            self._accept(span, _numbers(result), count)
            return result

    def _span(
        self, topic: str, links: list[trace.Link], count: Attributes
    ) -> AbstractContextManager[trace.Span]:
        attributes = attributes_of("publish", self._publisher.stream, self._publisher.session)
        attributes["messaging.operation.type"] = "send"
        if topic:
            attributes["messaging.rt.topic"] = topic
        attributes.update(count)
        return current_span(self._tracer, trace.SpanKind.PRODUCER, attributes, links)

    def _accept(self, span: trace.Span, numbers: range, count: Attributes) -> None:
        """Add the numbers of the accepted messages to the span, and trace their merge."""
        if not numbers or not span.is_recording():
            return
        if not count:
            span.set_attribute("messaging.message.id", f"{self._publisher.session}/{numbers[0]}")
        span.set_attribute("messaging.rt.number", numbers[0])
        if self._merges is None:
            self._start_merges()
        if self._merges is not None:
            self._merges.add(PendingMerge(numbers[-1], time_ns(), span.get_span_context(), count))

    def _start_merges(self) -> None:
        publisher = self._publisher
        core = publisher._opened if isinstance(publisher, rt.aio.Publisher) else publisher
        with self._lock:
            if core._replication is not None and self._merges is None:
                self._merges = MergeSpans(core, core._replication, self._tracer)


def _numbers(result: object) -> range:
    if isinstance(result, int):
        return range(result, result + 1)
    numbers = result if isinstance(result, range) else getattr(result, "numbers", range(0))
    assert isinstance(numbers, range)
    return numbers

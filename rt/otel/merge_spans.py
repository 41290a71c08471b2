"""Spans that last until messages are merged."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context

import rt.client.publisher
from rt.client.wait_handle import WaitHandle
from rt.otel.spans import Attributes, attributes_of

MERGES_MAX: Final = 10_000
"""Maximum number of calls whose merge is awaited at the same time. The calls themselves do not wait."""


class PendingMerge(NamedTuple):
    """Messages up to `number` were published at `since_ns`."""

    number: int
    since_ns: int
    parent: trace.SpanContext
    attributes: Attributes


class MergeSpans:
    """Ends the merge spans of one publisher, in a thread of its own that ends when the publisher closes."""

    def __init__(
        self, publisher: rt.client.publisher.Publisher, replication: WaitHandle, tracer: trace.Tracer
    ) -> None:
        self._publisher, self._replication, self._tracer = publisher, replication, tracer
        self._waiting: deque[PendingMerge] = deque()
        self._changed: SimpleQueue[None] = SimpleQueue()
        thread = threading.Thread(target=self._run, name=f"rt-otel-{publisher.session}", daemon=True)
        thread.start()
        replication.listen(partial(self._changed.put, None))

    def add(self, merge: PendingMerge) -> None:
        if len(self._waiting) < MERGES_MAX:
            self._waiting.append(merge)
            if self._replication.merged.number > merge.number:  # The messages may already be merged.
                self._changed.put(None)

    def _run(self) -> None:
        while not self._replication.is_leaving:
            self._changed.get()
            merged = self._publisher.progress.merged
            while self._waiting and self._waiting[0].number < merged:
                self._end(self._waiting.popleft())

    def _end(self, merge: PendingMerge) -> None:
        parent = trace.set_span_in_context(trace.NonRecordingSpan(merge.parent), Context())
        stream, session = self._publisher.stream, self._publisher.session
        attributes = {**attributes_of("merge", stream, session), **merge.attributes}
        span = self._tracer.start_span(
            f"merge {stream}", parent, attributes=attributes, start_time=merge.since_ns
        )
        span.set_attribute("messaging.rt.number", merge.number)
        span.end()

"""`rt.otel.StreamTracing`: a delivery of events links to the spans that published them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stream_consumers import Collector, until

import rt
import rt.otel
from rt.streams import EventObserver, MemoryQueues, SequenceToken, StreamOptions, StreamProvider
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.core.event_batch import EventBatch

CONTEXT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = rt.otel.StreamTracing(tracer_provider=self.provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.provider.shutdown()


def ids_of(links: Any) -> list[int]:
    return [link.context.span_id for link in links]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_delivery_span_links_to_publish_spans_and_is_current_in_consumer(
    recorder: Recorder,
) -> None:
    current: list[trace.Span] = []

    async def act(batch: EventBatch) -> None:
        current.append(trace.get_current_span())
        if len(current) == 1:
            raise OSError("down")

    async def main() -> None:
        options = StreamOptions(retry_min_s=0.01)
        async with StreamProvider(
            "p", MemoryQueues(1), options=options, tracing=recorder.tracing
        ) as provider:
            got = Collector(act=act)
            stream = provider.stream("n", "a")
            await stream.subscribe(got, name="billing")
            async with asyncio.timeout(60):
                await stream.publish([1])
                await until(lambda: got.events == [1])
                await asyncio.gather(stream.publish([2]), stream.publish([3]))
                await until(lambda: len(got.events) == 3)

    asyncio.run(main())
    sent, handled = recorder.named("publish n"), recorder.named("process n")
    assert [span.kind for span in sent] == [trace.SpanKind.PRODUCER] * 3
    assert {span.kind for span in handled} == {trace.SpanKind.CONSUMER}
    assert ids_of(handled[0].links) == ids_of(handled[1].links) == [id_of(sent[0])]
    assert {each for span in handled[2:] for each in ids_of(span.links)} == {id_of(span) for span in sent[1:]}
    assert (handled[0].attributes or {})["error.type"] == "builtins.OSError"
    assert (handled[0].attributes or {})["messaging.consumer.group.name"] == "billing"
    assert (handled[0].attributes or {})["messaging.rt.topic"] == "n/a"
    assert [span.get_span_context().span_id for span in current] == [id_of(span) for span in handled]
    assert all(span.parent is None for span in handled)


def test_single_events_and_failing_factories_are_traced(recorder: Recorder) -> None:
    events = list[Any]()

    class Single(EventObserver):
        async def on_event(self, event: Any, token: SequenceToken) -> None:
            events.append(event)

    tries = 0

    def factory(_: object) -> Single:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError("down")
        return Single()

    async def main() -> None:
        options = StreamOptions(retry_min_s=0.01)
        provider = StreamProvider("p", MemoryQueues(1), options=options, tracing=recorder.tracing)
        provider.implicit("all", "n/*", factory)
        async with provider, asyncio.timeout(60):
            await provider.stream("n", "a").publish([1, 2], headers={"traceparent": CONTEXT})
            await until(lambda: events == [1, 2])

    asyncio.run(main())
    [sent], handled = recorder.named("publish n"), recorder.named("process n")
    assert ids_of(sent.links) == [0xB7AD6B7169203331], "events that carry a context keep it"
    assert [ids_of(span.links) for span in handled] == [[0xB7AD6B7169203331]] * 2


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("topics", [["n/a"], ["n/a", "n/b"]])
def test_log_events_carry_headers_of_their_messages(
    tmp_path: Path, recorder: Recorder, topics: list[str], is_split: bool
) -> None:
    feeds = Feeds(tmp_path, ["a"])
    for number in range(4):
        for topic in topics:
            headers = (("traceparent", CONTEXT[:-4] + b"%x-01" % number),) if number else ()
            feeds.publish("a", [b"%d" % number], topic, [number], headers)
    feeds.merge()
    seen: list[tuple[Any, Any]] = []

    async def act(batch: EventBatch) -> None:
        assert batch.headers is not None
        assert len(batch.headers) == len(batch)
        seen.extend(zip(batch.events, batch.headers, strict=True))

    async def main() -> None:
        split = (lambda value: [value, value]) if is_split else None
        queues = ClusterQueues({"q": Cluster("s", feeds.path)}, split=split)
        async with StreamProvider("p", queues, tracing=recorder.tracing) as provider, asyncio.timeout(60):
            got = Collector(act=act)
            await provider.stream("n", "a").subscribe(
                got, start="earliest", where=lambda value: value != b"2", batch_within_s=0.2
            )
            await until(lambda: len(got.events) == (6 if is_split else 3))

    asyncio.run(main())
    feeds.close()
    assert [(value, dict(headers).get("traceparent", b"")[-4:]) for value, headers in seen] == [
        (value, parent)
        for value, parent in ((b"0", b""), (b"1", b"1-01"), (b"3", b"3-01"))
        for _ in range(2 if is_split else 1)
    ]
    links = {each for span in recorder.named("process n") for each in ids_of(span.links)}
    assert links == {0xB7AD6B7169203331 & ~0xF | number for number in (1, 3)}


def test_cluster_messages_carry_context_of_their_publish_span(tmp_path: Path, recorder: Recorder) -> None:
    async def main() -> None:
        cluster = Cluster("s", str(tmp_path), writer=lambda: rt.Publisher(tmp_path, "s", publisher_id="feed"))
        queues = ClusterQueues({"q": cluster})
        async with StreamProvider("p", queues, tracing=recorder.tracing) as provider:
            stream = provider.stream("n", "a")
            await asyncio.gather(stream.publish([b"1", b"2"]), stream.publish([b"3"], headers={"k": b"v"}))

    asyncio.run(main())
    with rt.LogReader(tmp_path / "s" / "sessions" / "feed") as reader:
        found = [dict(message.headers) for message in reader]
    parents = [b"%016x" % id_of(span) for span in recorder.named("publish n")]
    assert sorted({each["traceparent"][36:52] for each in found}) == sorted(parents)
    assert [each.get("k") for each in found] == [None, None, b"v"]
    assert found[0] == found[1]


def test_streams_do_not_import_opentelemetry() -> None:
    program = "import sys, rt.streams.provider; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

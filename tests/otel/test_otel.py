"""`rt.otel`: contexts in headers, spans of publishing, merging and processing, and metrics of clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from push_node import NodesInThread, PushNode

import rt
import rt.aio
import rt.otel
from rt.log.format.headers import HEADERS_BYTES_MAX
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from rt.otel import merge_spans, spans

WAIT_SECONDS = 120
SAMPLED = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    """A tracer provider for one test, and the spans that it recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, operation: str) -> list[ReadableSpan]:
        found = self.exporter.get_finished_spans()
        return [span for span in found if attribute(span, "messaging.operation.name") == operation]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.provider.shutdown()


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


def context_of(span: ReadableSpan) -> trace.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def messages_of(publisher: rt.Publisher) -> list[rt.Message]:
    publisher.flush()
    with rt.LogReader(publisher.directory) as reader:
        return list(reader)


def test_process_span_links_to_publish_span_of_its_message(tmp_path: Path, recorder: Recorder) -> None:
    with rt.Publisher(tmp_path, "trades", publisher_id="feed", linger_ms=0) as publisher:
        traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
        assert traced.publish(b"one", topic="t", headers={"key": b"value"}) == 0
        [message] = messages_of(publisher)
    assert [key for key, _ in message.headers] == ["key", "traceparent"]
    with rt.otel.process(message, "trades", name="app", tracer_provider=recorder.provider) as span:
        assert trace.get_current_span() is span
    [sent], [handled] = recorder.named("publish"), recorder.named("process")
    assert (sent.name, sent.kind) == ("publish trades", trace.SpanKind.PRODUCER)
    assert (handled.name, handled.kind) == ("process trades", trace.SpanKind.CONSUMER)
    assert [link.context.span_id for link in handled.links] == [context_of(sent).span_id]
    assert handled.parent is None, "the context of the message is a link, not the parent"
    assert dict(sent.attributes or {}) == {
        names.MESSAGING_SYSTEM: "rt",
        names.MESSAGING_OPERATION_NAME: "publish",
        names.MESSAGING_OPERATION_TYPE: names.MessagingOperationTypeValues.SEND.value,
        names.MESSAGING_DESTINATION_NAME: "trades",
        names.MESSAGING_CLIENT_ID: "feed",
        names.MESSAGING_MESSAGE_ID: "feed/0",
        "messaging.rt.topic": "t",
        "messaging.rt.number": 0,
    }
    assert dict(handled.attributes or {}) == {
        names.MESSAGING_SYSTEM: "rt",
        names.MESSAGING_OPERATION_NAME: "process",
        names.MESSAGING_OPERATION_TYPE: names.MessagingOperationTypeValues.PROCESS.value,
        names.MESSAGING_DESTINATION_NAME: "trades",
        names.MESSAGING_CLIENT_ID: "app",
        names.MESSAGING_MESSAGE_ID: "feed/0",
        "messaging.rt.topic": "t",
        "messaging.rt.number": 0,
        "messaging.rt.position": 0,
    }


def test_published_batch_gets_one_span_and_process_links_to_it(tmp_path: Path, recorder: Recorder) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=60_000) as publisher:
        traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
        assert traced.publish_many([b"x"] * 500) == range(500)
        assert traced.publish_many(iter([b"y", b"z"]), headers=[{"a": b"1"}, {"traceparent": SAMPLED}]) == (
            range(500, 502)
        )
        assert traced.publish_many([]) == range(502, 502)
        publisher.flush()
        with rt.LogReader(publisher.directory) as reader:
            batch = reader.next_batch()
    assert batch is not None
    with rt.otel.process(batch, "s", tracer_provider=recorder.provider):
        pass
    with rt.otel.process(list(batch.messages()), "s", tracer_provider=recorder.provider):
        pass
    first, second, _ = recorder.named("publish")
    assert attribute(first, names.MESSAGING_BATCH_MESSAGE_COUNT) == 500
    assert [link.context.span_id for link in second.links] == [0xB7AD6B7169203331]
    for handled in recorder.named("process"):
        assert attribute(handled, names.MESSAGING_BATCH_MESSAGE_COUNT) == len(batch) == 502
        linked = [link.context.span_id for link in handled.links]
        assert linked == [context_of(first).span_id, context_of(second).span_id, 0xB7AD6B7169203331]


def test_context_set_by_program_is_kept_and_linked(tmp_path: Path, recorder: Recorder) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
        traced.publish(b"x", headers={"traceparent": SAMPLED})
        [message] = messages_of(publisher)
    assert message.headers == (("traceparent", SAMPLED),)
    [span] = recorder.named("publish")
    assert [link.context.span_id for link in span.links] == [0xB7AD6B7169203331]


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"00-0-0-0", SAMPLED[:-1], b"x" * 60_000])
def test_invalid_context_headers_are_ignored(value: bytes, recorder: Recorder) -> None:
    headers = (("traceparent", value), ("tracestate", b"\xff"), ("baggage", b"="))
    message = rt.Message(0, 0, "feed", 0, 0, "", b"x", headers)
    with rt.otel.process(message, "s", tracer_provider=recorder.provider):
        pass
    assert [span.links for span in recorder.named("process")] == [()]
    assert rt.otel.inject(headers)[:3] == headers


def test_injected_context_continues_trace_when_extracted(recorder: Recorder) -> None:
    tracer = recorder.provider.get_tracer("test")
    with tracer.start_as_current_span("outer") as outer:
        headers = rt.otel.inject({"key": b"value"})
    assert [key for key, _ in headers] == ["key", "traceparent"]
    with tracer.start_as_current_span("inner", context=rt.otel.extract(headers)) as inner:
        assert inner.get_span_context().trace_id == outer.get_span_context().trace_id
    assert rt.otel.inject() == (), "no span is current"


@pytest.mark.parametrize(
    "headers", [{f"key{at}": b"" for at in range(127)}, {"key": bytes(HEADERS_BYTES_MAX - 3)}]
)
def test_headers_without_room_for_context_are_published_unchanged(
    tmp_path: Path, recorder: Recorder, headers: dict[str, bytes]
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
        parent = trace.SpanContext(1, 2, False, trace.TraceFlags(1), trace.TraceState([("a", "b")]))
        with trace.use_span(trace.NonRecordingSpan(parent)):
            traced.publish(b"one", headers=headers)
            traced.publish_many([b"two"], headers=headers)
        assert [message.headers for message in messages_of(publisher)] == [tuple(headers.items())] * 2


def test_invalid_baggage_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    [link] = spans.links_of([(("traceparent", SAMPLED), ("baggage", "\u00ff=\u00ff,=,".encode()))])
    assert link.context.is_valid
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_links_of_batch_are_limited_to_links_max() -> None:
    sets = [(("traceparent", b"00-%032x-%016x-01" % (7, number)),) for number in range(1, 1000)]
    assert len(spans.links_of(sets)) == spans.LINKS_MAX


def test_errors_are_recorded_on_spans_and_raised(tmp_path: Path, recorder: Recorder) -> None:
    publisher = rt.Publisher(tmp_path, "s", publisher_id="feed")
    traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
    with pytest.raises(rt.InvalidHeader):
        traced.publish(b"x", headers={"": b"no key"})
    traced.close()
    with pytest.raises(rt.Closed):
        traced.publish(b"late")
    [span] = recorder.named("publish")
    assert (attribute(span, "error.type"), span.status.is_ok) == ("rt.errors.Closed", False)
    with pytest.raises(AttributeError):
        _ = traced.no_such_method
    message = rt.Message(0, 0, "feed", 0, 0, "", b"x", ())
    with (
        pytest.raises(ZeroDivisionError),
        rt.otel.process(message, "s", tracer_provider=recorder.provider),
    ):
        _ = 1 // 0
    assert [attribute(span, "error.type") for span in recorder.named("process")] == [
        "builtins.ZeroDivisionError"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_merge_span_is_child_of_publish_span_and_ends_after_merge(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    init_ca(tmp_path)
    issue(tmp_path, Identity("s", "node", "n1"), loopback=True)
    issue(tmp_path, Identity("s", "publisher", "feed"))
    node_tls, tls = (
        TLS(tmp_path / "ca.crt", tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        for name in ("n1", "feed")
    )
    node = PushNode(members=1)
    monkeypatch.setattr(merge_spans, "MERGES_MAX", 2)
    told: list[int] = []
    options: dict[str, Any] = {
        "on_merged": told.append,
        "publisher_id": "feed",
        "linger_ms": 0,
        "endpoints": [node.endpoint],
        "tls": tls,
    }

    async def main() -> None:
        async with rt.aio.Publisher(tmp_path, "s", **options) as publisher:
            traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
            assert (await traced.publish(b"one"), await traced.publish_many([b"x"] * 3)) == (
                range(1),
                range(1, 4),
            )
            await asyncio.to_thread(until, lambda: len(recorder.named("merge")) == 2 and told[-1:] == [4])

    with NodesInThread(node, tls=node_tls):
        if is_async:
            asyncio.run(main())
        else:
            with rt.Publisher(tmp_path, "s", **options) as publisher:
                traced = rt.otel.TracedPublisher(publisher, tracer_provider=recorder.provider)
                traced.publish(b"one")
                assert traced.publish_many([b"x"] * 3) == range(1, 4)
                until(lambda: len(recorder.named("merge")) == 2 and told[-1:] == [4])
    assert node.faults == []
    published, merged = recorder.named("publish"), recorder.named("merge")
    for parent, child in zip(published, merged, strict=True):
        assert child.name == "merge s"
        assert child.parent is not None
        assert child.parent.span_id == context_of(parent).span_id
        assert parent.start_time is not None
        assert child.start_time is not None
        assert child.end_time is not None
        assert parent.start_time <= child.start_time <= child.end_time
    assert [attribute(span, "messaging.rt.number") for span in merged] == [0, 3]
    assert [attribute(span, names.MESSAGING_BATCH_MESSAGE_COUNT) for span in merged] == [None, 3]


def collected(reader: InMemoryMetricReader) -> dict[str, list[tuple[str, int]]]:
    """The points of each metric: client and value."""
    data: Any = reader.get_metrics_data()
    return {
        metric.name: sorted(
            (point.attributes["messaging.client.id"], point.value) for point in metric.data.data_points
        )
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_client_counters_are_exported_as_metrics(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    directory = str(tmp_path / "s" / "sessions" / "one")

    async def main() -> dict[str, list[tuple[str, int]]]:
        unopened = rt.aio.Subscriber(directory, "s", name="never")
        async with (
            rt.aio.Publisher(tmp_path, "s", publisher_id="two") as other,
            rt.aio.Subscriber(directory, "s", name="later") as later,
        ):
            for client in (other, later, unopened):
                rt.otel.observe(client, meter_provider=provider)
            other.publish(b"x")
            await later.poll(1)
            return await asyncio.to_thread(collected, reader)

    with rt.Publisher(tmp_path, "s", publisher_id="one", linger_ms=0) as publisher:
        rt.otel.observe(publisher, meter_provider=provider)
        rt.otel.observe(publisher, meter_provider=provider)
        publisher.publish_many([b"12345"] * 4)
        publisher.flush()
        with rt.Subscriber(directory, "s", name="app") as subscriber:
            rt.otel.observe(subscriber, meter_provider=provider)
            subscriber.poll(3)
            found = asyncio.run(main())
    assert found["rt.client.published.messages"] == [("one", 4), ("two", 1)]
    assert found["rt.client.published.size"] == [("one", 20), ("two", 1)]
    assert found[messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES] == [("one", 0), ("two", 0)]
    assert found[messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES] == [("app", 3), ("later", 1)]
    assert found["rt.client.lag"] == [("app", 1), ("later", 3)]
    provider.shutdown()


FORKED = """
import os, sys
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
import rt, rt.otel

reader = InMemoryMetricReader()
provider = MeterProvider([reader], shutdown_on_exit=False)
with rt.Publisher(sys.argv[1], "s", publisher_id="one") as publisher:
    rt.otel.observe(publisher, meter_provider=provider)
    publisher.publish(b"x")
    if os.fork() == 0:
        data = reader.get_metrics_data()
        resources = data.resource_metrics if data else []
        metrics = [one for each in resources for scope in each.scope_metrics for one in scope.metrics]
        os._exit(7 if not any(one.data.data_points for one in metrics) else 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert reader.get_metrics_data() is not None
"""


def test_forked_child_reports_no_metrics_of_its_parent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, tmp_path], check=True, timeout=120)


def test_rt_does_not_import_opentelemetry_and_import_error_names_the_extra() -> None:
    code = (
        "import sys, rt, rt.aio; rt.Publisher, rt.Subscriber; "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules); "
        "sys.modules['opentelemetry'] = None\n"
        "try:\n    import rt.otel\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rt-transport[otel]" in done.stdout

"""Query engine status, metrics, log lines, and the HTTP server for them."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from typing import Any

import prometheus_client.parser
import pytest
from query_engines import FailingStore, Numbers, Sink

from rt.errors import DiskFull
from rt.exposition import exposition
from rt.log_limit import LogLimit
from rt.objects import CheckpointKind, MemoryStore
from rt.query import (
    Backlogged,
    Factories,
    Mitigation,
    Observable,
    QueryEngine,
    Source,
    Start,
    VirtualScheduler,
)
from rt.query import operators as ops
from rt.query.core.clock import EventTime
from rt.query.core.reliable import RESUME
from rt.query.monitoring.backlog_log import BacklogLog
from rt.query.monitoring.metrics import metrics_of
from rt.query.monitoring.status import QueryStatus
from rt.query.monitoring.status_server import serve_status

factories = Factories()


@factories("even")
def even() -> Observable[Any]:
    return Source("numbers").pipe(ops.where(lambda v: v % 2 == 0))


@factories("inverse")
def inverse() -> Observable[Any]:
    return Source("numbers").pipe(ops.map(lambda v: 1 // (v - 3)))


@factories("all")
def all_kept() -> Observable[Any]:
    return Source("numbers").pipe(ops.to_list())


@factories("both")
def both() -> Observable[Any]:
    return Source("numbers").pipe(ops.merge(Source("others")))


class KnownEnd(Numbers):
    end = 100


def engine_of(store: Any = None, source: Numbers | None = None, **more: Any) -> tuple[QueryEngine, Numbers]:
    source = source or KnownEnd()
    engine = QueryEngine(store or MemoryStore(), factories, **more)
    engine.add_source("numbers", source)
    engine.add_sink("out", limit=5)
    engine.recover()
    return engine, source


def query(engine: QueryEngine, query_id: str = "q") -> QueryStatus:
    (found,) = (each for each in engine.status().queries if each.id == query_id)
    return found


def test_query_status_reports_events_results_skipped_values_and_lag() -> None:
    engine, source = engine_of()
    source.pump(2)
    engine.start("q", "inverse")
    engine.start("even", "even", sink="out", on_error="stop")
    source.pump(8)
    found = query(engine)
    assert (found.state, found.events, found.results, found.skipped) == ("running", 6, 5, 1)
    assert (found.watermarks, found.lag, found.sources) == ({"numbers": 7}, 92, ("numbers",))
    assert (found.factory, found.on_error, query(engine, "even").on_error) == ("inverse", "skip", "stop")
    assert query(engine, "even").results == 3
    assert engine.status().dead_letters == 1


def test_event_and_skipped_counts_are_exact_after_crash() -> None:
    store = MemoryStore()
    engine, source = engine_of(store)
    source.pump(2)
    engine.start("q", "inverse")
    source.pump(8)
    for is_stored in (False, True):
        if is_stored:
            engine.checkpoint()
        after, again = engine_of(MemoryStore(store.content()), KnownEnd(source.acknowledged))
        again.pump(10)
        assert (query(after).events, query(after).skipped) == (8, 1)


def test_event_count_excludes_ids_skipped_by_source() -> None:
    store = MemoryStore()
    for begin, first in ((None, 7), (5, 5)):
        engine = QueryEngine(store, factories)
        source, others = Numbers(), Numbers()
        engine.add_source("numbers", source, begin=begin, on_gap=lambda gap: None)
        others.is_dense = False
        engine.add_source("others", others)
        engine.recover()
        if begin is None:
            engine.start("q", "both")
        for edge in (source.observer, others.observer):
            for at in (first, first + 1, first + 5):
                edge.on_next(at + (0 if begin is None else 20), at)
        assert query(engine).events == (6 if begin is None else 12)
        engine.checkpoint()
        engine.unload()


def test_query_lag_is_none_if_source_end_is_unknown() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    source, other = KnownEnd(), Numbers()
    engine.add_source("numbers", source)
    engine.add_source("others", other)
    engine.recover()
    engine.start("q", "both")
    engine.start("even", "even")
    source.pump(3)
    other.pump(2)
    assert (query(engine).events, query(engine).lag, query(engine).sources) == (
        5,
        None,
        ("numbers", "others"),
    )
    assert query(engine, "even").lag == 97
    other.observer.on_completed()
    assert query(engine).lag == 97


def test_sink_used_as_source_reports_its_end_and_lag() -> None:
    engine, source = engine_of()
    engine.add_source("between", engine.add_sink("between"))
    engine.start("q", "even", sink="between")
    source.pump(9)
    (status,) = (each for each in engine.status().sources if each.name == "between")
    assert (status.watermark, status.end, status.lag) == (-1, 5, 5)


def test_query_status_shows_completion_or_error() -> None:
    engine, source = engine_of()
    engine.start("q", "inverse", on_error="stop")
    engine.start("done", "all")
    source.pump(5)
    source.observer.on_completed()
    assert (query(engine).state, query(engine).error[:17]) == ("failed", "ZeroDivisionError")
    assert query(engine, "done").state == "completed"
    assert query(engine, "done").lag == 0


def test_clock_lag_is_reported_only_for_clock_driven_by_values() -> None:
    assert engine_of()[0].status().clock_lag_s is None
    engine = QueryEngine(MemoryStore(), factories, VirtualScheduler())
    source = Numbers()
    engine.add_source("numbers", source, time_of=lambda value: value * 10**9)
    engine.recover()
    assert engine.status().clock_lag_s is None
    source.pump(3)
    lag_s = engine.status().clock_lag_s
    assert lag_s is not None
    assert lag_s > 10**9


def test_checkpoint_status_reports_size_time_failures_and_bytes_per_query() -> None:
    store = FailingStore()
    engine, source = engine_of(store)
    assert engine.status().checkpoints.ended_ns is None
    engine.start("q", "all")
    engine.start("even", "even")
    assert engine.status().checkpoints.count == 0  # A start is an entry of the log.
    source.pump(50)
    engine.checkpoint()
    first = engine.status().checkpoints
    assert (first.count, first.kind, first.bytes_sum) == (1, "differential", first.bytes)
    assert 50 < first.query_bytes["q"] < first.bytes
    assert first.rows > 50
    assert first.seconds > 0
    source.pump(51)
    engine.checkpoint()
    second = engine.status().checkpoints
    assert second.query_bytes["q"] < first.query_bytes["q"]
    engine.checkpoint(CheckpointKind.FULL)
    third = engine.status().checkpoints
    assert (third.kind, third.query_bytes["q"] > first.query_bytes["q"]) == ("full", True)
    assert query(engine).checkpoint_bytes == third.query_bytes["q"]
    store.fail_once(DiskFull("full"), happens=False)
    with pytest.raises(DiskFull):
        engine.checkpoint()
    assert (engine.status().checkpoints.failures, engine.status().checkpoints.count) == (1, 3)
    engine.stop("q")
    engine.checkpoint()
    assert set(engine.status().checkpoints.query_bytes) == {"even"}


def opened(value: int) -> Observable[Any]:
    return Source("others").pipe(ops.take(1))


@factories("inner")
def only_inner() -> Observable[Any]:
    return Source("numbers").pipe(ops.take(1), ops.flat_map(opened))


def test_sources_of_ended_inner_subscriptions_are_counted_after_recovery() -> None:
    def made(store: Any) -> tuple[QueryEngine, Numbers, Numbers]:
        engine, numbers, others = QueryEngine(store, factories), KnownEnd(), KnownEnd()
        engine.add_source("numbers", numbers)
        engine.add_source("others", others)
        engine.recover()
        return engine, numbers, others

    store = FailingStore()
    engine, numbers, others = made(store)
    engine.start("q", "inner")
    numbers.pump(2)
    engine.checkpoint()
    others.pump(3)
    assert (query(engine).events, query(engine).sources) == (5, ("numbers", "others"))
    assert query(engine).state == "completed"
    for kind in (CheckpointKind.DIFFERENTIAL, CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL):
        engine.checkpoint(kind)
        engine.unload()
        engine, numbers, others = made(store)
        assert (query(engine).events, query(engine).sources) == (5, ("numbers", "others"))
        assert query(engine).watermarks == {"numbers": 1, "others": 2}


# Stages


@factories("key")
def key_of_stage(key: int) -> Observable[Any]:
    return Source("parity", key=key)


@factories("late-stage")
def late_reader() -> Observable[Any]:
    return Source("numbers").pipe(ops.take(1), ops.flat_map(lambda _: Source("tens").pipe(ops.take(1))))


def staged(store: Any, source: Numbers | None = None) -> tuple[QueryEngine, Numbers]:
    source = source or KnownEnd()
    engine = QueryEngine(store, factories)
    engine.add_source("numbers", source)
    inverse = Source("numbers").pipe(ops.map(lambda v: (v, 1 // (v - 3))[0]))
    engine.add_stage("parity", inverse, key_of=lambda v: v % 2)
    engine.add_stage("tens", Source("parity").pipe(ops.scan(lambda seen, v: [*seen, v], [])))
    engine.add_stage("ends", Source("numbers").pipe(ops.map(lambda v: 1 // (v - 2))), on_error="stop")
    engine.recover()
    return engine, source


def test_stage_has_own_status_row_and_query_status_lists_its_stages() -> None:
    store = FailingStore()
    engine, source = staged(store)
    for number in range(3):
        engine.start(f"q{number}", "key", {"key": number % 2})
    engine.start("late", "late-stage")
    source.pump(8)
    engine.checkpoint()
    parity, tens, ends = engine.status().stages
    assert (parity.name, parity.state, parity.error) == ("parity", "running", "")
    assert (parity.events, parity.results, parity.skipped, parity.queries) == (8, 7, 1, 3)
    assert (parity.sources, parity.stages) == (("numbers",), ())
    assert (tens.events, tens.results, tens.sources, tens.stages) == (8, 7, ("numbers",), ("parity",))
    assert 0 < parity.checkpoint_bytes < tens.checkpoint_bytes
    assert (ends.state, ends.error[:17], ends.queries) == ("failed", "ZeroDivisionError", 0)
    assert (query(engine, "q1").stages, query(engine, "q1").sources) == (("parity",), ("numbers",))
    assert query(engine, "q1").events == 8
    late = query(engine, "late")
    assert (late.state, late.stages, late.sources) == ("completed", ("tens",), ("numbers",))
    engine.unload()
    after, again = staged(store, KnownEnd(source.acknowledged))
    again.pump(10)
    parity, tens, ends = after.status().stages
    assert (parity.events, parity.results, parity.skipped, parity.queries) == (10, 2, 1, 3)
    assert (ends.state, ends.events) == ("failed", 10)
    assert (query(after, "late").stages, query(after, "late").events) == (("tens",), 10)
    after.unload()


def test_late_stage_counts_from_its_start_and_ignored_stage_does_not_run() -> None:
    store = FailingStore()
    engine, source = engine_of(store)
    source.pump(5)
    engine.checkpoint()
    engine.unload()
    engine, source = staged(store, KnownEnd(source.acknowledged))
    source.pump(8)
    assert [each.events for each in engine.status().stages] == [3, 3, 3]
    engine.checkpoint()
    engine.unload()
    without, _ = engine_of(store, on_load_failed=lambda query_id, error: Mitigation.IGNORE)
    found = without.status().stages
    assert {(each.name, each.state) for each in found} == {
        ("parity", "not running"),
        ("tens", "not running"),
        ("ends", "not running"),
    }
    without.unload()


# Full outputs


def test_query_status_names_blocking_output_and_log_reports_it_once(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "rt.query")
    engine, source = engine_of()
    output = engine.add_sink("other", limit=5)
    sink = Sink()
    subscription = output.subscribe(sink)
    subscription.start(RESUME)
    engine.start("q", "even", sink="other")
    for _ in range(3):
        with pytest.raises(Backlogged):
            source.pump(100)
    assert engine.is_backlogged
    assert query(engine).blocked_by == ("other",)
    (full,) = (each for each in engine.status().outputs if each.is_full)
    assert (full.name, full.kept, full.limit) == ("other", 5, 5)
    assert _records(caplog) == ["sources_stopped full_outputs=other not_logged=0"]
    engine.checkpoint()
    engine.deliver()
    subscription.acknowledge(4)
    source.pump(10)
    assert query(engine).blocked_by == ()
    assert [each.split(" ")[0] for each in _records(caplog)] == ["sources_stopped", "sources_continue"]
    with pytest.raises(Backlogged):
        source.pump(100)
    assert engine.status().stops == 2


def _records(caplog: Any) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "rt.query"]
    return [each for each in found if each.startswith("sources_")]


def test_backlog_log_reports_one_stop_per_minute_and_its_end(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "rt.query")
    times = iter([0.0, 2.0, 3.0, 5.0, 61.0, 62.5])
    log = BacklogLog(lambda: next(times))
    for full in (["a"], ["a", "b"], [], ["b"], [], ["b", "a"], []):
        log.update(full)
    assert _records(caplog) == [
        "sources_stopped full_outputs=a not_logged=0",
        "sources_continue after_s=2.0",
        "sources_stopped full_outputs=a,b not_logged=1",
        "sources_continue after_s=1.5",
    ]
    assert (log.stops, log.stopped_s) == (3, 5.5)


def test_backlog_log_stopped_time_grows_during_stop() -> None:
    times = iter([10.0, 12.0, 15.0, 16.0])
    log = BacklogLog(lambda: next(times))
    assert log.stopped_s == 0.0
    log.update(["a"])
    assert [log.stopped_s, log.stopped_s] == [2.0, 5.0]
    log.update([])
    assert (log.stops, log.stopped_s) == (1, 6.0)


def test_backlog_log_stop_reported_by_late_thread_ends_at_next_update() -> None:
    """One thread saw a full output, another one that it is empty again. The first one reports last."""
    log = BacklogLog(iter([0.0, 0.5, 1.0]).__next__)
    log.update([])
    log.update(["a"])
    log.update([])
    assert (log.stops, log.stopped_s) == (1, 0.5)


def test_log_limit_counts_suppressed_lines() -> None:
    times = [0.0, 1.0, 9.9, 10.0, 25.0, 25.0, 25.0, 35.0]
    limit = LogLimit(10.0)
    assert [limit.admit(now) for now in times] == [0, None, None, 2, 0, None, None, 2]
    several = LogLimit(10.0, at_most=2)
    assert [several.admit(now) for now in times] == [0, 0, None, 1, 0, 0, None, 1]


def test_log_of_skipped_values_is_rate_limited(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "rt.query")
    engine, source = engine_of()
    engine.start_many(Start(f"q{at}", "inverse") for at in range(50))
    source.pump(8)
    found = [each.getMessage() for each in caplog.records if each.getMessage().startswith("value_skipped")]
    assert 1 <= len(found) < 50
    assert "query=q0 operator=map@q0#0 source=numbers id=3 error='ZeroDivisionError" in found[0]


# Metrics


def test_metrics_are_valid_prometheus_text_and_complete() -> None:
    engine, source = engine_of()
    engine.start("q", "inverse", sink="out")
    source.pump(4)
    engine.checkpoint()
    text = exposition(metrics_of('my "engine"', engine.status()))
    samples = {
        (
            sample.name,
            sample.labels.get("query") or sample.labels.get("source") or sample.labels.get("state"),
        ): (sample.value)
        for family in prometheus_client.parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["engine"] == 'my "engine"'
    }
    assert samples["rt_query_events_total", "q"] == 4
    assert samples["rt_query_results_total", "q"] == 3
    assert samples["rt_query_dead_letters_total", "q"] == 1
    assert samples["rt_query_lag", "q"] == 96
    assert samples["rt_queries_source_watermark", "numbers"] == 3
    assert samples["rt_queries", "running"] == 1
    assert samples["rt_queries_dead_letters_total", None] == 1
    assert samples["rt_queries_checkpoint_bytes", None] > 0
    few = exposition(metrics_of("e", engine.status(), per_query=False))
    assert "rt_query_" not in few
    assert "rt_queries_dead_letters_total" in few


def timed(store: Any, source: Numbers) -> QueryEngine:
    engine = QueryEngine(store, factories, VirtualScheduler())
    engine.add_sink("late")
    timing: Any = {"max_jump_s": 50, "late": "late", "on_bad_time": lambda error: None}
    engine.add_source("times", source, time_of=lambda value: TIMES[value], **timing)
    engine.add_source("others", Numbers())
    engine.add_stage("tens", Source("times").pipe(ops.tumbling_window(10, ops.Fold.count())))
    engine.recover()
    return engine


TIMES = [each * 10**9 for each in (100, 120, 105, 115, 900, -1, 1 << 40)]


@factories("window")
def window() -> Observable[Any]:
    return Source("times").pipe(ops.tumbling_window(5, ops.Fold.count()))


def test_status_and_metrics_report_event_times_and_late_and_refused_values() -> None:
    store, source = MemoryStore(), Numbers()
    engine = timed(store, source)
    (times, others) = engine.status().sources
    assert (times.event_time, others.event_time) == (EventTime(None, False, 0, 0), None)
    engine.start("q", "window")
    source.pump(7)
    for is_again in (False, True):
        if is_again:
            engine.checkpoint()
            engine.unload()
            engine = timed(store, Numbers(source.acknowledged))
        status = engine.status()
        assert status.sources[0].event_time == EventTime(120 * 10**9, False, 2, 1)
        assert status.sources[0].skipped == (0 if is_again else 2)
        assert (query(engine).late, status.stages[0].late) == (2, 2)
        text = exposition(metrics_of("e", status))
        for sample in (
            'rt_queries_source_event_time_seconds{engine="e",source="times"} 120.0',
            'rt_queries_source_late_total{engine="e",source="times"} 2',
            'rt_queries_source_refused_total{engine="e",source="times"} 1',
            'rt_queries_source_idle{engine="e",source="times"} 0',
            'rt_queries_late_values_total{engine="e"} 4',
            'rt_queries_stage_late_values_total{engine="e",stage="tens"} 2',
            'rt_query_late_values_total{engine="e",query="q"} 2',
        ):
            assert sample + "\n" in text, sample
        assert 'source_late_total{engine="e",source="others"}' not in text
    engine.unload()


def test_metrics_include_stages_with_and_without_per_query_metrics() -> None:
    engine, source = staged(MemoryStore())
    engine.start("q", "key", {"key": 0})
    source.pump(8)
    for per_query in (True, False):
        text = exposition(metrics_of("e", engine.status(), per_query=per_query))
        for name, value in (
            ("running", 1),
            ("events_total", 8),
            ("results_total", 7),
            ("dead_letters_total", 1),
            ("queries", 1),
        ):
            assert f'rt_queries_stage_{name}{{engine="e",stage="parity"}} {value}\n' in text
        assert 'rt_queries_stage_running{engine="e",stage="ends"} 0\n' in text
    engine.unload()


def get(port: int, path: str) -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_status_server_serves_several_engines() -> None:
    (one, source), (two, _) = engine_of(), engine_of()
    one.start("q", "inverse")
    two.start("other", "even")
    source.pump(4)
    with serve_status({"one": one, "two": two}, port=0) as port:
        kind, text = get(port, "/metrics")
        assert kind.startswith("text/plain; version=0.0.4")
        names = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        assert 'rt_query_running{engine="two",query="other"} 1' in text
        kind, text = get(port, "/queries")
        assert kind == "application/json"
        first, second = json.loads(text)["engines"]
        assert (first["name"], second["name"]) == ("one", "two")
        assert first["status"]["queries"][0]["skipped"] == 1
        assert first["dead_letters"][0]["sequence_id"] == 3
        assert "value" not in first["dead_letters"][0]
        with pytest.raises(urllib.error.HTTPError) as raised:
            get(port, "/other")
        raised.value.close()
        assert raised.value.code == 404
    with serve_status({"one": one}, port=0, show_values=True) as port:
        assert json.loads(get(port, "/queries")[1])["engines"][0]["dead_letters"][0]["value"] == "3"


def test_status_server_returns_500_if_status_raises() -> None:
    class Broken:
        @property
        def dead_letters(self) -> list[Any]:
            return []

        def status(self) -> Any:
            raise RuntimeError("broken")

    with serve_status({"broken": Broken()}, port=0) as port:
        with pytest.raises(urllib.error.HTTPError) as raised:
            get(port, "/queries")
        raised.value.close()
        assert raised.value.code == 500

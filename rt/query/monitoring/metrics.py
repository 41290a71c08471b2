"""The metrics of an engine of queries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from rt.exposition import CONDITION, Metric
from rt.query.monitoring.status import EngineStatus, OutputStatus, QueryStatus, SourceStatus, StageStatus

STATES: Final = ("running", "completed", "failed", "not running")

_NUMBER = float | None


def metrics_of(engine: str, status: EngineStatus, *, per_query: bool = True) -> Iterator[Metric]:
    """All metrics have the label `engine`. `per_query`: include the metrics that name each query."""
    yield from _engine(engine, status)
    yield from _edges(engine, status)
    yield from _stages(engine, status)
    if per_query:
        yield from _queries(engine, status)


def _engine(engine: str, status: EngineStatus) -> Iterator[Metric]:
    queries, checkpoints = status.queries, status.checkpoints
    count = {state: sum(each.state == state for each in queries) for state in STATES}
    yield Metric(
        "rt_queries",
        "Queries by state. failed: an error ended it. not running: it could not be recovered.",
        ("engine", "state"),
        {(engine, state): number for state, number in count.items()},
    )

    def one(name: str, text: str, value: _NUMBER, unit: str = "") -> Metric:
        return Metric(name, text, ("engine",), {} if value is None else {(engine,): value}, unit)

    yield one(
        "rt_queries_dead_letters_total",
        "Values that queries left out because an error was raised for them, since the engine was made.",
        status.dead_letters,
        "values",
    )
    yield one(
        "rt_queries_late_values_total",
        "Values that windows and joins of the running queries and stages left out because they were late.",
        sum(each.late for each in queries) + sum(each.late for each in status.stages),
        "values",
    )
    yield one(
        "rt_queries_clock_lag_seconds",
        "How far the queries' clock, which follows the values, is "
        "behind the system's. No sample without `time_of`.",
        status.clock_lag_s,
    )
    yield one("rt_queries_stops_total", "Times that full outputs stopped the sources.", status.stops, "stops")
    yield one(
        "rt_queries_stopped_seconds_total", "Time of these stops, with the present one.", status.stopped_s
    )
    yield one("rt_queries_checkpoints_total", "Checkpoints.", checkpoints.count, "checkpoints")
    yield one(
        "rt_queries_checkpoint_failures_total",
        "Commits of checkpoints that failed.",
        checkpoints.failures,
        "failures",
    )
    yield one("rt_queries_checkpoint_seconds_total", "Time of all checkpoints.", checkpoints.seconds_sum)
    yield one("rt_queries_checkpoint_bytes_total", "Bytes that all checkpoints wrote.", checkpoints.bytes_sum)
    yield one("rt_queries_checkpoint_seconds", "Time of the last checkpoint.", checkpoints.seconds)
    yield one("rt_queries_checkpoint_bytes", "Bytes that the last checkpoint wrote.", checkpoints.bytes)
    yield one("rt_queries_checkpoint_rows", "Rows that the last checkpoint wrote.", checkpoints.rows)
    yield one(
        "rt_queries_checkpoint_timestamp_seconds",
        "Unix time of the last checkpoint. No sample before it.",
        _seconds(checkpoints.ended_ns),
    )


def _edges(engine: str, status: EngineStatus) -> Iterator[Metric]:
    def source(name: str, text: str, value: Callable[[SourceStatus], _NUMBER], unit: str = "") -> Metric:
        found = {(engine, each.name): value(each) for each in status.sources}
        return Metric(name, text, ("engine", "source"), _known(found), unit)

    def output(name: str, text: str, value: Callable[[OutputStatus], float], unit: str = "") -> Metric:
        found: dict[tuple[str, ...], float] = {(engine, each.name): value(each) for each in status.outputs}
        return Metric(name, text, ("engine", "output"), found, unit)

    yield source(
        "rt_queries_source_watermark",
        "Id of the last value that all queries processed; -1: none.",
        lambda each: each.watermark,
        "id",
    )
    yield source(
        "rt_queries_source_events_total",
        "Values that the queries processed, in all runs.",
        lambda each: each.events,
        "values",
    )
    yield source(
        "rt_queries_source_lag",
        "Ids between the watermark and the end of the source. No sample if the source does not know its end.",
        lambda each: each.lag,
        "ids",
    )
    yield source(
        "rt_queries_source_skipped_total",
        "Values without a time that were skipped, since the engine was made.",
        lambda each: each.skipped,
        "values",
    )
    yield source(
        "rt_queries_source_event_time_seconds",
        "Unix time of its watermark of event time. No sample without `time_of`, or before its first value.",
        lambda each: None if (time := each.event_time) is None else _seconds(time.watermark_ns),
    )
    yield source(
        "rt_queries_source_idle",
        "1 while the queries' clock does not wait for the source, because it sent nothing for `idle_s`. "
        "No sample without `time_of`.",
        lambda each: None if each.event_time is None else each.event_time.is_idle,
        CONDITION,
    )
    yield source(
        "rt_queries_source_late_total",
        "Values with a time before the queries' clock, in all runs. No sample without `time_of`.",
        lambda each: None if each.event_time is None else each.event_time.late,
        "values",
    )
    yield source(
        "rt_queries_source_refused_total",
        "Values beyond `max_jump_s`, which reached no query, in all runs. No sample without `time_of`.",
        lambda each: None if each.event_time is None else each.event_time.refused,
        "values",
    )
    yield output(
        "rt_queries_output_kept",
        "Values of an output that are not acknowledged.",
        lambda each: each.kept,
        "values",
    )
    yield output(
        "rt_queries_output_full",
        "1 if the output has reached its limit, so that all sources wait.",
        lambda each: each.is_full,
        CONDITION,
    )


def _stages(engine: str, status: EngineStatus) -> Iterator[Metric]:
    def stage(name: str, text: str, value: Callable[[StageStatus], float], unit: str = "") -> Metric:
        found: dict[tuple[str, ...], float] = {(engine, each.name): value(each) for each in status.stages}
        return Metric(name, text, ("engine", "stage"), found, unit)

    yield stage(
        "rt_queries_stage_running",
        "1 while the stage, which queries share, runs. 0 if it has ended, or is stored but was not added.",
        lambda each: each.state == "running",
        CONDITION,
    )
    yield stage(
        "rt_queries_stage_events_total",
        "Values that its sources sent since the stage began.",
        lambda each: each.events,
        "values",
    )
    yield stage(
        "rt_queries_stage_results_total",
        "Values that the stage emitted since the engine was made.",
        lambda each: each.results,
        "values",
    )
    yield stage(
        "rt_queries_stage_dead_letters_total",
        "Values that the stage left out since it began.",
        lambda each: each.skipped,
        "values",
    )
    yield stage(
        "rt_queries_stage_late_values_total",
        "Values that its windows and joins left out because they were late, since the stage began.",
        lambda each: each.late,
        "values",
    )
    yield stage(
        "rt_queries_stage_queries",
        "Running queries that read the stage.",
        lambda each: each.queries,
        "queries",
    )
    yield stage(
        "rt_queries_stage_checkpoint_bytes",
        "Bytes of its state in the last checkpoint that wrote some of it.",
        lambda each: each.checkpoint_bytes,
    )


def _queries(engine: str, status: EngineStatus) -> Iterator[Metric]:
    def query(name: str, text: str, value: Callable[[QueryStatus], _NUMBER], unit: str = "") -> Metric:
        found = {(engine, each.id): value(each) for each in status.queries}
        return Metric(name, text, ("engine", "query"), _known(found), unit)

    yield query(
        "rt_query_running", "1 while the query runs.", lambda each: each.state == "running", CONDITION
    )
    yield query(
        "rt_query_events_total",
        "Values that its sources sent since it was started.",
        lambda each: each.events,
        "values",
    )
    yield query(
        "rt_query_results_total",
        "Values that it emitted since the engine was made.",
        lambda each: each.results,
        "values",
    )
    yield query(
        "rt_query_dead_letters_total",
        "Values that it left out since it was started.",
        lambda each: each.skipped,
        "values",
    )
    yield query(
        "rt_query_late_values_total",
        "Values that its windows and joins left out because they were late, since it was started.",
        lambda each: each.late,
        "values",
    )
    yield query(
        "rt_query_lag",
        "Ids that its sources have ahead of it. No sample if one does not know.",
        lambda each: each.lag,
        "ids",
    )
    yield query(
        "rt_query_checkpoint_bytes",
        "Bytes of its state in the last checkpoint that wrote some of it.",
        lambda each: each.checkpoint_bytes,
    )


def _known(found: dict[tuple[str, str], _NUMBER]) -> Mapping[tuple[str, ...], float]:
    return {key: value for key, value in found.items() if value is not None}


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 10**9

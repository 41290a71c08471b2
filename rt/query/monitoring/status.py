"""The status of an engine and its queries, as values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct

from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.edge import OutputEdge, QueryOutput
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.factories import StoredQuery
from rt.query.checkpoint.input_edge import InputEdge
from rt.query.checkpoint.stage_feed import StageFeed
from rt.query.checkpoint.stage_table import stage_of
from rt.query.core.clock import EventTime, QueryClock
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import NS_PER_S
from rt.query.monitoring.backlog_log import BacklogLog
from rt.query.monitoring.checkpoint_stats import CheckpointStats, MeasuredStore
from rt.query.monitoring.dead_letters import DeadLetters

State = Literal["running", "completed", "failed", "not running"]


class SourceStatus(Struct, frozen=True):
    """`watermark`: id of the last value that all queries processed. `events`: number of values in all runs.

    `end`: the id of the next value that will arrive at the source, if the source knows it. `lag`: number of
    ids between `watermark` and `end`. `skipped`: values without a time that were skipped in this run.
    `event_time`: None without `time_of`.
    """

    name: str
    watermark: int
    events: int
    end: int | None
    lag: int | None
    has_ended: bool
    skipped: int
    event_time: EventTime | None


class OutputStatus(Struct, frozen=True):
    """`kept`: number of unacknowledged values. When it reaches `limit`, all sources wait."""

    name: str
    kept: int
    limit: int
    is_full: bool


class QueryStatus(Struct, frozen=True):
    """`events`: values that its sources sent since it was started. `results`: emitted in this run.

    `sources`: include the sources of the `stages` that it reads. `skipped`: dead letters since it was
    started. `late`: values that its windows and joins left out because they were late. `lag`: number of ids
    that the query is behind its sources; None if a source does not know. `checkpoint_bytes`: see
    `CheckpointStats`. `blocked_by`: full outputs, and full operators of any query as `map_async@<address>`.
    """

    id: str
    factory: str
    state: State
    error: str
    on_error: str
    sink: str | None
    started_ns: int
    sources: tuple[str, ...]
    stages: tuple[str, ...]
    events: int
    results: int
    skipped: int
    late: int
    watermarks: dict[str, int]
    lag: int | None
    checkpoint_bytes: int
    blocked_by: tuple[str, ...]


class StageStatus(Struct, frozen=True):
    """`events`: values that its sources sent since it was started. `results`: emitted in this run.

    `sources`, `stages`, `skipped`, `late`, `checkpoint_bytes`: as in `QueryStatus`. `queries`: number of
    running queries that read the stage. State "not running": the stage is stored, but was not added.
    """

    name: str
    state: State
    error: str
    sources: tuple[str, ...]
    stages: tuple[str, ...]
    events: int
    results: int
    skipped: int
    late: int
    queries: int
    checkpoint_bytes: int


class EngineStatus(Struct, frozen=True):
    """`clock_lag_s`: how far the queries' clock is behind the system clock; None if it is the system
    clock.
    """

    state: str
    clock_lag_s: float | None
    sources: tuple[SourceStatus, ...]
    outputs: tuple[OutputStatus, ...]
    stages: tuple[StageStatus, ...]
    queries: tuple[QueryStatus, ...]
    checkpoints: CheckpointStats
    dead_letters: int
    """In this run of the engine."""
    stops: int
    """How often full outputs stopped the sources."""
    stopped_s: float


class EngineMonitor:
    """Reads the status of an engine. Counts nothing itself: it shows numbers that the engine already has."""

    def __init__(
        self,
        runtime: QueryRuntime,
        catalog: QueryCatalog,
        clock: QueryClock,
        edges: EdgeTable,
        store: MeasuredStore,
        backlog: BacklogLog,
        letters: DeadLetters,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._runtime, self._catalog, self._clock, self._edges = runtime, catalog, clock, edges
        self._clock_ns: Final = clock_ns
        self._store: Final = store
        self._backlog: Final = backlog
        self._letters: Final = letters

    def status(self, state: str, lock: Any) -> EngineStatus:
        """Return the status. Holds the engine's lock only for a moment.

        So the numbers of one query may belong to two successive values.
        """
        with lock:
            stored = dict(self._catalog.queries)
            roots = dict(self._runtime.roots)
            inputs = dict(self._edges.inputs)
            outputs = tuple(_output_status(name, each) for name, each in self._edges.outputs.items())
            stages = self._stages()
            full_operators = self._edges.full_operators
            dead_letters, late = self._letters.count, self._runtime.late.copy()
            event_times = self._clock.event_times
            now_ns = self._clock.now_ns if self._clock.follows_values else None
        stats = self._store.stats
        full = (*(each.name for each in outputs if each.is_full), *full_operators)
        sources = {name: _source_status(name, each, event_times.get(name)) for name, each in inputs.items()}
        feeds = _Feeds(sources, {name: each.group for name, each in stages.items()})
        queries = [
            _query_status(query_id, each, roots.get(query_id), feeds, stats, late[query_id], full)
            for query_id, each in stored.items()
        ]
        readers = Counter(name for each in queries if each.state == "running" for name in each.stages)
        return EngineStatus(
            state,
            None if now_ns is None else (self._clock_ns() - now_ns) / NS_PER_S,
            tuple(sources.values()),
            outputs,
            tuple(
                _stage_status(name, each, feeds, readers[name], stats, late) for name, each in stages.items()
            ),
            tuple(queries),
            stats,
            dead_letters,
            self._backlog.stops,
            self._backlog.stopped_s,
        )

    def _stages(self) -> dict[str, _Stage]:
        """All stages by name, including stages that are only stored."""
        new: dict[str, Any] = {"end": None, "skipped": 0, "counts": {}}
        found = {}
        for stage_id, group in self._runtime.stages.items():
            name = stage_of(stage_id) or stage_id
            feed = self._runtime.feed(name)
            sent = feed.sent if isinstance(feed, StageFeed) else 0
            found[name] = _Stage(group, self._catalog.stages.get(name, new), sent)
        unknown = {name: _Stage(None, row, 0) for name, row in self._catalog.stages.items()}
        return {**unknown, **found}


def _source_status(name: str, edge: InputEdge, event_time: EventTime | None) -> SourceStatus:
    watermark, has_ended = edge.feed.watermark, edge.feed.has_ended
    end = watermark + 1 if has_ended else getattr(edge.source, "end", None)
    lag = None if end is None else max(0, end - watermark - 1)
    events, skipped = edge.feed.count, edge.skipped
    return SourceStatus(name, watermark, events, end, lag, has_ended, skipped, event_time)


def _output_status(name: str, edge: OutputEdge) -> OutputStatus:
    return OutputStatus(name, len(edge.buffer), edge.limit, edge.is_full)


def _query_status(
    query_id: str,
    stored: StoredQuery,
    root: OperatorGroup | None,
    feeds: _Feeds,
    stats: CheckpointStats,
    late: int,
    full: tuple[str, ...],
) -> QueryStatus:
    sources = feeds.sources_of(root)
    state = _state(stored.ended, root)
    lags = [each.lag for each in sources]
    output = root.output if root is not None else None
    return QueryStatus(
        id=query_id,
        factory=stored.recipe.factory,
        state=state,
        error=stored.ended or "",
        on_error=str(stored.recipe.on_error),
        sink=stored.sink,
        started_ns=stored.started_ns,
        sources=tuple(each.name for each in sources),
        stages=feeds.stages_of(root),
        events=_events(sources, stored.counts),
        results=output.count if isinstance(output, QueryOutput) else 0,
        skipped=stored.skipped,
        late=late,
        watermarks={each.name: each.watermark for each in sources},
        lag=None if None in lags else sum(each for each in lags if each is not None),
        checkpoint_bytes=stats.query_bytes.get(query_id, 0),
        blocked_by=full if state == "running" else (),
    )


class _Stage(NamedTuple):
    """`group`: None if the stage is stored, but was not added."""

    group: OperatorGroup | None
    row: dict[str, Any]
    sent: int


def _stage_status(
    name: str, stage: _Stage, feeds: _Feeds, queries: int, stats: CheckpointStats, late: Mapping[str, int]
) -> StageStatus:
    sources = feeds.sources_of(stage.group)
    ended = None if stage.row["end"] is None else "".join(stage.row["end"][1:])
    return StageStatus(
        name=name,
        state=_state(ended, stage.group),
        error=ended or "",
        sources=tuple(each.name for each in sources),
        stages=feeds.stages_of(stage.group),
        events=_events(sources, stage.row["counts"]),
        results=stage.sent,
        skipped=stage.row["skipped"],
        late=0 if stage.group is None else late.get(stage.group.id, 0),
        queries=queries,
        checkpoint_bytes=0 if stage.group is None else stats.query_bytes.get(stage.group.id, 0),
    )


class _Feeds(NamedTuple):
    """The sources and stages that queries and stages read."""

    sources: Mapping[str, SourceStatus]
    stages: Mapping[str, OperatorGroup | None]

    def stages_of(self, group: OperatorGroup | None) -> tuple[str, ...]:
        """The stages that the group has read directly."""
        return tuple(name for name in (group.feeds if group is not None else ()) if name in self.stages)

    def sources_of(self, group: OperatorGroup | None) -> list[SourceStatus]:
        """The sources of the group's values, including values that come through stages."""
        found: dict[str, SourceStatus] = {}
        waiting = [group]
        while waiting:
            for name in each.feeds if (each := waiting.pop()) is not None else ():
                if name in self.sources:
                    found[name] = self.sources[name]
                else:
                    waiting.append(self.stages.get(name))
        return list(found.values())


def _state(ended: str | None, group: OperatorGroup | None) -> State:
    if ended is not None:
        return "failed" if ended else "completed"
    return "running" if group is not None else "not running"


def _events(sources: Iterable[SourceStatus], before: Mapping[str, int]) -> int:
    """Number of values that the sources sent after the counts in `before`."""
    return sum(each.events - before.get(each.name, 0) for each in sources)

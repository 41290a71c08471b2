"""An engine of queries: starts and stops them, feeds them, and keeps their state in a store.

    sources ─► input edges ─► queries ─► output edges ─► sinks        all under one lock, event by event
                                │
                            checkpoint: pause, save, resume, commit    one atomic commit of everything

Invariants:
- A checkpoint holds all queries, edges and objects as they were between two events.
- After a recovery the sources start after the checkpoint, so state and watermarks always agree.
- The effects of `start`, `stop`, `define` and `undefine` are durable when they return.
- Sources are acknowledged only by durable checkpoints.

Output is exactly-once if a sink accepts each id once. With `release="commit"` this always holds. With "now",
which does not wait for a checkpoint, it holds if the output depends only on the values of one source (with
`time_of` and a `VirtualScheduler`) and the output knows what its consumer received before the restart
(`OutputEdge.expect`). No query starts or stops until those values were produced again.

Thread-safe. Sources may call from any thread. Factories, operators and callbacks must not call the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from rt.names import check_name
from rt.objects import CheckpointKind, Serializers, Store
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.edge import OnGap, OutputEdge, Release, call_all
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.factories import Factories, Recipe
from rt.query.checkpoint.recovery import Mitigation, OnLoadFailed, Recovery
from rt.query.core.clock import QueryClock
from rt.query.core.errors import WrongState
from rt.query.core.lifecycle import EngineLifecycle, EngineState, EventLock
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.reliable import ReliableObservable
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import RealScheduler, Scheduler
from rt.query.query_registry import QueryRegistry, Start

logger = logging.getLogger("rt.query")


class QueryEngine:
    """The queries in one store. Add the sources and sinks, then call `recover`, also for an empty store.

    - `on_load_failed(query_id, error)` decides what happens to a query that cannot be recovered. Default: the
      recovery fails.
    - `on_save_failed(query_id, error)` may return `Mitigation.REMOVE` for a query whose state cannot be
      saved: it ends with that error. Default: the checkpoint fails.
    - `on_query_ended(query_id, error)` is called for every query that ends.
    """

    def __init__(
        self,
        store: Store,
        factories: Factories,
        scheduler: Scheduler | None = None,
        *,
        serializers: Serializers | None = None,
        on_load_failed: OnLoadFailed | None = None,
        on_save_failed: Callable[[str, Exception], Mitigation | None] | None = None,
        on_query_ended: Callable[[str, Exception | None], object] | None = None,
    ) -> None:
        self.scheduler: Final = scheduler or RealScheduler()
        self._on_load_failed = on_load_failed
        self._on_save_failed = on_save_failed
        self._lifecycle = EngineLifecycle()
        self._lock = EventLock()
        """Held during every event. Its holder sees the queries between two events."""
        self._runtime: Final = QueryRuntime(self.scheduler, serializers)
        reader = store.reader()
        self._catalog: Final = QueryCatalog(reader)
        self._runtime.load(reader)
        self._clock: Final = QueryClock(self.scheduler, self._catalog.now_ns)
        self._edges: Final = EdgeTable(self._runtime, self._catalog, self._clock, self._lock)
        parts = self._runtime, self._catalog, self._clock, self._edges
        self._checkpointer: Final = Checkpointer(store, *parts, self._lock, self._handle_save_error)
        self._queries: Final = QueryRegistry(factories, *parts, self._checkpointer, on_query_ended)

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    def add_source(
        self,
        name: str,
        source: ReliableObservable[Any],
        *,
        begin: int | None = 0,
        time_of: Callable[[Any], int] | None = None,
        on_gap: OnGap | None = None,
    ) -> None:
        """Let queries use `Source(name)`. Call before `recover`, or later if no stored query uses the source.

        An output of this engine can be a source: queries of queries.

        `begin`: the first id to read if the store has none. None: the first id that arrives. `time_of`: the
        time of a value, in ns since the epoch; needs a `VirtualScheduler`. The queries' clock then follows
        the values: it starts with the first value, and timers due between two values fire in between.
        `on_gap`: see `InputEdge`.
        """
        check_name(name, kind="source")
        if time_of is not None:
            self._clock.follow_values()
        self._require_open()
        with self._lock:
            edge = self._edges.add_source(name, source, begin=begin, time_of=time_of, on_gap=on_gap)
        if self.state is not EngineState.NEW:
            try:
                edge.start()
            except BaseException:
                with self._lock:
                    self._edges.drop_source(name)
                raise

    def add_sink(
        self,
        name: str,
        *,
        release: Release = "commit",
        limit: int = 100_000,
        encode: Callable[[Any], Any] | None = None,
    ) -> OutputEdge:
        """Let queries send to `name`. Subscribe to their values on the returned edge.

        `limit`: with this many unacknowledged values, sources are refused (`Backlogged`). `encode`: see
        `OutputEdge`.
        """
        check_name(name, kind="sink")
        self._require_open()
        with self._lock:
            return self._edges.add_sink(name, release=release, limit=limit, encode=encode)

    def define(self, name: str, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Store a name for a factory with arguments. Durable on return.

        Raises `QueryExists`, `NoSuchQuery`.
        """
        check_name(name, kind="definition")
        with self._exclusive():
            self._queries.define(name, Recipe(factory, dict(arguments or {})))

    def undefine(self, name: str) -> None:
        """Delete a definition. Queries started from it continue. Durable on return. `NoSuchQuery`."""
        with self._exclusive():
            self._queries.undefine(name)

    def start(
        self, query_id: str, of: str, arguments: Mapping[str, Any] | None = None, *, sink: str | None = None
    ) -> None:
        """Start a query. It receives the values that its sources send from now on. Durable on return.

        Raises `QueryExists`, `NoSuchQuery`, `WrongState`, `rt.InvalidName`, what the factory raises, and what
        a commit raises. After an error the query is not started. If the outcome of a commit is unknown, the
        next commit makes that durable.
        """
        self.start_many([Start(query_id, of, arguments or {}, sink)])

    def start_many(self, starts: Iterable[Start]) -> None:
        """Start all queries or none, with one commit."""
        with self._exclusive():
            self._queries.start_many(starts)

    def stop(self, query_id: str) -> None:
        """End and delete a query. Its output stays. Durable on return. `NoSuchQuery`."""
        self.stop_many([query_id])

    def stop_many(self, query_ids: Iterable[str]) -> None:
        """Stop all queries or none (`NoSuchQuery`), with one commit.

        A query with a sink is stopped by a checkpoint, because the log does not hold its output. If the
        checkpoint fails, the query is stopped in memory, and the next checkpoint makes that durable.
        """
        with self._exclusive():
            self._queries.stop_many(query_ids)

    @property
    def definitions(self) -> dict[str, Recipe]:
        with self._lock:
            return dict(self._catalog.definitions)

    @property
    def queries(self) -> dict[str, str | None]:
        """By id: None if the query runs, "" if it completed, otherwise the error that ended it."""
        with self._lock:
            return {query_id: each.ended for query_id, each in self._catalog.queries.items()}

    @property
    def watermarks(self) -> dict[str, int]:
        """By source: the id of the last value that all queries processed; -1 if there is none."""
        with self._lock:
            return {name: edge.feed.watermark for name, edge in self._edges.inputs.items()}

    def run_due(self) -> bool:
        """Fire the due timers, unless an output is full. Returns whether one fired."""
        with self._lock:
            self._lock.require_intact()
            fired = False
            try:
                if not self._clock.has_time and self._edges.have_timed_sources_ended:
                    self._clock.start_time(self.scheduler.now_ns)
                while not self._edges.is_backlogged and self.scheduler.run_due():
                    fired = True
            except BaseException:
                self._lock.is_interrupted = True
                raise
            return fired

    def deliver(self) -> bool:
        """Send the values that may be sent to started consumers. Returns whether any was sent.

        An error of a consumer, except `Backlogged`, is raised after all consumers were served. Refused values
        are sent again.
        """
        self._refuse_reentry()
        with self._lock:
            self._lock.require_intact()
            return self._edges.deliver()

    @property
    def is_backlogged(self) -> bool:
        """Whether an output is full, so that sources are refused."""
        return self._edges.is_backlogged

    def checkpoint(self, kind: CheckpointKind = CheckpointKind.DIFFERENTIAL) -> None:
        """Save what changed, or everything. Returns when it is durable and sources are acknowledged.

        Queries pause while changes are collected, and run during the commit. Raises `WrongState` while
        another checkpoint runs, or after an interrupted event. If a commit fails, the next checkpoint saves
        its changes.
        """
        self._refuse_reentry()
        running = EngineState.RUNNING
        with (
            self._lifecycle.operation(EngineState.CHECKPOINTING, running, running),
            self._checkpointer.writing,
        ):
            self._checkpointer.checkpoint(kind)
        logger.debug("checkpoint kind=%s", kind.value)

    def recover(self) -> None:
        """Load everything that is stored, and continue. Call once, before anything is started.

        `on_load_failed` decides about a query that cannot be recovered. If this raises, make a new engine;
        the store is unchanged.
        """
        new, unloaded = EngineState.NEW, EngineState.UNLOADED
        start, on_failed = self._clock.start, self._on_load_failed
        with self._lifecycle.operation(EngineState.RECOVERING, new, unloaded):
            try:
                with self._lock:
                    Recovery(self._runtime, self._catalog, self._queries.build, start, on_failed).run()
                for edge in list(self._edges.inputs.values()):
                    edge.start()
            except BaseException:
                with self._lock:
                    self._release()
                raise

    def unload(self) -> None:
        """Stop everything without a checkpoint. Waits for a running checkpoint. Idempotent."""
        self._refuse_reentry()
        if self._lifecycle.start_unload():
            try:
                with self._checkpointer.writing, self._lock:
                    self._release()
            finally:
                self._lifecycle.finish_unload()

    def _handle_save_error(self, group: OperatorGroup, error: Exception) -> None:
        answer = self._on_save_failed(group.root.id, error) if self._on_save_failed else None
        if answer is not Mitigation.REMOVE:
            raise error
        group.crash(error)

    def _release(self) -> None:
        call_all([*(each.abandon for each in self._runtime.roots.values()), *self._edges.releases()])

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold both locks: no event and no other write happens. `WrongState` unless queries run."""
        self._refuse_reentry()
        self._lifecycle.require_usable()
        with self._checkpointer.writing, self._lock:
            self._lifecycle.require_usable()
            self._lock.require_intact()
            yield

    def _require_open(self) -> None:
        """`WrongState` if the engine is unloading or unloaded."""
        if self.state is not EngineState.NEW:
            self._lifecycle.require_usable()

    def _refuse_reentry(self) -> None:
        if self._lock.is_mine:
            raise WrongState("a query, factory or callback called its engine", hint="Call it from outside.")

"""An engine of queries: starts and stops them, feeds them, and keeps their state in a store.

    sources ─► input edges ─► stages, queries ─► output edges ─► sinks        under one lock, event by event
                                │
                            checkpoint: pause, save, resume, commit    one atomic commit of everything

Invariants:
- A checkpoint holds all queries, edges and objects as they were between two events.
- After a recovery the sources start after the checkpoint, so state and watermarks always agree.
- The effects of `start`, `stop`, `define` and `undefine` are durable when they return.
- Sources are acknowledged only by durable checkpoints.
- No lock is held while a source (`subscribe`, `start`, `acknowledge`, `dispose`) or a consumer (`on_next`,
  `on_error`, `on_completed`) is called. So engines can read each other's outputs, also in a cycle, each in
  its own threads, and a source may hold a lock while it sends and acknowledges. Sources and consumers may
  call the engine.
- The lock is held while functions of the program are called: factories, operators and their functions,
  `time_of`, `encode`, serializers, the store, and callbacks (`on_…`). They must not call an engine, and must
  not wait for a thread that does.
- The lock is released between two turns of `TURN` timers: no query can hold it indefinitely.

Thread-safe. Sources may call from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Final, Unpack

from rt.names import check_name
from rt.objects import CheckpointKind, Serializers, Store
from rt.query.async_calls import AsyncCalls
from rt.query.checkpoint.catalog import ROOT, QueryCatalog
from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.edge import OutputEdge, Release
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.error_policy import ErrorPolicy, OnError
from rt.query.checkpoint.event_times import EventTimes
from rt.query.checkpoint.factories import Factories, Recipe
from rt.query.checkpoint.input_edge import OnBadTime, OnGap
from rt.query.checkpoint.recovery import OnLoadFailed, OnSaveFailed, Recovery, handler_of
from rt.query.checkpoint.stage_table import StageOptions, Stages, StageSource, StageTable
from rt.query.core.clock import QueryClock, SourceTiming
from rt.query.core.errors import WrongState, call_all
from rt.query.core.lifecycle import EngineLifecycle, EngineState, EventLock
from rt.query.core.reliable import ReliableObservable
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import RealScheduler, Scheduler
from rt.query.monitoring.backlog_log import BacklogLog
from rt.query.monitoring.checkpoint_stats import MeasuredStore
from rt.query.monitoring.dead_letters import DeadLetter, DeadLetters
from rt.query.monitoring.error_handler import ErrorHandlers
from rt.query.monitoring.status import EngineMonitor, EngineStatus
from rt.query.mutation_check import MutationCheck
from rt.query.query_registry import QueryRegistry, Start

logger = logging.getLogger("rt.query")


class QueryEngine:
    """The queries in one store. Add the sources and sinks, then call `recover`, also for an empty store.

    A second engine on the same store is refused (`rt.objects.OutOfTurn`) until this one is unloaded.

    - `on_load_failed(query_id, error)` decides what happens to a query that cannot be recovered. Default: the
      recovery fails.
    - `on_save_failed(query_id, error)` may return `Mitigation.REMOVE` for a query whose state cannot be
      saved: it ends with that error. Default: the checkpoint fails.
    - `on_query_ended(query_id, error)` is called for every query that ends.
    - `check_values` ends a query that changes a value after it was emitted (`ValueChanged`), which names the
      operator. For tests and debugging: many times slower.
    - `on_error`: the error policy of queries that are started without one. Default: a value for which a query
      raises goes to the dead letters, and the query continues. See `rt.query.checkpoint.error_policy`.
    """

    def __init__(
        self,
        store: Store,
        factories: Factories,
        scheduler: Scheduler | None = None,
        *,
        serializers: Serializers | None = None,
        on_load_failed: OnLoadFailed | None = None,
        on_save_failed: OnSaveFailed | None = None,
        on_query_ended: Callable[[str, Exception | None], object] | None = None,
        check_values: bool = False,
        on_error: OnError | ErrorPolicy = "skip",
    ) -> None:
        self.scheduler: Final = scheduler or RealScheduler()
        self._on_load_failed = on_load_failed
        self._lifecycle = EngineLifecycle()
        self._lock = EventLock()
        """Held during every event. Its holder sees the queries between two events."""
        watch = MutationCheck().watch if check_values else None
        self.calls: Final = AsyncCalls()
        """The calls of `map_async`."""
        self._runtime: Final = QueryRuntime(self.scheduler, serializers, watch=watch, calls=self.calls)
        self._claim: Final = store.claim(ROOT)
        try:
            reader = store.reader()
            self._catalog: Final = QueryCatalog(reader)
            self._runtime.load(reader)
        except BaseException:
            self._claim.release()
            raise
        self._clock: Final = QueryClock(self.scheduler, self._catalog.now_ns)
        backlog = BacklogLog()
        shared = self._runtime, self._catalog, self._clock, self._lock
        self._edges: Final = EdgeTable(*shared, self.calls, backlog.update)
        self.event_time: Final = EventTimes(self._runtime, self._clock, self._edges, self._lock)
        parts = self._runtime, self._catalog, self._clock, self._edges
        self._letters: Final = DeadLetters(self._runtime)
        measured, on_unsaved = MeasuredStore(store), handler_of(on_save_failed)
        self._monitor: Final = EngineMonitor(*parts, measured, backlog, self._letters)
        self._checkpointer: Final = Checkpointer(measured, *parts, self._lock, on_unsaved)
        errors = ErrorHandlers(ErrorPolicy.of(on_error), self._letters, self._catalog, self._checkpointer)
        self._stages: Final = StageTable(self._runtime, self._catalog, errors.handler)
        controls = self._checkpointer, self._lock, self._exclusive
        self.stages: Final = Stages(self._stages, self._clock, self._edges, *controls)
        self._queries: Final = QueryRegistry(factories, *parts, self._checkpointer, errors, on_query_ended)

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
        on_bad_time: OnBadTime | None = None,
        **timing: Unpack[SourceTiming],
    ) -> None:
        """Let queries use `Source(name)`. Call before `recover`, or later if no stored query uses the source.

        An output of this engine can be a source. `begin`: the first id to read if the source is not in the
        store. None: start at the first id that arrives. `time_of`: the time of a value, in ns since the
        epoch, which the queries' clock follows; needs a `VirtualScheduler`. `timing`: see `SourceTiming`.
        `on_gap`: see `InputEdge`. `on_bad_time(error)`: called for a value for which `time_of` returns no
        time since 1970; the value is then skipped, and counted in `skipped`. Without it `BadTime` is raised
        to the source, and the value is not accepted.
        """
        check_name(name, kind="source")
        if time_of is not None:
            self._clock.follow_values()
        self._lifecycle.require_open()
        more: dict[str, Any] = {"on_gap": on_gap, "on_bad_time": on_bad_time, **timing}
        with self._edges.add_source(name, source, begin=begin, time_of=time_of, **more) as edge:
            edge.subscribe()
            if self.state is not EngineState.NEW:
                edge.start()

    def add_stage(self, name: str, stage: StageSource, **options: Unpack[StageOptions]) -> None:
        """Let queries share operators: `Source(name)` has the values of `stage`, computed once for all.

        Call before `recover`, after the sources and stages that it reads were added. A stage that is stored
        must be added at every start. `QueryExists`, `NoSuchQuery`, `WrongState`. `options`: `StageOptions`.
        """
        with self._lock:
            self._lifecycle.require_new()
            self._stages.add(name, stage, **options)

    def add_sink(
        self,
        name: str,
        *,
        release: Release = "commit",
        limit: int = 100_000,
        encode: Callable[[Any], Any] | None = None,
        ends_with_query: bool = False,
    ) -> OutputEdge:
        """Let queries send to `name`. Subscribe to their values on the returned edge.

        `limit`: if there are this many unacknowledged values, values of sources are refused (`Backlogged`).
        `encode`: see `OutputEdge`. `ends_with_query`: one query at a time may send. When it completes or
        fails, consumers receive this end after its values. A stopped query does not end the values: the next
        query continues. After an end, the next query opens the sink again, for consumers that start again.
        """
        check_name(name, kind="sink")
        self._lifecycle.require_open()
        options = {"release": release, "limit": limit, "encode": encode}
        with self._lock:
            return self._edges.add_sink(name, ends_with_query=ends_with_query, **options)

    @property
    def sinks(self) -> dict[str, int]:
        """By sink: the number of kept values. Sinks that are only in the store are included."""
        with self._lock.next():
            return self._edges.kept_values

    def drop_sink(self, name: str, *, discard: bool = False) -> None:
        """Delete a sink: its consumers, its numbers, and its kept values. Durable on return.

        Use this for a sink that the program no longer uses. The sink need not be added. Nothing else deletes
        the stored data of a sink. Raises `NoSuchQuery`; `WrongState` if a query sends to the sink, or if it
        keeps unacknowledged values and `discard` is false. If the checkpoint fails, the sink is dropped in
        memory, and the next checkpoint makes that durable.
        """
        with self._exclusive():
            self._edges.require_unused(name, self._letters.output, discard=discard)
            self._edges.drop_sink(name)
            self._checkpointer.checkpoint()

    def add_dead_letters(
        self,
        name: str = "dead-letters",
        *,
        limit: int = 100_000,
        encode: Callable[[DeadLetter], Any] = DeadLetter.row,
    ) -> OutputEdge:
        """Send the dead letters of all queries also to a new sink `name`. Call before `recover`.

        Its values are dictionaries with the fields of a `DeadLetter`. With
        `encode=rt.query.messages.dead_letter_message` a `MessageSink` publishes them. The other options are
        those of `add_sink`.
        """
        self._letters.output = edge = self.add_sink(name, limit=limit, encode=encode)
        return edge

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The last 100 values that queries left out because of errors, oldest first."""
        with self._lock:
            return self._letters.last

    def define(
        self,
        name: str,
        factory: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        on_error: OnError | ErrorPolicy | None = None,
    ) -> None:
        """Store a name for a factory with arguments and an error policy. Durable on return.

        Raises `QueryExists`, `NoSuchQuery`.
        """
        check_name(name, kind="definition")
        with self._exclusive():
            policy = None if on_error is None else ErrorPolicy.of(on_error)
            self._queries.define(name, Recipe(factory, deepcopy(dict(arguments or {})), policy))

    def undefine(self, name: str) -> None:
        """Delete a definition. Queries started from it continue. Durable on return. `NoSuchQuery`."""
        with self._exclusive():
            self._queries.undefine(name)

    def start(
        self,
        query_id: str,
        of: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        sink: str | None = None,
        on_error: OnError | ErrorPolicy | None = None,
    ) -> None:
        """Start a query. It receives the values that its sources send from now on. Durable on return.

        A query with this id that has ended is replaced; its state is deleted, its output stays. `on_error`:
        what happens when the query raises an error for a value. Default: the policy of the definition, or of
        the engine. The query keeps this policy.

        Raises `QueryExists`, `NoSuchQuery`, `WrongState`, `rt.InvalidName`, and the errors of the factory and
        of a commit. After an error the query is not started. If the outcome of a commit is unknown, the next
        commit makes durable that the query is not started.
        """
        self.start_many([Start(query_id, of, arguments or {}, sink, on_error)])

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
        with self._lock.next():
            return dict(self._catalog.definitions)

    @property
    def queries(self) -> dict[str, str | None]:
        """By id: None if the query runs, "" if it completed, otherwise the error that ended it."""
        with self._lock.next():
            return {query_id: each.ended for query_id, each in self._catalog.queries.items()}

    @property
    def watermarks(self) -> dict[str, int]:
        """By source: the id of the last value that all queries processed; -1 if there is none."""
        with self._lock.next():
            return {name: edge.feed.watermark for name, edge in self._edges.inputs.items()}

    @property
    def skipped(self) -> dict[str, int]:
        """By source: how many values had no time and were skipped in this run. See `add_source`."""
        with self._lock.next():
            return {name: edge.skipped for name, edge in self._edges.inputs.items()}

    def status(self) -> EngineStatus:
        """The status of the engine and its queries. Any thread may call this."""
        return self._monitor.status(self.state.value, self._lock)

    def run_due(self) -> bool:
        """Process finished calls of `map_async`, and fire the due timers unless the engine is backlogged.

        Returns whether there were any. Other threads may use the engine between two turns. Returns after
        100,000 timers, if more are due.
        """
        self._refuse_reentry()
        return self._edges.run_due()

    def deliver(self) -> bool:
        """Send the values that may be sent to started consumers. Returns whether any was sent.

        An error of a consumer, except `Backlogged`, is raised after all consumers were served. Refused values
        are sent again. If another thread is sending to a consumer, this call skips that consumer. After
        `unload` or `dispose` in another thread, no new call of a consumer starts. One may still be running.
        """
        self._refuse_reentry()
        with self._lock.next():
            self._lock.require_intact()
        return self._edges.deliver()

    @property
    def is_backlogged(self) -> bool:
        """Whether an output or the calls of a `map_async` are full, so that sources are refused."""
        return self._edges.is_backlogged

    def checkpoint(self, kind: CheckpointKind = CheckpointKind.DIFFERENTIAL) -> None:
        """Save what changed, or everything. Returns when it is durable and sources are acknowledged.

        Queries pause while changes are collected, and run during the commit. Raises `WrongState` while
        another checkpoint runs, or after an interrupted event. If a commit fails, the next checkpoint saves
        its changes. If a source raises when it is acknowledged, the error is raised after all sources were
        acknowledged. The checkpoint is durable then, and the next one acknowledges again.
        """
        self._refuse_reentry()
        with self._lifecycle.operation(EngineState.CHECKPOINTING, EngineState.RUNNING, EngineState.RUNNING):
            with self._checkpointer.writing:
                self._checkpointer.checkpoint(kind)
            self._edges.acknowledge()
        logger.debug("checkpoint kind=%s", kind.value)

    def recover(self) -> None:
        """Load everything that is stored, and continue. Call once, before anything is started.

        `on_load_failed` decides about a query that cannot be recovered. If this raises, make a new engine;
        the store is unchanged.
        """
        with self._lifecycle.operation(EngineState.RECOVERING, EngineState.NEW, EngineState.UNLOADED):
            try:
                with self._lock:
                    stored = self._runtime, self._catalog, self._stages
                    Recovery(*stored, self._queries.rebuild, self._clock.start, self._on_load_failed).run()
                    self._edges.warn_of_unused()
                self._edges.start_sources()
            except BaseException:
                self._release()
                raise

    def unload(self) -> None:
        """Stop everything without a checkpoint. Waits for a running checkpoint. Idempotent.

        If an operator or a source raises, the rest is released first. Another call releases what is left.
        """
        self._refuse_reentry()
        self._lifecycle.unload(self._release)

    def _release(self) -> None:
        """The claim is given up last, but also if something raised: then another engine may take over."""
        try:
            call_all([self._checkpointer.close, self._edges.release])
        finally:
            self.calls.close()
            self._claim.release()

    def _exclusive(self) -> AbstractContextManager[None]:
        """A context in which no event and no other write happens. `WrongState` unless queries run."""
        self._refuse_reentry()
        return self._checkpointer.exclusive(self._lifecycle.require_usable)

    def _refuse_reentry(self) -> None:
        if self._lock.is_mine:
            raise WrongState("a query, factory or callback called its engine", hint="Call it from outside.")

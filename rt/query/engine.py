"""An engine of queries: starts and stops them, feeds them, and keeps their state in a store.

    sources ─► input edges ─► queries ─► output edges ─► sinks        all under one lock, event by event
                                │
                            checkpoint: pause, save, go on, commit    one atomic commit of everything

Laws. A checkpoint holds all queries, edges and objects as they were between two events. After a recovery the
sources are asked for what lies behind it, so that state and watermarks never disagree. What `start`, `stop`,
`define` and `undefine` returned for outlives a crash. Sources are acknowledged by checkpoints that are
durable, and by nothing else.

What comes out is exactly once where a sink takes each id once: with `release="commit"` always; with "now",
which does not wait for a checkpoint, where queries are a function of one source's values (one source, time of
a `VirtualScheduler` by `time_of`, no other input), and where the output is told what its consumer has of an
earlier life (`OutputEdge.expect`), so that no query begins or ends among what comes again.

Thread-safe. Sources may call from any thread; factories, operators and callbacks must not call the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from rt.names import check_name
from rt.objects import CheckpointKind, Serializers, Store
from rt.query.artifact import Artifact
from rt.query.catalog import Catalog
from rt.query.checkpointing import Checkpoints
from rt.query.clock import QueryClock
from rt.query.definitions import Factories, Recipe
from rt.query.edge_table import EdgeTable
from rt.query.edges import OnGap, OutputEdge, Release, do_all
from rt.query.errors import WrongState
from rt.query.host import Host
from rt.query.locking import EventLock
from rt.query.queries import Queries, Start
from rt.query.recovery import Mitigation, OnLoadFailed, Recovery
from rt.query.reliable import ReliableObservable
from rt.query.scheduling import RealScheduler, Scheduler
from rt.query.states import EngineState, StateMachine

logger = logging.getLogger("rt.query")


class QueryEngine:
    """The queries in one store. Give it its sources and sinks, then `recover`, also for an empty store.

    `on_load_failed(query_id, error)` says what becomes of a query that cannot be recovered (default: the
    recovery fails). `on_save_failed(query_id, error)` may return `Mitigation.REMOVE` for one whose state
    cannot be saved: it ends with that error (default: the checkpoint fails).
    `on_query_ended(query_id, error)` hears of every end.
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
        self._machine = StateMachine()
        self._lock = EventLock()
        """Held during every event: who takes it sees the queries between two events."""
        self._host: Final = Host(self.scheduler, serializers)
        reader = store.reader()
        self._catalog: Final = Catalog(reader)
        self._host.load(reader)
        self._clock: Final = QueryClock(self.scheduler, self._catalog.now_ns)
        self._edges: Final = EdgeTable(self._host, self._catalog, self._clock, self._lock)
        edges = self._edges.inputs, self._edges.outputs
        self._checkpoints: Final = Checkpoints(
            store, self._host, self._catalog, self._clock, self._lock, edges, self._unsavable
        )
        self._queries: Final = Queries(
            factories, self._host, self._catalog, self._clock, self._edges, self._checkpoints, on_query_ended
        )

    @property
    def state(self) -> EngineState:
        """What it is doing."""
        return self._machine.state

    # Sources and sinks

    def add_source(
        self,
        name: str,
        source: ReliableObservable[Any],
        *,
        begin: int | None = 0,
        time_of: Callable[[Any], int] | None = None,
        on_gap: OnGap | None = None,
    ) -> None:
        """Let queries use `Source(name)`. Before `recover`, or, where no stored query needs it, later.

        An output of this engine can be a source of it: queries of queries.

        `begin` is the first id wanted, where the store knows none; None: whichever comes first. With
        `time_of` (ns since the epoch, of a value) and a `VirtualScheduler` the queries' clock goes by the
        values: it begins with the first one, and what is due between two fires on the way. `on_gap`: see
        `InputEdge`.
        """
        check_name(name, kind="source")
        if time_of is not None:
            self._clock.go_by_values()
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
        """Let queries send to `name`; what they send is subscribed to on what is returned.

        `limit`: with so many values that no consumer has acknowledged, sources are refused (`Backlogged`).
        `encode`: see `OutputEdge`.
        """
        check_name(name, kind="sink")
        self._require_open()
        with self._lock:
            return self._edges.add_sink(name, release=release, limit=limit, encode=encode)

    # Queries

    def define(self, name: str, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Keep a name for a factory with arguments. Durable on return. `QueryExists`, `NoSuchQuery`."""
        check_name(name, kind="definition")
        with self._changing():
            self._queries.define(name, Recipe(factory, dict(arguments or {})))

    def undefine(self, name: str) -> None:
        """Forget a definition; queries that were started of it go on. Durable on return. `NoSuchQuery`."""
        with self._changing():
            self._queries.undefine(name)

    def start(
        self, query_id: str, of: str, arguments: Mapping[str, Any] | None = None, *, sink: str | None = None
    ) -> None:
        """Start a query: it sees what its sources bring from now on. Durable on return.

        `QueryExists`, `NoSuchQuery`, `WrongState`, `rt.InvalidName`, what the factory raises, and what a
        commit raises: nothing was started. Where the outcome of a commit is unknown, that is durable with the
        next one.
        """
        self.start_many([Start(query_id, of, arguments or {}, sink)])

    def start_many(self, starts: Iterable[Start]) -> None:
        """Start all of them, or none, with one commit."""
        with self._changing():
            self._queries.start_many(starts)

    def stop(self, query_id: str) -> None:
        """End a query, and forget it; what it has emitted stays. Durable on return. `NoSuchQuery`."""
        self.stop_many([query_id])

    def stop_many(self, query_ids: Iterable[str]) -> None:
        """Stop all of them with one commit; `NoSuchQuery` if one is not there, and none was stopped.

        What a query with a sink has emitted is kept by no log: it is stopped with a checkpoint. If that fails
        it is stopped as well, and the next checkpoint makes that durable.
        """
        with self._changing():
            self._queries.stop_many(query_ids)

    @property
    def definitions(self) -> dict[str, Recipe]:
        """By name."""
        with self._lock:
            return dict(self._catalog.definitions)

    @property
    def queries(self) -> dict[str, str | None]:
        """By id: None while it runs, "" when it has completed, else the error that ended it."""
        with self._lock:
            return {query_id: each.ended for query_id, each in self._catalog.standing.items()}

    @property
    def watermarks(self) -> dict[str, int]:
        """Of each source: the id of the last value that all queries have processed; -1 if there is none."""
        with self._lock:
            return {name: edge.feed.watermark for name, edge in self._edges.inputs.items()}

    # Running

    def run_due(self) -> bool:
        """Fire the timers that are due, unless an output is full; whether there was one."""
        with self._lock:
            self._lock.require_whole()
            fired = False
            try:
                if not self._clock.has_time and self._edges.has_timed_ended:
                    self._clock.begin_time(self.scheduler.now_ns)
                while not self._edges.is_backlogged and self.scheduler.run_due():
                    fired = True
            except BaseException:
                self._lock.is_torn = True
                raise
            return fired

    def deliver(self) -> bool:
        """Send outputs what may be sent to those who have started; whether anything was.

        What consumers raise comes out of here, when all were served, but for `Backlogged`: what was not taken
        is sent again.
        """
        self._refuse_inside()
        with self._lock:
            self._lock.require_whole()
            return self._edges.deliver()

    @property
    def is_backlogged(self) -> bool:
        """Whether an output holds all it may, so that sources are refused."""
        return self._edges.is_backlogged

    # Checkpoints and recovery

    def checkpoint(self, kind: CheckpointKind = CheckpointKind.DIFFERENTIAL) -> None:
        """Save everything that changed, or everything; returns when it is durable and sources know.

        Queries stand still while it is gathered, and run while it is committed. `WrongState` while another
        runs, or where an interrupt broke an event off. Where a commit raises, the next one makes up for it.
        """
        self._refuse_inside()
        running = EngineState.RUNNING
        with self._machine.operation(EngineState.CHECKPOINTING, running, running), self._checkpoints.writing:
            self._checkpoints.checkpoint(kind)
        logger.debug("checkpoint kind=%s", kind.value)

    def recover(self) -> None:
        """Take up everything that is stored, and go on. Once, before anything is started.

        What cannot be recovered goes to `on_load_failed`; if this raises, the engine is of no more use, and
        the store is as it was.
        """
        new, unloaded = EngineState.NEW, EngineState.UNLOADED
        begin, on_failed = self._clock.begin, self._on_load_failed
        with self._machine.operation(EngineState.RECOVERING, new, unloaded):
            try:
                with self._lock:
                    Recovery(self._host, self._catalog, self._queries.build, begin, on_failed).run()
                for edge in list(self._edges.inputs.values()):
                    edge.start()
            except BaseException:
                with self._lock:
                    self._let_go()
                raise

    def unload(self) -> None:
        """Stop everything, without a checkpoint; waits for one that runs. Twice is as once."""
        self._refuse_inside()
        if self._machine.begin_unload():
            try:
                with self._checkpoints.writing, self._lock:
                    self._let_go()
            finally:
                self._machine.end_unload()

    # Parts

    def _unsavable(self, artifact: Artifact, error: Exception) -> None:
        answer = self._on_save_failed(artifact.root.id, error) if self._on_save_failed else None
        if answer is not Mitigation.REMOVE:
            raise error
        artifact.crash(error)

    def _let_go(self) -> None:
        do_all([*(each.abandon for each in self._host.roots.values()), *self._edges.endings()])

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """No event, and nothing else that is stored, meanwhile. `WrongState` unless queries run."""
        self._refuse_inside()
        self._machine.require_usable()
        with self._checkpoints.writing, self._lock:
            self._machine.require_usable()
            self._lock.require_whole()
            yield

    def _require_open(self) -> None:
        """`WrongState` once it is being unloaded."""
        if self.state is not EngineState.NEW:
            self._machine.require_usable()

    def _refuse_inside(self) -> None:
        if self._lock.is_mine:
            raise WrongState("a query, factory or callback called its engine", hint="Do it from outside.")

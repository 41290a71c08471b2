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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rt.names import check_name
from rt.objects import CheckpointKind, PersistedQueue, Serializers, Store
from rt.query.artifact import Artifact
from rt.query.catalog import Catalog
from rt.query.checkpointing import Checkpoints
from rt.query.clock import QueryClock
from rt.query.definitions import Factories, Recipe, Standing
from rt.query.edges import InputEdge, OnGap, OutputEdge, Release, do_all
from rt.query.errors import Backlogged, NoSuchQuery, QueryExists, QueryFailed, WrongState
from rt.query.host import Host
from rt.query.locking import EventLock
from rt.query.observing import Observable
from rt.query.recovery import Mitigation, OnLoadFailed, Recovery
from rt.query.reliable import NOTHING, ReliableObservable
from rt.query.scheduling import RealScheduler, Scheduler
from rt.query.states import EngineState, StateMachine
from rt.query.transaction_log import Entry

logger = logging.getLogger("rt.query")

DEFINITION: Final = "definition"
QUERY: Final = "query"


@dataclass(frozen=True, slots=True)
class Start:
    """A query to be started: of a definition, or else of a factory, with arguments over the definition's."""

    query_id: str
    of: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sink: str | None = None


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
        self._factories: Final = factories
        self._on_load_failed = on_load_failed
        self._on_save_failed = on_save_failed
        self._on_query_ended = on_query_ended
        self._machine = StateMachine()
        self._lock = EventLock()
        """Held during every event: who takes it sees the queries between two events."""
        self._host: Final = Host(self.scheduler, serializers)
        reader = store.reader()
        self._catalog: Final = Catalog(reader)
        self._host.load(reader)
        self._inputs: dict[str, InputEdge] = {}
        self._outputs: dict[str, OutputEdge] = {}
        self._timed: set[str] = set()
        """The sources whose values say the time."""
        self._clock: Final = QueryClock(self.scheduler, self._catalog.now_ns)
        edges = self._inputs, self._outputs
        self._checkpoints: Final = Checkpoints(
            store, self._host, self._catalog, self._clock, self._lock, edges, self._unsavable
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
            if name in self._inputs:
                raise QueryExists("a source of that name is there", got=repr(name))
            feed = self._host.add_feed(name)
            watermark = NOTHING if begin is None else begin - 1
            stored = self._catalog.sources.get(name, {"watermark": watermark, "end": None})
            feed.watermark = stored["watermark"]
            match stored["end"]:
                case ["completed"]:
                    feed.end = "completed"
                case ["error", text]:
                    feed.end = QueryFailed(text)
            edge = InputEdge(
                source,
                feed,
                lock=self._lock,
                before=lambda value: self._before(value, source, time_of),
                on_gap=on_gap,
                takes_any_first=begin is None,
            )
            self._inputs[name] = edge
            if time_of is not None:
                self._timed.add(name)
        if self.state is not EngineState.NEW:
            try:
                edge.start()
            except BaseException:
                with self._lock:
                    del self._inputs[name]
                    self._timed.discard(name)
                    edge.unload()
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
            if name in self._outputs:
                raise QueryExists("a sink of that name is there", got=repr(name))
            held: PersistedQueue[Any] = self._host.space.get_or_create_queue(f"@sink/{name}")
            stored = self._catalog.sinks.get(name)
            made = OutputEdge(
                held, lock=self._lock, release=release, limit=limit, encode=encode, saved=stored
            )
            self._outputs[name] = made
            return made

    # Queries

    def define(self, name: str, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Keep a name for a factory with arguments. Durable on return. `QueryExists`, `NoSuchQuery`."""
        check_name(name, kind="definition")
        with self._changing():
            if name in self._catalog.definitions or name in self._factories:
                raise QueryExists("a definition or factory of that name is there", got=repr(name))
            if factory not in self._factories:
                raise NoSuchQuery("no factory of that name", got=repr(factory), hint="Register it.")
            recipe = Recipe(factory, dict(arguments or {}))
            self._checkpoints.append([Entry(DEFINITION, name, recipe.encode())])
            self._catalog.define(name, recipe)

    def undefine(self, name: str) -> None:
        """Forget a definition; queries that were started of it go on. Durable on return. `NoSuchQuery`."""
        with self._changing():
            if name not in self._catalog.definitions:
                raise NoSuchQuery("no definition of that name", got=repr(name))
            self._checkpoints.append([Entry(DEFINITION, name, None)])
            self._catalog.define(name, None)

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
            starts = list(starts)
            self._require_caught_up(each.sink for each in starts)
            made: dict[str, tuple[Standing, Artifact]] = {}
            after = {name: edge.feed.watermark for name, edge in self._inputs.items()}
            for each in starts:
                self._check_start(each, made)
                recipe = self._recipe(each)
                standing = Standing(
                    recipe, each.sink, self._catalog.next_order(), after, self.scheduler.now_ns
                )
                made[each.query_id] = standing, self._build(each.query_id, standing)
            is_logged = self._checkpoints.unsettled.isdisjoint(made) and not any(
                self._is_live(each.sink) for each, _ in made.values()
            )
            if is_logged:
                self._checkpoints.append(
                    [Entry(QUERY, query_id, row.encode()) for query_id, (row, _) in made.items()]
                )
            for query_id, (standing, artifact) in made.items():
                self._catalog.stand(query_id, standing)
                self._host.roots[query_id] = artifact
                artifact.guard(artifact.open)
                self._clock.begin(artifact, None)
            if not is_logged:
                try:
                    self._checkpoints.checkpoint()
                except BaseException:
                    for query_id in made:
                        self._forget(query_id)
                    self._checkpoints.unsettle(made)
                    raise

    def stop(self, query_id: str) -> None:
        """End a query, and forget it; what it has emitted stays. Durable on return. `NoSuchQuery`."""
        self.stop_many([query_id])

    def stop_many(self, query_ids: Iterable[str]) -> None:
        """Stop all of them with one commit; `NoSuchQuery` if one is not there, and none was stopped.

        What a query with a sink has emitted is kept by no log: it is stopped with a checkpoint. If that fails
        it is stopped as well, and the next checkpoint makes that durable.
        """
        with self._changing():
            wanted = dict.fromkeys(query_ids)
            for query_id in wanted:
                if query_id not in self._catalog.standing:
                    raise NoSuchQuery("no query of that id", got=repr(query_id))
            self._require_caught_up(self._catalog.standing[query_id].sink for query_id in wanted)
            is_logged = self._checkpoints.unsettled.isdisjoint(wanted) and all(
                self._catalog.standing[query_id].sink is None for query_id in wanted
            )
            if is_logged:
                self._checkpoints.append([Entry(QUERY, query_id, None) for query_id in wanted])
            for query_id in wanted:
                self._forget(query_id)
            if not is_logged:
                self._checkpoints.unsettle(wanted)
                self._checkpoints.checkpoint()

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
            return {name: edge.feed.watermark for name, edge in self._inputs.items()}

    # Running

    def run_due(self) -> bool:
        """Fire the timers that are due, unless an output is full; whether there was one."""
        with self._lock:
            self._lock.require_whole()
            fired = False
            try:
                if not self._clock.has_time and all(
                    self._inputs[each].feed.has_ended for each in self._timed
                ):
                    self._clock.begin_time(self.scheduler.now_ns)
                while not self.is_backlogged and self.scheduler.run_due():
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
            return do_all(partial(_deliver, each) for each in self._outputs.values())

    @property
    def is_backlogged(self) -> bool:
        """Whether an output holds all it may, so that sources are refused."""
        return any(each.is_full for each in self._outputs.values())

    def _before(self, value: Any, source: object, time_of: Callable[[Any], int] | None) -> None:
        """Before each value: refuse it, or bring the clock to it."""
        for each in self._outputs.values():
            if each.is_full and each is not source:  # What is full is no reason not to take from it.
                full = [name for name, each in self._outputs.items() if each.is_full]
                raise Backlogged("an output is full", where=full, hint="Its consumer must acknowledge.")
        if time_of is None and self._clock.is_awaited:
            hint = "It does with the first value of a source with time_of."
            raise Backlogged("the queries' time has not begun", hint=hint)
        now_ns = None if time_of is None else time_of(value)
        try:
            self._clock.advance(now_ns)
        except BaseException:
            self._lock.is_torn = True
            raise

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
                    Recovery(self._host, self._catalog, self._build, begin, on_failed).run()
                for edge in list(self._inputs.values()):
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

    def _check_start(self, each: Start, made: Mapping[str, object]) -> None:
        check_name(each.query_id, kind="query")
        if each.query_id in self._catalog.standing or each.query_id in made:
            raise QueryExists("a query of that id is there", got=repr(each.query_id), hint="Stop it first.")
        if each.sink is not None and each.sink not in self._outputs:
            raise NoSuchQuery("no sink of that name", got=repr(each.sink), hint="Add it to the engine.")

    def _recipe(self, each: Start) -> Recipe:
        defined = self._catalog.definitions.get(each.of)
        if defined is None:
            return Recipe(each.of, dict(each.arguments))
        return Recipe(defined.factory, {**defined.arguments, **each.arguments})

    def _build(self, query_id: str, standing: Standing) -> Artifact:
        """The operators of a query, not started. Raises what the factory raises."""
        query = self._factories.make(standing.recipe)
        if not isinstance(query, Observable):
            raise TypeError(f"factory {standing.recipe.factory!r} made no Observable: {query!r}")
        sink = None
        if standing.sink is not None:
            if standing.sink not in self._outputs:
                raise NoSuchQuery("no sink of that name", got=repr(standing.sink), hint="Add it first.")
            sink = self._outputs[standing.sink]
        artifact = Artifact(self._host, query_id, begun_ns=standing.begun_ns)
        artifact.build(query, _Out(sink, lambda error: self._ended(query_id, error)))
        return artifact

    def _is_live(self, sink: str | None) -> bool:
        """Whether a sink has consumers that do not wait for checkpoints.

        The ids they saw must come again behind a recovery. So a query that begins among them does so with a
        checkpoint, and not in the log: nothing from before it is ever processed again.
        """
        return sink in self._outputs and self._outputs[sink].release == "now"

    def _forget(self, query_id: str) -> None:
        self._catalog.stand(query_id, None)
        self._clock.forget(query_id)
        artifact = self._host.roots.pop(query_id, None)
        if artifact is not None:
            artifact.forget()
        else:
            self._host.forget_stored(query_id)

    def _ended(self, query_id: str, error: Exception | None) -> None:
        standing = self._catalog.standing.get(query_id)
        if standing is None:
            return
        standing.ended = "" if error is None else f"{type(error).__name__}: {error}"
        self._catalog.stand(query_id, standing)
        if error is not None:
            logger.warning("query_failed id=%s error=%r", query_id, standing.ended)
        if self._on_query_ended is not None:
            try:
                self._on_query_ended(query_id, error)
            except Exception:
                logger.exception("callback_failed id=%s", query_id)

    def _let_go(self) -> None:
        inputs, outputs = self._inputs.values(), self._outputs.values()
        do_all(
            [
                *(each.abandon for each in self._host.roots.values()),
                *(each.detach for each in outputs),
                *(each.unload for each in inputs),
            ]
        )

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

    def _require_caught_up(self, sinks: Iterable[str | None]) -> None:
        behind = [name for name in sinks if name in self._outputs and self._outputs[name].is_behind]
        if behind:
            raise WrongState(
                "what an output sent at once before a crash is still to come again",
                where=sorted(set(behind)),
                hint="Feed the sources on. Where nothing comes, the store was lost or set back.",
            )

    def _refuse_inside(self) -> None:
        if self._lock.is_mine:
            raise WrongState("a query, factory or callback called its engine", hint="Do it from outside.")


def _deliver(output: OutputEdge) -> bool:
    with contextlib.suppress(Backlogged):
        return output.deliver()
    return False


class _Out:
    """Where what a query emits goes."""

    def __init__(self, sink: OutputEdge | None, on_end: Callable[[Exception | None], object]) -> None:
        self._sink = sink
        self._on_end = on_end

    def on_next(self, value: Any, /) -> None:
        if self._sink is not None:
            self._sink.on_next(value)

    def on_error(self, error: Exception, /) -> None:
        self._on_end(error)

    def on_completed(self) -> None:
        self._on_end(None)

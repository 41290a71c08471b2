"""Which queries there are: what is defined, started and stopped, and what is written of that at once.

The law: what a call returned for is durable. Where nobody has seen what a query emits before a checkpoint,
its begin and end are entries of the log; else they are made durable by a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rt.names import check_name
from rt.query.artifact import Artifact
from rt.query.catalog import Catalog
from rt.query.checkpointing import Checkpoints
from rt.query.clock import QueryClock
from rt.query.definitions import Factories, Recipe, Standing
from rt.query.edge_table import EdgeTable
from rt.query.edges import OutputEdge
from rt.query.errors import NoSuchQuery, QueryExists
from rt.query.host import Host
from rt.query.observing import Observable
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


class Queries:
    """The engine calls it with its lock held, and nothing else being written.

    `on_ended(query_id, error)` hears of every end.
    """

    def __init__(
        self,
        factories: Factories,
        host: Host,
        catalog: Catalog,
        clock: QueryClock,
        edges: EdgeTable,
        checkpoints: Checkpoints,
        on_ended: Callable[[str, Exception | None], object] | None,
    ) -> None:
        self._factories, self._host, self._catalog, self._clock = factories, host, catalog, clock
        self._edges, self._checkpoints, self._on_ended = edges, checkpoints, on_ended

    def define(self, name: str, recipe: Recipe) -> None:
        """See `QueryEngine.define`."""
        if name in self._catalog.definitions or name in self._factories:
            raise QueryExists("a definition or factory of that name is there", got=repr(name))
        if recipe.factory not in self._factories:
            raise NoSuchQuery("no factory of that name", got=repr(recipe.factory), hint="Register it.")
        self._checkpoints.append([Entry(DEFINITION, name, recipe.encode())])
        self._catalog.define(name, recipe)

    def undefine(self, name: str) -> None:
        """See `QueryEngine.undefine`."""
        if name not in self._catalog.definitions:
            raise NoSuchQuery("no definition of that name", got=repr(name))
        self._checkpoints.append([Entry(DEFINITION, name, None)])
        self._catalog.define(name, None)

    def start_many(self, starts: Iterable[Start]) -> None:
        """Start all of them, or none: see `QueryEngine.start`."""
        starts = list(starts)
        self._edges.require_caught_up(each.sink for each in starts)
        made: dict[str, tuple[Standing, Artifact]] = {}
        after = {name: edge.feed.watermark for name, edge in self._edges.inputs.items()}
        for each in starts:
            self._check_start(each, made)
            recipe = self._recipe(each)
            standing = Standing(
                recipe, each.sink, self._catalog.next_order(), after, self._host.scheduler.now_ns
            )
            made[each.query_id] = standing, self.build(each.query_id, standing)
        is_logged = self._checkpoints.unsettled.isdisjoint(made) and not any(
            self._edges.is_live(each.sink) for each, _ in made.values()
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

    def stop_many(self, query_ids: Iterable[str]) -> None:
        """Stop all of them, or none: see `QueryEngine.stop_many`."""
        wanted = dict.fromkeys(query_ids)
        for query_id in wanted:
            if query_id not in self._catalog.standing:
                raise NoSuchQuery("no query of that id", got=repr(query_id))
        self._edges.require_caught_up(self._catalog.standing[query_id].sink for query_id in wanted)
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

    def _check_start(self, each: Start, made: Mapping[str, object]) -> None:
        check_name(each.query_id, kind="query")
        if each.query_id in self._catalog.standing or each.query_id in made:
            raise QueryExists("a query of that id is there", got=repr(each.query_id), hint="Stop it first.")
        if each.sink is not None and each.sink not in self._edges.outputs:
            raise NoSuchQuery("no sink of that name", got=repr(each.sink), hint="Add it to the engine.")

    def _recipe(self, each: Start) -> Recipe:
        defined = self._catalog.definitions.get(each.of)
        if defined is None:
            return Recipe(each.of, dict(each.arguments))
        return Recipe(defined.factory, {**defined.arguments, **each.arguments})

    def build(self, query_id: str, standing: Standing) -> Artifact:
        """The operators of a query, not started. Raises what the factory raises."""
        query = self._factories.make(standing.recipe)
        if not isinstance(query, Observable):
            raise TypeError(f"factory {standing.recipe.factory!r} made no Observable: {query!r}")
        sink = None
        if standing.sink is not None:
            if standing.sink not in self._edges.outputs:
                raise NoSuchQuery("no sink of that name", got=repr(standing.sink), hint="Add it first.")
            sink = self._edges.outputs[standing.sink]
        artifact = Artifact(self._host, query_id, begun_ns=standing.begun_ns)
        artifact.build(query, _Out(sink, lambda error: self._ended(query_id, error)))
        return artifact

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
        if self._on_ended is not None:
            try:
                self._on_ended(query_id, error)
            except Exception:
                logger.exception("callback_failed id=%s", query_id)


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

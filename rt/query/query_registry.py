"""Which queries exist: defines, starts and stops them, and makes that durable.

Invariant: a change is durable when its call returns. It is an entry of the log if no consumer can have seen
the query's output before the next checkpoint. Otherwise a checkpoint makes it durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rt.names import check_name
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.edge import OutputEdge
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.factories import Factories, Recipe, StoredQuery
from rt.query.checkpoint.transaction_log import DEFINITION, QUERY, LogEntry
from rt.query.core.clock import QueryClock
from rt.query.core.errors import NoSuchQuery, QueryExists, error_text
from rt.query.core.observable import Observable
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime

logger = logging.getLogger("rt.query")


@dataclass(frozen=True, slots=True)
class Start:
    """A query to start, from a definition or a factory. `arguments` override those of the definition."""

    query_id: str
    of: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sink: str | None = None


class QueryRegistry:
    """Called by the engine with its lock held, while nothing else is written.

    `on_ended(query_id, error)` is called for every query that ends.
    """

    def __init__(
        self,
        factories: Factories,
        runtime: QueryRuntime,
        catalog: QueryCatalog,
        clock: QueryClock,
        edges: EdgeTable,
        checkpointer: Checkpointer,
        on_ended: Callable[[str, Exception | None], object] | None,
    ) -> None:
        self._factories, self._runtime, self._catalog, self._clock = factories, runtime, catalog, clock
        self._edges, self._checkpointer, self._on_ended = edges, checkpointer, on_ended

    def define(self, name: str, recipe: Recipe) -> None:
        if name in self._catalog.definitions or name in self._factories:
            raise QueryExists("a definition or factory has this name", got=repr(name))
        if recipe.factory not in self._factories:
            raise NoSuchQuery("no factory has this name", got=repr(recipe.factory), hint="Register it.")
        self._checkpointer.append([LogEntry(DEFINITION, name, recipe.encode())])
        self._catalog.define(name, recipe)

    def undefine(self, name: str) -> None:
        if name not in self._catalog.definitions:
            raise NoSuchQuery("no definition has this name", got=repr(name))
        self._checkpointer.append([LogEntry(DEFINITION, name, None)])
        self._catalog.define(name, None)

    def start_many(self, starts: Iterable[Start]) -> None:
        """Start all or none. See `QueryEngine.start`."""
        starts = list(starts)
        self._edges.require_caught_up(each.sink for each in starts)
        made: dict[str, tuple[StoredQuery, OperatorGroup]] = {}
        after = {name: edge.feed.watermark for name, edge in self._edges.inputs.items()}
        for each in starts:
            self._check_start(each, made)
            recipe = self._recipe(each)
            stored = StoredQuery(
                recipe, each.sink, self._catalog.next_order(), after, self._runtime.scheduler.now_ns
            )
            made[each.query_id] = stored, self.build(each.query_id, stored)
        is_logged = self._checkpointer.uncertain.isdisjoint(made) and not any(
            self._edges.sends_immediately(each.sink) for each, _ in made.values()
        )
        if is_logged:
            self._checkpointer.append(
                [LogEntry(QUERY, query_id, row.encode()) for query_id, (row, _) in made.items()]
            )
        for query_id, (stored, group) in made.items():
            self._catalog.put_query(query_id, stored)
            self._runtime.roots[query_id] = group
            group.guard(group.open)
            self._clock.start(group, None)
        if not is_logged:
            try:
                self._checkpointer.checkpoint()
            except BaseException:
                for query_id in made:
                    self._delete(query_id)
                self._checkpointer.mark_uncertain(made)
                raise

    def stop_many(self, query_ids: Iterable[str]) -> None:
        """Stop all or none. See `QueryEngine.stop_many`."""
        requested = dict.fromkeys(query_ids)
        for query_id in requested:
            if query_id not in self._catalog.queries:
                raise NoSuchQuery("no query has this id", got=repr(query_id))
        self._edges.require_caught_up(self._catalog.queries[query_id].sink for query_id in requested)
        is_logged = self._checkpointer.uncertain.isdisjoint(requested) and all(
            self._catalog.queries[query_id].sink is None for query_id in requested
        )
        if is_logged:
            self._checkpointer.append([LogEntry(QUERY, query_id, None) for query_id in requested])
        for query_id in requested:
            self._delete(query_id)
        if not is_logged:
            self._checkpointer.mark_uncertain(requested)
            self._checkpointer.checkpoint()

    def _check_start(self, start: Start, made: Mapping[str, object]) -> None:
        check_name(start.query_id, kind="query")
        if start.query_id in self._catalog.queries or start.query_id in made:
            raise QueryExists("a query has this id", got=repr(start.query_id), hint="Stop it first.")
        if start.sink is not None and start.sink not in self._edges.outputs:
            raise NoSuchQuery("no sink has this name", got=repr(start.sink), hint="Add it to the engine.")

    def _recipe(self, start: Start) -> Recipe:
        defined = self._catalog.definitions.get(start.of)
        if defined is None:
            return Recipe(start.of, dict(start.arguments))
        return Recipe(defined.factory, {**defined.arguments, **start.arguments})

    def build(self, query_id: str, stored: StoredQuery) -> OperatorGroup:
        """Make the operators of a query without starting them. Raises what the factory raises."""
        query = self._factories.make(stored.recipe)
        if not isinstance(query, Observable):
            raise TypeError(f"factory {stored.recipe.factory!r} must return an Observable, got {query!r}")
        sink = None
        if stored.sink is not None:
            if stored.sink not in self._edges.outputs:
                raise NoSuchQuery("no sink has this name", got=repr(stored.sink), hint="Add it first.")
            sink = self._edges.outputs[stored.sink]
        group = OperatorGroup(self._runtime, query_id, started_ns=stored.started_ns)
        group.build(query, _QueryOutput(sink, lambda error: self._ended(query_id, error)))
        return group

    def _delete(self, query_id: str) -> None:
        self._catalog.put_query(query_id, None)
        self._clock.cancel_start(query_id)
        group = self._runtime.roots.pop(query_id, None)
        if group is not None:
            group.delete()
        else:
            self._runtime.delete_stored(query_id)

    def _ended(self, query_id: str, error: Exception | None) -> None:
        stored = self._catalog.queries.get(query_id)
        if stored is None:
            return
        stored.ended = "" if error is None else error_text(error)
        self._catalog.put_query(query_id, stored)
        if error is not None:
            logger.warning("query_failed id=%s error=%r", query_id, stored.ended)
        if self._on_ended is not None:
            try:
                self._on_ended(query_id, error)
            except Exception:
                logger.exception("callback_failed id=%s", query_id)


class _QueryOutput:
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

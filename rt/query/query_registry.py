"""The registry of queries: defines, starts and stops queries, and makes these changes durable.

Invariant: a change is durable when its call returns. It is stored as a log entry if no consumer can have seen
the query's output before the next checkpoint. Otherwise a checkpoint makes it durable. If the engine has
stages, a checkpoint always makes a start durable: values of stages have no ids, so values that are sent again
could not be distinguished from values after a start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

from msgspec import Struct, field

from rt.names import check_name
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.edge import QueryOutput
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.error_policy import ErrorPolicy, OnError
from rt.query.checkpoint.factories import Factories, Recipe, StoredQuery
from rt.query.checkpoint.transaction_log import DEFINITION, QUERY, LogEntry
from rt.query.core.clock import QueryClock
from rt.query.core.errors import NoSuchQuery, QueryExists, error_text
from rt.query.core.observable import Observable
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.monitoring.error_handler import ErrorHandlers

logger = logging.getLogger("rt.query")


class Start(Struct, frozen=True):
    """A query to start, from a definition or a factory.

    `arguments` and `on_error` override those of the definition. `on_error`: the name of a policy, or an
    `ErrorPolicy`; None: the engine's default.
    """

    query_id: str
    of: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sink: str | None = None
    on_error: OnError | ErrorPolicy | None = None


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
        errors: ErrorHandlers,
        on_ended: Callable[[str, Exception | None], object] | None,
    ) -> None:
        self._factories, self._runtime, self._catalog, self._clock = factories, runtime, catalog, clock
        self._edges, self._checkpointer, self._on_ended = edges, checkpointer, on_ended
        self._errors: Final = errors

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
        feeds = {name: edge.feed for name, edge in self._edges.inputs.items()}
        after = {name: feed.watermark for name, feed in feeds.items()}
        counts = {name: feed.count for name, feed in feeds.items()}
        now_ns = self._runtime.scheduler.now_ns
        for each in starts:
            self._check_start(each, made)
            stored = StoredQuery(
                self._recipe(each), each.sink, self._catalog.next_order(), after, now_ns, counts=counts
            )
            made[each.query_id] = stored, self.build(each.query_id, stored)
        aside = {name for _, group in made.values() for name in group.side_outputs}
        self._edges.require_caught_up(aside)
        ended = [query_id for query_id in made if query_id in self._catalog.queries]
        is_logged = (
            self._can_log(ended)
            and not self._runtime.stages
            and self._checkpointer.uncertain.isdisjoint(made)
            and not any(map(self._edges.sends_immediately, [*aside, *(each.sink for each in starts)]))
        )
        if is_logged:
            entries = [LogEntry(QUERY, query_id, None) for query_id in ended]
            entries += [LogEntry(QUERY, query_id, row.encode()) for query_id, (row, _) in made.items()]
            self._checkpointer.append(entries)
        for query_id in ended:
            self._delete(query_id)
        for query_id, (stored, group) in made.items():
            self._catalog.put_query(query_id, stored)
            self._runtime.roots[query_id] = group
            self._reopen_sink(stored)
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
        roots = [self._runtime.roots[each] for each in requested if each in self._runtime.roots]
        self._edges.require_caught_up(name for each in roots for name in each.side_outputs)
        is_logged = self._can_log(requested)
        if is_logged:
            self._checkpointer.append([LogEntry(QUERY, query_id, None) for query_id in requested])
        for query_id in requested:
            self._delete(query_id)
        if not is_logged:
            self._checkpointer.mark_uncertain(requested)
            self._checkpointer.checkpoint()

    def _check_start(self, start: Start, made: Mapping[str, tuple[StoredQuery, object]]) -> None:
        check_name(start.query_id, kind="query")
        stored = self._catalog.queries.get(start.query_id)
        if start.query_id in made or (stored is not None and stored.ended is None):
            raise QueryExists("a query has this id", got=repr(start.query_id), hint="Stop it first.")
        if start.sink is not None and start.sink not in self._edges.outputs:
            raise NoSuchQuery("no sink has this name", got=repr(start.sink), hint="Add it to the engine.")
        self._require_single(start.sink, made)

    def _require_single(self, sink: str | None, made: Mapping[str, tuple[StoredQuery, object]]) -> None:
        """`QueryExists` if the sink ends with its query, and another query sends to it."""
        if sink is None or not self._edges.outputs[sink].ends_with_query:
            return
        senders = self._senders(sink) + [each for each, (stored, _) in made.items() if stored.sink == sink]
        if senders:
            hint = "Stop it first, or add the sink without ends_with_query."
            raise QueryExists("the sink ends with its query", where=sink, got=repr(senders[0]), hint=hint)

    def _end_sink(self, sink: str | None, error: Exception | None) -> None:
        """A query ended: end its sink, unless another query sends to it.

        After a crash an earlier query ends again, although the log already has a later query.
        """
        output = self._edges.outputs.get(sink or "")
        if output is None or not output.ends_with_query or self._senders(sink):
            return
        if error is None:
            output.on_completed()
        else:
            output.on_error(error)

    def _senders(self, sink: str | None) -> list[str]:
        """The queries that send to the sink and have not ended."""
        queries = self._catalog.queries.items()
        return [query_id for query_id, each in queries if each.sink == sink and each.ended is None]

    def _recipe(self, start: Start) -> Recipe:
        defined = self._catalog.definitions.get(start.of)
        policy = None if start.on_error is None else ErrorPolicy.of(start.on_error)
        if defined is None:
            return Recipe(start.of, deepcopy(dict(start.arguments)), policy or self._errors.default)
        policy = policy or defined.on_error or self._errors.default
        return Recipe(defined.factory, deepcopy({**defined.arguments, **start.arguments}), policy)

    def rebuild(self, query_id: str, stored: StoredQuery) -> OperatorGroup:
        """`build` for a recovery."""
        made = self.build(query_id, stored)
        self._reopen_sink(stored)
        return made

    def _reopen_sink(self, stored: StoredQuery) -> None:
        """A sink that ended with an earlier query continues with this one, unless it has ended too."""
        output = self._edges.outputs.get(stored.sink or "")
        if output is not None and output.ends_with_query and stored.ended is None:
            output.reopen()

    def _can_log(self, deleted: Iterable[str]) -> bool:
        """Whether log entries can delete these queries: they send nothing that is not stored yet."""
        return all(
            query_id not in self._checkpointer.uncertain and self._catalog.queries[query_id].sink is None
            for query_id in deleted
        )

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
        group.errors = self._errors.handler(query_id, stored.recipe.on_error)
        group.build(query, QueryOutput(sink, lambda error: self._ended(query_id, error)))
        return group

    def _delete(self, query_id: str) -> None:
        self._catalog.put_query(query_id, None)
        self._clock.cancel_start(query_id)
        self._runtime.late.pop(query_id, None)
        group = self._runtime.roots.pop(query_id, None)
        if group is not None:
            try:
                group.delete()
            except Exception:  # The query ends nevertheless.
                logger.exception("dispose_failed id=%s", query_id)
        else:
            self._runtime.delete_stored(query_id)

    def _ended(self, query_id: str, error: Exception | None) -> None:
        stored = self._catalog.queries.get(query_id)
        if stored is None:
            return
        stored.ended = "" if error is None else error_text(error)
        self._catalog.put_query(query_id, stored)
        self._end_sink(stored.sink, error)
        if error is not None:
            logger.warning("query_failed id=%s error=%r", query_id, stored.ended)
        if self._on_ended is not None:
            try:
                self._on_ended(query_id, error)
            except Exception:
                logger.exception("callback_failed id=%s", query_id)

"""The runtime of queries: feeds, clock, object space, and which rows a checkpoint must write.

    <prefix>artifact    <group id>       the row of an operator group
    <prefix>objects/…                    the object space

If a save fails, the next one writes its rows again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from rt.objects import (
    CheckpointKind,
    PersistedObjectSpace,
    Serializers,
    StateDamaged,
    StateReader,
    StateWriter,
)
from rt.objects.space import ENGINE_PREFIX
from rt.query.async_calls import AsyncCalls, Calls
from rt.query.core.errors import NoSuchQuery, QueryExists
from rt.query.core.observable import Observer
from rt.query.core.operator import Operator
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.row_json import decode
from rt.query.core.scheduler import Scheduler
from rt.query.core.scoped_objects import owner_of
from rt.query.core.source import ValueFeed
from rt.query.core.subject import Subject
from rt.query.turns import Turns

GROUPS: Final = "query/artifact"
OBJECTS: Final = ENGINE_PREFIX


Watch = Callable[[Operator[Any, Any], Observer[Any]], Observer[Any]]


class _Flight(NamedTuple):
    written: dict[str, OperatorGroup]
    deleted: dict[str, None]


class QueryRuntime:
    """Queries in memory, and what they share. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        serializers: Serializers | None = None,
        *,
        watch: Watch | None = None,
        calls: Calls | None = None,
    ) -> None:
        """`watch(operator, out)`: the observer to which an operator sends, in place of `out`."""
        self.watch: Final = watch
        self.scheduler: Final = scheduler
        self.calls: Final[Calls] = calls or AsyncCalls()
        self.space: Final = PersistedObjectSpace(serializers, prefix=OBJECTS)
        self.called_with: Any = None
        """The value of a finished call that an operator processes now."""
        self.subjects: Final[dict[str, Subject]] = {}
        self.roots: Final[dict[str, OperatorGroup]] = {}
        """The queries, by id."""
        self.stages: Final[dict[str, OperatorGroup]] = {}
        """The stages, by id, in the order in which they were added. No query has the id of a stage."""
        self.turns: Final = Turns(scheduler)
        self.outputs: Final[dict[str, Observer[Any]]] = {}
        """By name: the outputs to which operators send values besides their results, such as late values."""
        self.late: Final[Counter[str]] = Counter()
        """By query: the number of values that its operators left out because they were late."""
        self.uncertain: Final[set[str]] = set()
        """Queries for which no log entry would be correct until the next checkpoint.

        Either the checkpoint that starts or ends the query failed, so it is unknown whether the store has the
        query. Or the query left out a value, and its dead letter, or the value sent to a late output for it,
        is not stored yet. During a commit, the set holds the queries that became uncertain since the changes
        of the commit were collected.
        """
        self._feeds: dict[str, ValueFeed] = {}
        self._dirty: dict[str, OperatorGroup] = {}
        self._deleted: dict[str, None] = {}
        self._flight: _Flight | None = None
        self._prepared: tuple[dict[str, OperatorGroup], list[tuple[str, bytes]]] | None = None
        self._stored_rows: dict[str, bytes] = {}
        self._kept: dict[str, bytes] = {}
        """Stored rows of queries that do not run."""
        self._stored_roots: dict[str, dict[str, Any]] = {}
        self._stored_children: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)

    def feed(self, name: str) -> ValueFeed:
        """The feed of a source or stage; `NoSuchQuery` if there is none."""
        if name not in self._feeds:
            raise NoSuchQuery("no such source", got=repr(name), hint="Add it to the engine first.")
        return self._feeds[name]

    def add_feed(self, name: str) -> ValueFeed:
        """The feed of a source, made if there is none. `QueryExists` if a stage has the name."""
        feed = self._feeds.setdefault(name, ValueFeed(name, self.turns))
        if feed.rank >= 0:
            raise QueryExists("a stage has this name", got=repr(name))
        return feed

    def drop_feed(self, name: str) -> None:
        """Forget the feed of a source that could not be added, unless a query reads it already."""
        if not self._feeds[name].has_taps:
            del self._feeds[name]

    def add_stage(self, group: OperatorGroup, feed: ValueFeed) -> None:
        self.stages[group.id] = group
        self._feeds[feed.name] = feed

    def has_feed(self, name: str) -> bool:
        return name in self._feeds

    @property
    def source_counts(self) -> dict[str, int]:
        """By source, the number of values that every query processed, in all runs."""
        return {name: each.count for name, each in self._feeds.items() if each.rank < 0}

    @property
    def all_roots(self) -> list[OperatorGroup]:
        """Queries and stages."""
        return [*self.roots.values(), *self.stages.values()]

    def output(self, name: str) -> Observer[Any]:
        """The output of the engine with this name; `NoSuchQuery` if there is none."""
        if name not in self.outputs:
            raise NoSuchQuery("no sink has this name", got=repr(name), hint="Add it to the engine first.")
        return self.outputs[name]

    def senders(self, output: str) -> list[str]:
        """The queries with an operator that sends values besides its results to this output."""
        return [each.id for each in self.all_roots if output in each.side_outputs]

    def processing(self) -> tuple[str | None, int | None, Any]:
        """The source, id and value that the queries process now.

        All three are None for a timer. For a finished call of `map_async` there is only the value.
        """
        for feed in self._feeds.values():
            if feed.processing is not None:
                return feed.name, feed.processing, feed.value
        return None, None, self.called_with

    def mark(self, group: OperatorGroup) -> None:
        """Write the group's row in the next save."""
        self._dirty[group.id] = group
        self._deleted.pop(group.id, None)

    def delete(self, group: OperatorGroup) -> None:
        """Delete the group's row in the next save."""
        self._dirty.pop(group.id, None)
        self._deleted[group.id] = None

    def pop_children(self, parent: str) -> Iterable[tuple[str, dict[str, Any]]]:
        """Remove and return the keys and rows of an operator's stored inner subscriptions, oldest first."""
        rows = self._stored_children.pop(parent, None)
        return sorted(rows, key=lambda each: each[1]["order"]) if rows else ()

    def prepare(
        self, *, is_full: bool, on_failed: Callable[[OperatorGroup, Exception], object] | None = None
    ) -> None:
        """Make the rows that `save` will write.

        `on_failed` is called for a group that cannot be saved. It must raise, or end the query.
        """
        while True:
            dirty = self._running_groups() if is_full else dict(self._dirty)
            rows = []
            for each in dirty.values():
                try:
                    rows.append((each.id, each.row()))
                except Exception as error:
                    if on_failed is None:
                        raise
                    on_failed(each, error)
                    break
            else:
                self._prepared = dirty, rows
                return

    def save(self, writer: StateWriter) -> None:
        """Write rows and objects, as they are now. `saved` or `save_failed` must follow.

        If it raises, the writer is rolled back and nothing else changed.
        """
        is_full = writer.kind is CheckpointKind.FULL
        try:
            if self._prepared is None:
                self.prepare(is_full=is_full)
            assert self._prepared is not None
            (dirty, rows), self._prepared = self._prepared, None
            if is_full:
                writer.clear(GROUPS)
                rows.extend(self._kept.items())
            writer.put_many(GROUPS, rows)
            if self._deleted and not is_full:
                writer.delete_many(GROUPS, list(self._deleted))
            self.space.save(writer)
        except BaseException:
            writer.rollback()
            raise
        self._flight = _Flight(dirty, self._deleted)
        for each in dirty.values():
            each.is_dirty = False
        self._dirty, self._deleted = {}, {}

    def saved(self) -> None:
        """The save was committed."""
        assert self._flight is not None
        self._flight = None
        self.space.on_saved()

    def save_failed(self, *, unknown_outcome: bool) -> None:
        """The save was not committed, or its outcome is unknown."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self.space.on_save_failed(unknown_outcome=unknown_outcome)
        still_deleted = {each: None for each in flight.deleted if each not in self._dirty}
        self._deleted = {**still_deleted, **self._deleted}
        for each in flight.written.values():
            if each.id not in self._deleted:
                each.mark()

    def _running_groups(self) -> dict[str, OperatorGroup]:
        live: dict[str, OperatorGroup] = {}
        waiting = self.all_roots
        while waiting:
            each = waiting.pop()
            live[each.id] = each
            waiting.extend(each.children())
        return live

    def load(self, reader: StateReader) -> None:
        """Read the store without building anything."""
        self.space.load(reader)
        for group_id, data in reader.rows(GROUPS):
            parent, slash, last = group_id.rpartition("/")
            row = decode(data, group_id, "operators", *(("order",) if slash else ()))
            if type(row["operators"]) is not list:
                raise StateDamaged("not the row of an operator group", where=group_id, got=repr(data[:60]))
            self._stored_rows[group_id] = data
            if not slash:
                self._stored_roots[group_id] = row
                continue
            index, dot, key = last.partition(".")
            if not dot:
                raise StateDamaged("not the key of an operator group", where=group_id)
            self._stored_children[f"{parent}/{index}"].append((key, row))

    def pop_stored(self, query_id: str) -> dict[str, Any] | None:
        """Remove and return the stored row of a query or stage; None if there is none."""
        return self._stored_roots.pop(query_id, None)

    def delete_stored(self, query_id: str) -> None:
        """Delete everything stored of a query that does not run."""
        self._stored_roots.pop(query_id, None)
        for parent in [each for each in self._stored_children if _query_of(each) == query_id]:
            del self._stored_children[parent]
        for known in (self._stored_rows, self._kept):
            for group_id in [each for each in known if _query_of(each) == query_id]:
                del known[group_id]
                self._deleted[group_id] = None
        for object_id in self.space.ids():
            if _query_of(owner_of(object_id)) == query_id:
                self.space.delete(object_id)

    def sweep(self, ignored: Collection[str] = ()) -> None:
        """Delete rows and objects without an owner, except those of the queries in `ignored`.

        Call it when everything is loaded.
        """
        rows, live = self._stored_rows, self._running_groups()
        self._kept = {each: rows[each] for each in rows if _query_of(each) in ignored}
        self._deleted |= {each: None for each in rows if each not in live and each not in self._kept}
        for object_id in self.space.ids():
            owner = owner_of(object_id)
            if owner not in live and not owner.startswith("@") and _query_of(owner) not in ignored:
                self.space.delete(object_id)
        self._stored_rows.clear()
        self._stored_children.clear()
        self._stored_roots.clear()


def _query_of(group_id: str) -> str:
    return group_id.split("/", 1)[0]

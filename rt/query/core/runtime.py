"""The runtime of queries: feeds, clock, object space, and which rows a checkpoint must write.

    <prefix>artifact    <group id>       the row of an operator group
    <prefix>objects/…                    the object space

If a save fails, the next one writes its rows again.
"""

from __future__ import annotations

from collections import defaultdict
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
from rt.query.core.errors import NoSuchQuery
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.row_json import decode
from rt.query.core.scheduler import Scheduler
from rt.query.core.scoped_objects import owner_of
from rt.query.core.source import ValueFeed
from rt.query.core.subject import Subject

GROUPS: Final = "query/artifact"
OBJECTS: Final = "query/objects/"


class _Flight(NamedTuple):
    written: dict[str, OperatorGroup]
    deleted: dict[str, None]


class QueryRuntime:
    """Queries in memory, and what they share. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, serializers: Serializers | None = None) -> None:
        self.scheduler: Final = scheduler
        self.space: Final = PersistedObjectSpace(serializers, prefix=OBJECTS)
        self.subjects: Final[dict[str, Subject]] = {}
        self.roots: Final[dict[str, OperatorGroup]] = {}
        """The queries, by id."""
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
        """The feed of a source; `NoSuchQuery` if there is none."""
        if name not in self._feeds:
            raise NoSuchQuery("no such source", got=repr(name), hint="Add it to the engine first.")
        return self._feeds[name]

    def add_feed(self, name: str) -> ValueFeed:
        return self._feeds.setdefault(name, ValueFeed(name))

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
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self.space.on_saved()
        for each in flight.written.values():
            each.guard(each.saved)

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
        waiting = list(self.roots.values())
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
        """Remove and return the stored row of a query; None if there is none."""
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
        """Delete rows and objects without an owner, except those of `ignored`. Call when all is loaded."""
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

"""What queries live in: the feeds, the clock, the object space, and which rows a checkpoint must write.

    <prefix>artifact    <artifact id>    the row of an artifact
    <prefix>objects/…                    the object space

A save takes what changed; what it took counts as changed again if the commit fails, so a row that an
unconfirmed save touched is always written again by the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from rt.objects import (
    ANY,
    CheckpointKind,
    PersistedObjectSpace,
    Serializers,
    StateDamaged,
    StateReader,
    StateWriter,
)
from rt.query.artifact import Artifact
from rt.query.errors import NoSuchQuery
from rt.query.inner import Inner
from rt.query.objects import owner_of
from rt.query.scheduling import Scheduler
from rt.query.taps import Feed

ARTIFACTS: Final = "query/artifact"
OBJECTS: Final = "query/objects/"


class _Flight(NamedTuple):
    written: dict[str, Artifact]
    gone: dict[str, None]


class Host:
    """Queries in memory, with what they share. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, serializers: Serializers | None = None) -> None:
        self.scheduler: Final = scheduler
        self.space: Final = PersistedObjectSpace(serializers, prefix=OBJECTS)
        self.inners: Final[dict[str, Inner]] = {}
        self.roots: Final[dict[str, Artifact]] = {}
        """The queries, by id."""
        self._feeds: dict[str, Feed] = {}
        self._dirty: dict[str, Artifact] = {}
        self._gone: dict[str, None] = {}
        self._flight: _Flight | None = None
        self._prepared: tuple[dict[str, Artifact], list[tuple[str, bytes]]] | None = None
        self._raw: dict[str, bytes] = {}
        self._kept: dict[str, bytes] = {}
        """Stored rows of queries that do not run."""
        self._stored_roots: dict[str, dict[str, Any]] = {}
        self._stored_children: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)

    # What queries use

    def feed(self, name: str) -> Feed:
        """The feed of a source; `NoSuchQuery` if nobody added it."""
        if name not in self._feeds:
            raise NoSuchQuery("no such source", got=repr(name), hint="Add it to the engine first.")
        return self._feeds[name]

    def add_feed(self, name: str) -> Feed:
        """Make the feed of a source."""
        return self._feeds.setdefault(name, Feed(name))

    def mark(self, artifact: Artifact) -> None:
        """Have an artifact's row in the next save."""
        self._dirty[artifact.id] = artifact
        self._gone.pop(artifact.id, None)

    def forget(self, artifact: Artifact) -> None:
        """Have its row deleted by the next save."""
        self._dirty.pop(artifact.id, None)
        self._gone[artifact.id] = None

    def take_children(self, parent: str) -> Iterable[tuple[str, dict[str, Any]]]:
        """Keys and rows of the stored inner subscriptions of an operator, once."""
        return self._stored_children.pop(parent, ())

    # Saving

    def prepare(
        self, *, is_full: bool, on_failed: Callable[[Artifact, Exception], object] | None = None
    ) -> None:
        """Make the rows that `save` is about to write.

        `on_failed` hears of an artifact that cannot be saved: it raises, or ends the query.
        """
        while True:
            dirty = self._live() if is_full else dict(self._dirty)
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
        """Put rows and objects into `writer`, as they are now; `saved` or `save_failed` must follow.

        Where it raises, the writer is rolled back and nothing else has happened.
        """
        is_full = writer.kind is CheckpointKind.FULL
        try:
            if self._prepared is None:
                self.prepare(is_full=is_full)
            assert self._prepared is not None
            (dirty, rows), self._prepared = self._prepared, None
            if is_full:
                rows.extend(self._kept.items())
            writer.put_many(ARTIFACTS, rows)
            if self._gone and not is_full:
                writer.delete_many(ARTIFACTS, list(self._gone))
            self.space.save(writer)
        except BaseException:
            writer.rollback()
            raise
        self._flight = _Flight(dirty, self._gone)
        for each in dirty.values():
            each.is_dirty = False
        self._dirty, self._gone = {}, {}

    def saved(self) -> None:
        """The save is durable."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self.space.on_saved()
        for each in flight.written.values():
            each.guard(each.saved)

    def save_failed(self, *, unknown_outcome: bool) -> None:
        """The save was not committed, or, with `unknown_outcome`, that is not known."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self.space.on_save_failed(unknown_outcome=unknown_outcome)
        still_gone = {each: None for each in flight.gone if each not in self._dirty}
        self._gone = {**still_gone, **self._gone}
        for each in flight.written.values():
            if each.id not in self._gone:
                each.mark()

    def _live(self) -> dict[str, Artifact]:
        """Every artifact there is."""
        live: dict[str, Artifact] = {}
        waiting = list(self.roots.values())
        while waiting:
            each = waiting.pop()
            live[each.id] = each
            waiting.extend(each.children())
        return live

    # Loading

    def load(self, reader: StateReader) -> list[str]:
        """Take what is stored, without building anything of it; the ids of the stored queries."""
        self.space.load(reader)
        for artifact_id, data in reader.rows(ARTIFACTS):
            row = ANY.load(data)
            if type(row) is not dict or type(row.get("operators")) is not list:
                raise StateDamaged("a row is no artifact", where=artifact_id, got=repr(data[:60]))
            self._raw[artifact_id] = data
            parent, slash, last = artifact_id.rpartition("/")
            if not slash:
                self._stored_roots[artifact_id] = row
                continue
            index, dot, key = last.partition(".")
            if not dot:
                raise StateDamaged("a row is no artifact", where=artifact_id)
            self._stored_children[f"{parent}/{index}"].append((key, row))
        return list(self._stored_roots)

    def take_stored(self, query_id: str) -> dict[str, Any] | None:
        """The stored row of a query, once; None if there is none."""
        return self._stored_roots.pop(query_id, None)

    def forget_stored(self, query_id: str) -> None:
        """Have everything deleted that is stored of a query that does not run."""
        self._stored_roots.pop(query_id, None)
        for parent in [each for each in self._stored_children if _is_of(each, query_id)]:
            del self._stored_children[parent]
        for known in (self._raw, self._kept):
            for artifact_id in [each for each in known if _is_of(each, query_id)]:
                del known[artifact_id]
                self._gone[artifact_id] = None
        for object_id in self.space.ids():
            if _is_of(owner_of(object_id), query_id):
                self.space.delete(object_id)

    def sweep(self, ignored: Collection[str] = ()) -> None:
        """After everything was loaded: delete what belongs to nothing, and keep what is of `ignored`."""
        kept = {each for each in self._raw if each.split("/", 1)[0] in ignored}
        self._kept = {artifact_id: self._raw[artifact_id] for artifact_id in kept}
        live = self._live()
        for artifact_id in self._raw:
            if artifact_id not in live and artifact_id not in kept:
                self._gone[artifact_id] = None
        for object_id in self.space.ids():
            owner = owner_of(object_id)
            if owner not in live and not owner.startswith("@") and owner.split("/", 1)[0] not in ignored:
                self.space.delete(object_id)
        self._raw.clear()
        self._stored_children.clear()
        self._stored_roots.clear()


def _is_of(artifact_id: str, query_id: str) -> bool:
    return artifact_id == query_id or artifact_id.startswith(f"{query_id}/")

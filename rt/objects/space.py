"""The persisted object space: a save writes what changed since the save before it, and nothing else.

    state               version    1
    state/index         <id>       {"kind": "List", "types": ["int"]}     types: names of serializers
    state/item/<id>/…   …          the rows of an object: see the module of its kind

Ids are percent-encoded in keys and categories. A loaded object is read at its first `get`.

A save has three steps: `save(writer)`, `writer.commit()`, then `on_saved()`, or `on_save_failed()` if the
commit raised. Edits between `save` and its outcome belong to the next save. Changes of a failed save are
written again by the next one.
"""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import quote, unquote

from msgspec import Struct, field

from rt.errors import InvalidOption, UnknownVersion
from rt.objects.core.errors import CommitUnknown, ObjectError, OutOfTurn, StateDamaged
from rt.objects.core.persisted import Kind, Persisted, StoredRows
from rt.objects.core.serializers import Of, Serializers
from rt.objects.core.store import CheckpointKind, ObjectRows, StateReader, StateWriter, Store
from rt.objects.registry import CLASSES, Registry, check_id, require_kind

VERSION: Final = 1
ENGINE_PREFIX: Final = "query/objects/"
"""The prefix of an engine's objects."""

_KINDS: Final = {kind.value: kind for kind in Kind}


class _Stored(Struct, frozen=True):
    """An object that is in the store and is not loaded yet. A newer rt may have added its kind."""

    kind: str
    types: tuple[str, ...]
    row: bytes


class _Changes(Struct):
    """What differs from the store, apart from the contents of objects."""

    index: dict[str, None] = field(default_factory=dict)
    """Ids whose index row may differ."""
    deleted: dict[str, set[str]] = field(default_factory=dict)
    """Deleted ids, each with the categories that may hold its rows."""
    objects: dict[str, Persisted] = field(default_factory=dict)

    def add(self, later: _Changes) -> None:
        self.index.update(later.index)
        for object_id, categories in later.deleted.items():
            self.deleted.setdefault(object_id, set()).update(categories)
        self.objects = {
            **{object_id: each for object_id, each in self.objects.items() if not each.is_deleted},
            **later.objects,
        }


class _Flight(Struct, frozen=True):
    """A save whose outcome is not known yet."""

    store_id: str
    reader: StateReader
    changes: _Changes
    saved: list[Persisted]
    wrote_version: bool


class PersistedObjectSpace(Registry):
    """Objects by id, in a store.

    `serializers` turn elements into bytes. Every category begins with `prefix`, so that other spaces and an
    engine of queries, whose prefix is `query/`, can share the store. Any two prefixes can share a store. Do
    not save, load or edit at the same time; a commit may run in another thread.
    """

    def __init__(self, serializers: Serializers | None = None, *, prefix: str = "") -> None:
        super().__init__(serializers)
        _check_prefix(prefix)
        self._prefix: Final = prefix
        self._root: Final = f"{prefix}state"
        self._changes = _Changes()
        self._flight: _Flight | None = None
        self._reader: StateReader | None = None
        self._base: str | None = None  # id of the store that differential saves extend
        self._last_save: object | None = None  # returned by `Owners.last_save`, if no other space saves
        self._version_is_stored = False

    # Saving

    def checkpoint(self, store: Store, kind: CheckpointKind = CheckpointKind.DIFFERENTIAL) -> None:
        """Save into `store`, commit, and record the outcome. Returns when the save is durable.

        Raises what `save` and `commit` raise. The space can be saved again after an error, unless the store
        failed.
        """
        writer = store.begin(kind)
        try:
            self.save(writer)
        except BaseException:
            writer.rollback()  # It is still open if an interrupt came first.
            raise
        try:
            writer.commit()
        except BaseException as error:
            writer.rollback()
            self.on_save_failed(
                unknown_outcome=isinstance(error, CommitUnknown) or not isinstance(error, Exception)
            )
            raise
        self.on_saved()

    def save(self, writer: StateWriter) -> None:
        """Write the changes into `writer`, or everything if the writer's kind is FULL. Serializes now.

        The caller then commits the writer and calls `on_saved` or `on_save_failed`. Raises `OutOfTurn` if the
        outcome of the last save is missing, and for a differential save into a store that this space was
        neither loaded from nor fully saved into. After an error the writer is rolled back and the space is
        unchanged.
        """
        with self._lock:
            is_full = writer.kind is CheckpointKind.FULL
            saved: list[Persisted] = []
            changes, is_idle = self._changes, self._flight is None
            try:
                reader = writer.reader()
                self._check_order(writer, reader)
                if is_full:
                    writer.clear_tree(self._root)
                wrote_version = self._write_index(writer, is_full=is_full)
                self._write_objects(writer, saved, is_full=is_full)
                self._flight = _Flight(writer.store_id, reader, changes, saved, wrote_version)
                self._changes = _Changes()
            except BaseException:
                writer.rollback()
                if is_idle:
                    self._flight, self._changes = None, changes
                for each in saved:
                    each.save_failed(unknown_outcome=False)
                    each.mark()
                raise

    def on_saved(self) -> None:
        """Record that the last save was committed. `OutOfTurn` if no save is open."""
        with self._lock:
            flight = self._require_flight()
            for each in flight.saved:
                each.saved()
            self._version_is_stored = self._version_is_stored or flight.wrote_version
            # After a move to another store, unloaded objects are in that store, and the previous store may be
            # closed.
            self._base, self._reader = flight.store_id, flight.reader
            self._last_save = flight.reader.owners.note_save(self._root)
            self._flight = None

    def on_save_failed(self, *, unknown_outcome: bool = True) -> None:
        """Record that the last save was not committed, or that its outcome is unknown.

        The next save writes its changes again. `OutOfTurn` if no save is open.
        """
        with self._lock:
            flight = self._require_flight()
            if unknown_outcome:
                self._last_save = flight.reader.owners.note_save(self._root)
            for each in flight.saved:
                each.save_failed(unknown_outcome=unknown_outcome)
                if not each.is_deleted:
                    each.mark()
            flight.changes.add(self._changes)
            self._changes = flight.changes
            self._flight = None

    def _write_index(self, writer: StateWriter, *, is_full: bool) -> bool:
        """Write the index rows. Returns whether the version row was written."""
        index = f"{self._root}/index"
        needs_version = is_full or not self._version_is_stored
        if needs_version:
            writer.put(self._root, "version", b"%d" % VERSION)
        if is_full:
            writer.put_many(
                index, ((_quoted(each), _index_row(found)) for each, found in self._objects.items())
            )
            return needs_version
        deleted = []
        for object_id in self._changes.index:
            if object_id in self._objects:
                writer.put(index, _quoted(object_id), _index_row(self._objects[object_id]))
            else:
                deleted.append(_quoted(object_id))
        if deleted:
            writer.delete_many(index, deleted)
        for object_id, categories in self._changes.deleted.items():
            for category in sorted(categories):
                writer.clear(self._base_of(object_id) + category)
        return needs_version

    def _write_objects(self, writer: StateWriter, saved: list[Persisted], *, is_full: bool) -> None:
        """Write the rows of objects. Each object is added to `saved` before its rows are written."""
        if not is_full:
            for each in self._changes.objects.values():
                saved.append(each)
                self._write_object(writer, each, is_full=False)
            return
        for object_id, found in self._objects.items():
            if isinstance(found, Persisted):
                saved.append(found)
                self._write_object(writer, found, is_full=True)
            else:
                assert self._reader is not None
                for category in self._stored_categories(object_id, found):
                    place = self._base_of(object_id) + category
                    writer.put_many(place, self._reader.rows(place))

    def _write_object(self, writer: StateWriter, each: Persisted, *, is_full: bool) -> None:
        try:
            each.save(ObjectRows(writer, self._base_of(each.id)), is_full=is_full)
        except ObjectError as error:
            if error.where is None:
                error.where = f"object {each.id!r}"
            raise

    def _check_order(self, writer: StateWriter, reader: StateReader) -> None:
        if self._flight is not None:
            raise OutOfTurn(
                "the outcome of the last save is missing", hint="Call on_saved or on_save_failed first."
            )
        if writer.kind is not CheckpointKind.FULL and writer.store_id != self._base:
            what = "a differential save into a store that this space was not loaded from"
            raise OutOfTurn(
                what, hint="Load the space from that store first, or save with CheckpointKind.FULL."
            )

        last = reader.owners.last_save(self._root)
        if writer.store_id == self._base and last is not None and last is not self._last_save:
            raise OutOfTurn(
                "another space with this prefix has saved into the store since this one was loaded",
                where=self._root,
                hint="Load the objects into a new space, or give each space its own prefix.",
            )

    def _require_flight(self) -> _Flight:
        if self._flight is None:
            raise OutOfTurn("no save is open", hint="Call on_saved or on_save_failed once after each save.")
        return self._flight

    # Loading

    def load(self, reader: StateReader) -> None:
        """Load the objects of a store, which may be empty. Must be the first call (`OutOfTurn`).

        Reads the index now and each object at its first `get`, so the store must stay open. Raises
        `StateDamaged`, `rt.UnknownVersion`.
        """
        with self._lock:
            if self._objects or self._base is not None or self._changes.index or self._flight is not None:
                raise OutOfTurn("the space already has objects or saves", hint="Load into a new space.")
            objects, last_save = {}, reader.owners.last_save(self._root)
            for key, row in reader.rows(f"{self._root}/index"):
                object_id, found = _read_index(key, row)
                objects[object_id] = found
            self._version_is_stored = self._read_version(reader, is_empty=not objects)
            self._objects.update(objects)
            self._reader = reader
            self._base = reader.store_id
            self._last_save = last_save

    def _read_version(self, reader: StateReader, *, is_empty: bool) -> bool:
        """Check the stored version. Returns whether there is one; a store with objects must have one."""
        version = reader.get(self._root, "version")
        if version is None and not is_empty:
            raise StateDamaged("the store has objects but no version", where=self._root)
        if version is not None and version != b"%d" % VERSION:
            what = "the object space has an unknown version"
            got = repr(version[:20])
            raise UnknownVersion(what, where=self._root, got=got, expected=VERSION, hint="Use a newer rt.")
        return version is not None

    def _load(self, object_id: str, stored: _Stored, kind: Kind, of: tuple[Of[Any], ...]) -> Persisted:
        require_kind(object_id, kind, stored.kind)
        if len(stored.types) != len(of):
            raise StateDamaged("wrong number of types in the index", where=object_id, got=stored.types)
        assert self._reader is not None
        chosen = [
            self._require_type(object_id, each, name) or self._serializers.named(name)
            for each, name in zip(of, stored.types, strict=True)
        ]
        made = CLASSES[kind](self, object_id, *chosen)
        made.load(StoredRows(self._reader, self._base_of(object_id)))
        return made

    # Changes

    def mark(self, changed: Persisted) -> bool:
        self._changes.objects[changed.id] = changed
        return True

    def _created(self, made: Persisted) -> None:
        self._changes.index[made.id] = None
        self._changes.objects[made.id] = made

    def _deleted(self, object_id: str, found: Any) -> None:
        self._changes.objects.pop(object_id, None)
        if not isinstance(found, Persisted):
            categories = set(self._stored_categories(object_id, found))
        else:
            found.detach()
            if not found.may_be_stored:
                if object_id not in self._changes.deleted:
                    self._changes.index.pop(object_id, None)
                return
            categories = set(found.PARTS)
        self._changes.index[object_id] = None
        self._changes.deleted.setdefault(object_id, set()).update(categories)

    def _stored_categories(self, object_id: str, found: _Stored) -> list[str]:
        """The categories, without the object's base, that may hold its rows."""
        if found.kind in _KINDS:
            return list(CLASSES[_KINDS[found.kind]].PARTS)
        assert self._reader is not None
        base = self._base_of(object_id)
        return [category.removeprefix(base) for category in self._reader.categories(base)]

    def _base_of(self, object_id: str) -> str:
        return f"{self._root}/item/{_quoted(object_id)}/"


def _check_prefix(prefix: str) -> None:
    """Refuse a prefix whose rows could mix with the rows of another space, or of an engine."""
    if not isinstance(prefix, str):
        raise TypeError(f"a prefix must be a str, got {type(prefix).__name__}")
    try:
        prefix.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"a prefix must be valid Unicode, got {prefix!r}") from None
    if "state/" in prefix:
        raise InvalidOption(f"a prefix must not contain 'state/', got {prefix!r}")
    if prefix.startswith("query/") and prefix != ENGINE_PREFIX:
        raise InvalidOption(f"the prefix 'query/' is reserved for engines of queries, got {prefix!r}")


def _quoted(object_id: str) -> str:
    return object_id if object_id.isascii() and object_id.isalnum() else quote(object_id, safe="")


def _index_row(found: Persisted | _Stored) -> bytes:
    if isinstance(found, _Stored):
        return found.row
    return json.dumps({"kind": found.KIND.value, "types": found.types}, separators=(",", ":")).encode()


def _read_index(key: str, row: bytes) -> tuple[str, _Stored]:
    try:
        object_id = unquote(key, errors="strict")
        check_id(object_id)
        if _quoted(object_id) != key:
            raise ValueError("the key is not an encoded id")
        index_row = json.loads(row)
        kind, types = index_row["kind"], index_row["types"]
    except (ValueError, LookupError, TypeError) as error:
        raise StateDamaged("damaged index row", where=key, got=str(error)[:200]) from error
    if type(kind) is not str or type(types) is not list or not all(type(name) is str for name in types):
        raise StateDamaged("damaged index row", where=key, got=repr(row[:100]))
    return object_id, _Stored(kind, tuple(types), row)

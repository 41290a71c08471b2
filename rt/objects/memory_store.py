"""A store in memory: for tests, and for state that the process does not need to keep."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping

from rt.errors import Closed
from rt.objects.claims import Claims, TreeClaim, is_in_tree
from rt.objects.core.errors import OutOfTurn
from rt.objects.core.store import CheckpointKind, checked_kind

_Content = dict[str, dict[str, bytes]]


class MemoryStore:
    """Rows in dictionaries. A commit replaces the categories that it changed.

    `content`: initial rows, by category and key. They are copied.
    """

    def __init__(self, content: Mapping[str, Mapping[str, bytes]] | None = None) -> None:
        self.store_id = uuid.uuid4().hex
        self._content: _Content = {category: dict(rows) for category, rows in (content or {}).items() if rows}
        self._writer: MemoryWriter | None = None
        self._claims = Claims("memory")
        self._is_closed = False

    def content(self) -> dict[str, dict[str, bytes]]:
        return {category: dict(rows) for category, rows in self._content.items()}

    def reader(self) -> MemoryReader:
        """A reader that sees every later commit."""
        self._require_open()
        return MemoryReader(self)

    def begin(self, kind: CheckpointKind) -> MemoryWriter:
        self._require_open()
        if self._writer is not None:
            raise OutOfTurn("another writer is open", hint="Commit it or roll it back first.")
        self._writer = MemoryWriter(self, checked_kind(kind))
        return self._writer

    def claim(self, root: str) -> TreeClaim:
        self._require_open()
        return self._claims.claim(root)

    def close(self) -> None:
        """Roll back an open writer. The rows stay readable through `content`."""
        if self._writer is not None:
            self._writer.rollback()
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed("the store is closed", hint="Make another store.")


class MemoryReader:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def store_id(self) -> str:
        return self._store.store_id

    @property
    def owners(self) -> Claims:
        return self._store._claims

    def categories(self, prefix: str = "") -> Iterator[str]:
        self._store._require_open()
        return iter(sorted(each for each in self._store._content if each.startswith(prefix)))

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """The rows of the last commit at the time of the call; later commits do not change them."""
        self._store._require_open()
        return iter(self._store._content.get(category, {}).items())

    def get(self, category: str, key: str) -> bytes | None:
        self._store._require_open()
        return self._store._content.get(category, {}).get(key)


class MemoryWriter:
    """A commit that is not made yet: the changed categories as they will be."""

    def __init__(self, store: MemoryStore, kind: CheckpointKind) -> None:
        self._store = store
        self._kind = kind
        self._touched: _Content = {}

    @property
    def kind(self) -> CheckpointKind:
        return self._kind

    @property
    def store_id(self) -> str:
        return self._store.store_id

    def reader(self) -> MemoryReader:
        return self._store.reader()

    def put(self, category: str, key: str, data: bytes) -> None:
        self._category(category)[key] = data

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        with self._rollback_on_error():
            self._category(category).update(rows)

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        with self._rollback_on_error():
            held = self._category(category)
            for key in keys:
                held.pop(key, None)

    def clear(self, category: str) -> None:
        self._require_current()
        self._touched[category] = {}

    def clear_tree(self, root: str) -> None:
        self._require_current()
        for category in [*self._store._content, *self._touched]:
            if is_in_tree(category, root):
                self._touched[category] = {}

    def commit(self) -> None:
        self._require_current()
        content = {**self._store._content, **self._touched}
        self._store._content = {category: rows for category, rows in content.items() if rows}
        self._store._writer = None

    def rollback(self) -> None:
        if self._store._writer is self:
            self._store._writer = None

    def _category(self, category: str) -> dict[str, bytes]:
        self._require_current()
        if category not in self._touched:
            self._touched[category] = dict(self._store._content.get(category, {}))
        return self._touched[category]

    def _require_current(self) -> None:
        if self._store._writer is not self:
            raise OutOfTurn("the writer was committed or rolled back", hint="Begin another one.")

    @contextlib.contextmanager
    def _rollback_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.rollback()
            raise

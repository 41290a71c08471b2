"""Reading and writing the rows of an `SqliteStore`, and their checksums.

A row's checksum is the CRC-32C of its value, begun with that of its category and key: elsewhere it is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rt.log.checksum import crc32c
from rt.objects.errors import OutOfTurn
from rt.objects.storing import CheckpointKind

if TYPE_CHECKING:
    from rt.objects.sqlite_store import SqliteStore

_READ_AT_ONCE: Final = 4096
_WRITE_AT_ONCE: Final = 4096
_PUT: Final = "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)"
_DELETE: Final = "DELETE FROM rows WHERE category = ? AND key = ?"


class SqliteReader:
    """Reads what is committed."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    @property
    def store_id(self) -> str:
        """The store's."""
        return self._store.store_id

    def categories(self, prefix: str = "") -> Iterator[str]:
        """One look into the tree for each."""
        found = self._all("SELECT category FROM rows WHERE category >= ? ORDER BY category LIMIT 1", prefix)
        while found and (category := str(found[0][0])).startswith(prefix):
            yield category
            found = self._all(
                "SELECT category FROM rows WHERE category > ? ORDER BY category LIMIT 1", category
            )

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Some thousands at a time, all of one commit if none is made meanwhile; each verified."""
        begin = category_checksum(category)
        columns = "SELECT key, value, checksum FROM rows WHERE category = ?"
        end = "ORDER BY key LIMIT ?"
        found = self._all(f"{columns} {end}", category, _READ_AT_ONCE)
        while found:
            for key, value, checksum in found:
                self._store._verify(category, key, value, checksum, begin)
                yield key, value
            if len(found) < _READ_AT_ONCE:
                return
            found = self._all(f"{columns} AND key > ? {end}", category, found[-1][0], _READ_AT_ONCE)

    def get(self, category: str, key: str) -> bytes | None:
        """One row."""
        found = self._all("SELECT value, checksum FROM rows WHERE category = ? AND key = ?", category, key)
        if not found:
            return None
        value, checksum = found[0]
        self._store._verify(category, key, value, checksum, category_checksum(category))
        return bytes(value)

    def _all(self, statement: str, *values: object) -> list[Any]:
        store = self._store
        store._require_usable()
        with store._reading, store._errors("reading"):
            return store._read_connection.execute(statement, values).fetchall()


class SqliteWriter:
    """A commit in the making: a transaction of SQLite's, with what was put last still in memory."""

    def __init__(self, store: SqliteStore, kind: CheckpointKind) -> None:
        self._store = store
        self._kind = kind
        self._waiting: list[tuple[str, str, bytes, int]] = []
        store._writer = self
        if kind is CheckpointKind.FULL:
            self._run("DELETE FROM rows")

    @property
    def kind(self) -> CheckpointKind:
        """Full or differential."""
        return self._kind

    @property
    def store_id(self) -> str:
        """The store's."""
        return self._store.store_id

    def put(self, category: str, key: str, data: bytes) -> None:
        """Write a row."""
        self._require_current()
        self._waiting.append((category, key, data, row_checksum(category_checksum(category), key, data)))
        if len(self._waiting) >= _WRITE_AT_ONCE:
            self._flush()

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        """Write rows."""
        self._require_current()
        begin = category_checksum(category)
        waiting = self._waiting
        try:
            for key, data in rows:
                waiting.append((category, key, data, row_checksum(begin, key, data)))
                if len(waiting) >= _WRITE_AT_ONCE:
                    self._flush()
        except BaseException:
            self.rollback()
            raise

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        """Take rows away."""
        self._require_current()
        try:
            gone = [(category, key) for key in keys]
        except BaseException:
            self.rollback()
            raise
        self._flush()
        self._run(_DELETE, gone)

    def clear(self, category: str) -> None:
        """Take a category away."""
        self._require_current()
        self._flush()
        self._run("DELETE FROM rows WHERE category = ?", [(category,)])

    def commit(self) -> None:
        """Commit and sync."""
        self._require_current()
        self._flush()
        self._store._writer = None
        self._store._commit()

    def rollback(self) -> None:
        """Forget it."""
        if self._store._writer is self:
            self._store._writer = None
            self._waiting.clear()
            if not self._store._is_closed and os.getpid() == self._store._pid:
                self._store._roll_back()

    def __enter__(self) -> SqliteWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollback()

    def _flush(self) -> None:
        if self._waiting:
            self._run(_PUT, self._waiting)
            self._waiting.clear()

    def _run(self, statement: str, many: Sequence[tuple[str | bytes | int, ...]] | None = None) -> None:
        connection = self._store._write_connection
        try:
            with self._store._errors("writing"):
                if many is None:
                    connection.execute(statement)
                else:
                    connection.executemany(statement, many)
        except BaseException:
            self.rollback()
            raise

    def _require_current(self) -> None:
        self._store._require_usable()
        if self._store._writer is not self:
            raise OutOfTurn("the writer is spent", hint="Begin another one.")


def category_checksum(category: str) -> int:
    """What the checksums of a category's rows begin with."""
    return crc32c(f"{category}\0".encode())


def row_checksum(begin: int, key: str, value: bytes) -> int:
    """Of the value, begun with that of category and key."""
    return crc32c(value, crc32c(f"{key}\0".encode(), begin))

"""A store in an SQLite file: write-ahead log, a sync at every commit, checked when opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rt.objects.core.errors import OutOfTurn
from rt.objects.core.store import CheckpointKind
from rt.objects.sqlite_database import SqliteDatabase, category_checksum, row_checksum
from rt.option_checks import check_path

_READ_AT_ONCE: Final = 4096
_WRITE_AT_ONCE: Final = 4096


class SqliteStore:
    """The rows in the file `path`. The file is created if missing; its directory must exist.

    `check` verifies every row when the store is opened (a few seconds for a million rows). Without it rows
    are verified when they are read, and a row with a damaged key only seems to be missing. Raises
    `rt.DirectoryLocked` if another process has the store open, `StateDamaged`, `rt.UnknownVersion`,
    `rt.FormatError` for a file that is not a store, `rt.StorageError` if there is no such directory or the
    disk fails.

    Any thread may use readers; one thread at a time may use the writer. A forked child must not use the
    store.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = True) -> None:
        self.path: Final = os.path.abspath(check_path(path))
        self._database = SqliteDatabase(self.path, check=check)
        self.store_id: Final = self._database.store_id
        self._writer: SqliteWriter | None = None

    def reader(self) -> SqliteReader:
        """A reader that sees every later commit."""
        self._database.require_usable()
        return SqliteReader(self._database)

    def begin(self, kind: CheckpointKind) -> SqliteWriter:
        self._database.require_usable()
        if self._writer is not None and self._writer.is_open:
            raise OutOfTurn("another writer is open", hint="Commit it or roll it back first.")
        self._writer = SqliteWriter(self._database, kind)
        return self._writer

    def close(self) -> None:
        """Roll back an open writer and release the file. A forked child releases nothing."""
        self._database.close()

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SqliteReader:
    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    @property
    def store_id(self) -> str:
        return self._database.store_id

    def categories(self, prefix: str = "") -> Iterator[str]:
        """One index lookup for each category."""
        read = self._database.read
        found = read("SELECT category FROM rows WHERE category >= ? ORDER BY category LIMIT 1", prefix)
        while found and (category := str(found[0][0])).startswith(prefix):
            yield category
            found = read("SELECT category FROM rows WHERE category > ? ORDER BY category LIMIT 1", category)

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Reads some thousand rows at a time, each verified. A commit meanwhile may be seen in part."""
        read, verify, seed = self._database.read, self._database.verify, category_checksum(category)
        columns, end = "SELECT key, value, checksum FROM rows WHERE category = ?", "ORDER BY key LIMIT ?"
        found = read(f"{columns} {end}", category, _READ_AT_ONCE)
        while found:
            for key, value, checksum in found:
                verify(category, key, value, checksum, seed)
                yield key, value
            if len(found) < _READ_AT_ONCE:
                return
            found = read(f"{columns} AND key > ? {end}", category, found[-1][0], _READ_AT_ONCE)

    def get(self, category: str, key: str) -> bytes | None:
        found = self._database.read(
            "SELECT value, checksum FROM rows WHERE category = ? AND key = ?", category, key
        )
        if not found:
            return None
        value, checksum = found[0]
        self._database.verify(category, key, value, checksum, category_checksum(category))
        return bytes(value)


class SqliteWriter:
    """An SQLite transaction, with the last rows still in memory."""

    def __init__(self, database: SqliteDatabase, kind: CheckpointKind) -> None:
        self._database = database
        self._kind = kind
        self._waiting: list[tuple[str, str, bytes, int]] = []
        database.begin()
        self.is_open = True
        if kind is CheckpointKind.FULL:
            self._run("DELETE FROM rows", [()])

    @property
    def kind(self) -> CheckpointKind:
        return self._kind

    @property
    def store_id(self) -> str:
        return self._database.store_id

    def put(self, category: str, key: str, data: bytes) -> None:
        self.put_many(category, [(key, data)])

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        self._require_current()
        seed = category_checksum(category)
        waiting = self._waiting
        try:
            for key, data in rows:
                waiting.append((category, key, data, row_checksum(seed, key, data)))
                if len(waiting) >= _WRITE_AT_ONCE:
                    self._flush()
        except BaseException:
            self.rollback()
            raise

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        self._require_current()
        try:
            deleted = [(category, key) for key in keys]
        except BaseException:
            self.rollback()
            raise
        self._flush()
        self._run("DELETE FROM rows WHERE category = ? AND key = ?", deleted)

    def clear(self, category: str) -> None:
        self._require_current()
        self._flush()
        self._run("DELETE FROM rows WHERE category = ?", [(category,)])

    def commit(self) -> None:
        self._require_current()
        self._flush()
        self.is_open = False
        self._database.commit()

    def rollback(self) -> None:
        if self.is_open:
            self.is_open = False
            self._waiting.clear()
            self._database.roll_back()

    def _flush(self) -> None:
        if self._waiting:
            self._run("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", self._waiting)
            self._waiting.clear()

    def _run(self, statement: str, many: Sequence[tuple[str | bytes | int, ...]]) -> None:
        try:
            self._database.write(statement, many)
        except BaseException:
            self.rollback()
            raise

    def _require_current(self) -> None:
        self._database.require_usable()
        if not self.is_open:
            raise OutOfTurn("the writer was committed or rolled back", hint="Begin another one.")

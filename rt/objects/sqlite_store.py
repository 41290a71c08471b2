"""A store in an SQLite file: write-ahead log, a sync at every commit, checked when opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rt.objects.claims import Claims, TreeClaim
from rt.objects.core.errors import NotSerializable, OutOfTurn, StateDamaged
from rt.objects.core.store import CheckpointKind, category_checksum, checked_kind, row_checksum
from rt.objects.sqlite_database import Fence, SqliteDatabase, resolve
from rt.objects.sqlite_file import RESTORE, verify
from rt.option_checks import check_path

_READ_AT_ONCE: Final = 4096
_WRITE_AT_ONCE: Final = 4096
VALUE_BYTES_MAX: Final = 900 * 2**20
"""SQLite takes no row of 10^9 bytes or more."""


class SqliteStore:
    """The rows in the file `path`. The file is created if missing; its directory must exist.

    `check` verifies every row when the store is opened (a few seconds for a million rows). Without it rows
    are verified when they are read, and a row with a damaged key only seems to be missing. Raises
    `rt.DirectoryLocked` if another process has the store open, `StateDamaged`, `rt.UnknownVersion`,
    `rt.FormatError` for a file that is not a store, `rt.StorageError` if there is no such directory or the
    disk fails.

    With a `fence`, each commit is refused after a later owner has come (`rt.objects.fenced_files`).

    Any thread may use readers; one thread at a time may use the writer. A forked child must not use the
    store.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, check: bool = True, fence: Fence | None = None
    ) -> None:
        self.path: Final = resolve(check_path(path))
        self._database = SqliteDatabase(self.path, check=check, fence=fence)
        self.store_id: Final = self._database.store_id
        self._writer: SqliteWriter | None = None
        self._claims: Final = Claims(self.path)

    def reader(self) -> SqliteReader:
        """A reader that sees every later commit."""
        self._database.require_usable()
        return SqliteReader(self._database, self._claims)

    def begin(self, kind: CheckpointKind) -> SqliteWriter:
        self._database.require_usable()
        if self._writer is not None and self._writer.is_open:
            raise OutOfTurn("another writer is open", hint="Commit it or roll it back first.")
        self._writer = SqliteWriter(self._database, self._claims, checked_kind(kind))
        return self._writer

    def claim(self, root: str) -> TreeClaim:
        self._database.require_usable()
        return self._claims.claim(root)

    def close(self) -> None:
        """Roll back an open writer and release the file. A forked child releases nothing."""
        self._database.close()

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SqliteReader:
    def __init__(self, database: SqliteDatabase, owners: Claims) -> None:
        self._database = database
        self._owners = owners

    @property
    def store_id(self) -> str:
        return self._database.store_id

    @property
    def owners(self) -> Claims:
        return self._owners

    def categories(self, prefix: str = "") -> Iterator[str]:
        """One index lookup for each category."""
        read = self._database.read
        found = read("SELECT category FROM rows WHERE category >= ? ORDER BY category LIMIT 1", prefix)
        while found and (category := str(found[0][0])).startswith(prefix):
            yield category
            found = read("SELECT category FROM rows WHERE category > ? ORDER BY category LIMIT 1", category)
            if found:
                self._require_order(category, found[0][0], category)

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Read some thousand rows at a time, and verify each. A commit in between may be visible in part."""
        read, path, seed = self._database.read, self._database.path, category_checksum(category)
        last = None
        columns, end = "SELECT key, value, checksum FROM rows WHERE category = ?", "ORDER BY key LIMIT ?"
        found = read(f"{columns} {end}", category, _READ_AT_ONCE)
        while found:
            for key, value, checksum in found:
                verify(path, category, key, value, checksum, seed)
                if last is not None and key <= last:
                    self._require_order(last, key, category)
                last = key
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
        verify(self._database.path, category, key, value, checksum, category_checksum(category))
        return bytes(value)

    def _require_order(self, last: str, found: object, category: str) -> None:
        """Check the order. A corrupt page may lead back to earlier rows, so that reading never ends."""
        if not isinstance(found, str) or found <= last:
            where = f"{self._database.path}, {category}"
            raise StateDamaged("wrong order of rows", where=where, got=repr(found)[:100], hint=RESTORE)


class SqliteWriter:
    """An SQLite transaction, with the last rows still in memory."""

    def __init__(self, database: SqliteDatabase, owners: Claims, kind: CheckpointKind) -> None:
        self._database = database
        self._owners = owners
        self._kind = kind
        self._waiting: list[tuple[str, str, bytes, int]] = []
        database.begin()
        self.is_open = True

    @property
    def kind(self) -> CheckpointKind:
        return self._kind

    @property
    def store_id(self) -> str:
        return self._database.store_id

    def reader(self) -> SqliteReader:
        return SqliteReader(self._database, self._owners)

    def put(self, category: str, key: str, data: bytes) -> None:
        self.put_many(category, [(key, data)])

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        self._require_current()
        seed = category_checksum(category)
        waiting = self._waiting
        try:
            for key, data in rows:
                if len(data) > VALUE_BYTES_MAX:
                    raise _too_large(data)
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

    def clear_tree(self, root: str) -> None:
        self._require_current()
        self._flush()
        low, high = f"{root}/", f"{root}0"  # "0" is the character after "/"
        if not self._holds_outside(root, low, high):
            self._run("DELETE FROM rows", [()])  # SQLite drops whole pages then.
            return
        self._run("DELETE FROM rows WHERE category = ?", [(root,)])
        self._run("DELETE FROM rows WHERE category >= ? AND category < ?", [(low, high)])

    def _holds_outside(self, root: str, low: str, high: str) -> bool:
        """Whether there are rows outside `root` and outside the categories from `low` to `high`."""
        holds = self._database.holds
        try:
            return (
                holds("SELECT 1 FROM rows WHERE category < ? LIMIT 1", root)
                or holds("SELECT 1 FROM rows WHERE category > ? AND category < ? LIMIT 1", root, low)
                or holds("SELECT 1 FROM rows WHERE category >= ? LIMIT 1", high)
            )
        except BaseException:
            self.rollback()
            raise

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


def _too_large(data: bytes) -> NotSerializable:
    return NotSerializable(
        "the value is too large for a store in a file",
        got=f"{len(data)} bytes as it is stored",
        expected=f"at most {VALUE_BYTES_MAX}",
        hint="Nothing was saved. Store it in parts, such as the elements of a list.",
    )

"""The content of a store's SQLite file: tables, checksums, and SQLite's errors as rt's.

Table `rows` (category, key, value, checksum). The checksum (`row_checksum`) is there because SQLite does not
detect a flipped bit in a value. Table `information` has one row, see `SqliteInformation`. `application_id`
marks the file as rt's; `user_version` is the format's version.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct

from rt.errors import (
    DirectoryLocked,
    DiskFull,
    FormatError,
    RtError,
    StorageError,
    StorageFailed,
    UnknownVersion,
)
from rt.log.format.checksum import crc32c
from rt.objects.core.errors import StateDamaged
from rt.objects.core.store import category_checksum, row_checksum

APPLICATION_ID: Final = 0x72744F53
"""`rtOS`, in the file's header."""
VERSION: Final = 2
_PATH_BYTES_MAX: Final = 504
"""SQLite does not open a path that is longer."""
_NAME_BYTES_MAX: Final = 240
"""Leaves room for the names of the files beside it, which have at most 255 bytes."""
BUSY_S: Final = 5.0
"""How long to wait for a lock of another process."""
RESTORE: Final = "Restore the store from a backup (`rt store backup`). It was not changed."
SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""The errors that sqlite3 raises, also for corrupt text."""

_SCHEMA: Final = (
    """CREATE TABLE information (store_id TEXT NOT NULL, number INTEGER NOT NULL, base INTEGER NOT NULL,
       is_complete INTEGER NOT NULL, checksum INTEGER NOT NULL)""",
    """CREATE TABLE rows (category TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
       checksum INTEGER NOT NULL, PRIMARY KEY (category, key)) WITHOUT ROWID""",
)


class SqliteInformation(Struct, frozen=True):
    """The row of the table `information`. Every commit that changes rows writes it."""

    store_id: str
    number: int
    """The number of the commit; 0 in a new store."""
    base: int
    """The commit that the file had when its write-ahead log was last emptied."""
    is_complete: bool
    """Whether the file needs no other file: a backup, or a store that is being created."""

    def columns(self) -> tuple[str, int, int, int, int]:
        values = self.store_id, self.number, self.base, int(self.is_complete)
        return *values, crc32c(repr(values).encode())


def require_short_path(path: str) -> None:
    """`StorageError` if the path is too long for SQLite, or a name beside it for the file system."""
    for what, name, most in (
        ("path", path, _PATH_BYTES_MAX),
        ("name", os.path.basename(path), _NAME_BYTES_MAX),
    ):
        if (size := len(os.fsencode(name))) > most:
            raise StorageError(
                f"the {what} of the object store is too long",
                where=path,
                got=f"{size} bytes",
                expected=f"at most {most} bytes",
                hint=f"Choose a shorter {what}.",
            )


def create(connection: sqlite3.Connection, store_id: str) -> None:
    """Make the tables of a new store, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    made = SqliteInformation(store_id, number=0, base=0, is_complete=True)
    connection.execute("INSERT INTO information VALUES (?, ?, ?, ?, ?)", made.columns())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def write_information(connection: sqlite3.Connection, information: SqliteInformation) -> None:
    connection.execute(
        "UPDATE information SET store_id = ?, number = ?, base = ?, is_complete = ?, checksum = ?",
        information.columns(),
    )


def is_new(connection: sqlite3.Connection) -> bool:
    """Whether the file has no content yet."""
    return (
        _first(connection, "PRAGMA application_id") == 0
        and _first(connection, "SELECT 1 FROM sqlite_master LIMIT 1") is None
    )


def require_format(connection: sqlite3.Connection, path: str) -> None:
    """`rt.FormatError` or `rt.UnknownVersion` unless this is a store of this version."""
    if (application_id := _first(connection, "PRAGMA application_id")) != APPLICATION_ID:
        raise FormatError(
            "not an object store",
            where=path,
            got=hex(application_id),
            expected=hex(APPLICATION_ID),
            hint="Choose another path for the store.",
        )
    if (version := _first(connection, "PRAGMA user_version")) != VERSION:
        raise UnknownVersion(
            "the object store has an unknown version",
            where=path,
            got=version,
            expected=VERSION,
            hint="Use a newer rt." if version > VERSION else "Create the store again.",
        )


def read_information(connection: sqlite3.Connection, path: str) -> SqliteInformation:
    """The row of the last commit; `StateDamaged` if it is missing or corrupt."""
    found = connection.execute("SELECT * FROM information").fetchall()
    if len(found) == 1 and all(type(each) is kind for each, kind in zip(found[0], _COLUMNS, strict=True)):
        store_id, number, base, is_complete, checksum = found[0]
        information = SqliteInformation(store_id, number, base, bool(is_complete))
        if information.columns()[-1] == checksum:
            return information
    raise StateDamaged("the table `information` is damaged", where=path, hint=RESTORE)


_COLUMNS: Final = (str, int, int, int, int)


def check_all(connection: sqlite3.Connection, path: str) -> tuple[int, int]:
    """Verify the structure and every row. A corrupt key is detected only here.

    Returns the number of rows and of categories.
    """
    if (result := _first(connection, "PRAGMA integrity_check(1)")) != "ok":
        raise StateDamaged("the store is damaged", where=path, got=result[:200], hint=RESTORE)
    before, seed, rows, categories = None, 0, 0, 0
    for category, key, value, checksum in connection.execute("SELECT * FROM rows"):
        if category != before:
            before, seed = category, category_checksum(str(category))
            categories += 1
        verify(path, category, key, value, checksum, seed)
        rows += 1
    return rows, categories


def verify(path: str, category: object, key: object, value: object, checksum: object, seed: int) -> None:
    """`StateDamaged` unless the row has this checksum. `seed` is the category's."""
    if not isinstance(key, str) or not isinstance(value, bytes) or row_checksum(seed, key, value) != checksum:
        where = f"{path}, {category}, {str(key)[:100]}"
        raise StateDamaged("wrong checksum of a row", where=where, hint=RESTORE)


def connect(path: str, mode: str = "") -> sqlite3.Connection:
    """A connection. `mode`: "mode=ro" reads only, "immutable=1" also ignores the write-ahead log."""
    place = f"file://{quote(os.fsencode(path))}?{mode}" if mode else path
    connection = sqlite3.connect(
        place,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=32,
        uri=bool(mode),
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _first(connection: sqlite3.Connection, statement: str) -> Any:
    """The first column of the first row; None if there is no row."""
    row = connection.execute(statement).fetchone()
    return None if row is None else row[0]


# Errors


@contextlib.contextmanager
def sqlite_errors(path: str, doing: str) -> Iterator[None]:
    """Raise SQLite's errors as rt's."""
    try:
        yield
    except SQLITE_ERRORS as error:
        raise translate(error, path, doing) from error


def translate(error: Exception, path: str, doing: str) -> RtError:
    code = getattr(error, "sqlite_errorcode", None)
    got = f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"
    if isinstance(error, UnicodeDecodeError) or "Could not decode" in str(error):
        return StateDamaged(f"damage found while {doing}", where=path, got=got, hint=RESTORE)
    match code and code & 0xFF:
        case sqlite3.SQLITE_FULL:
            hint = "Free space. Committed data is safe."
            return DiskFull(f"disk full while {doing}", where=path, got=got, hint=hint)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StateDamaged(f"damage found while {doing}", where=path, got=got, hint=RESTORE)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            hint = "Another program has the file open. A store has one writer."
            return DirectoryLocked(f"file locked while {doing}", where=path, got=got, hint=hint)
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            hint = (
                "Give the user of this process the right to the files, and SQLite a writable directory with"
                " free space."
            )
            return StorageFailed(f"no access while {doing}", where=path, got=got, hint=hint)
    hint = "Repair the disk, or free space if it is full, then open the store again. Committed data is safe."
    return StorageFailed(f"the disk failed while {doing}", where=path, got=got, hint=hint)

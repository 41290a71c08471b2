"""Whether the files of a store belong together: the file, its write-ahead log, the record of the last commit.

Each file may be lost, truncated, corrupt, or replaced by an older copy. SQLite does not detect this: it would
return an earlier commit, or apply a log to a file to which the log does not belong.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from rt.errors import RtError, StorageError, naming_file
from rt.log.disk import storage_errors
from rt.objects.commit_record import LastCommit, decode, read_record, record_path
from rt.objects.core.errors import StateDamaged
from rt.objects.sqlite_file import (
    SQLITE_ERRORS,
    SqliteInformation,
    connect,
    is_new,
    read_information,
    require_format,
    sqlite_errors,
)

_RESTORE: Final = (
    "Put the missing or newer file back, or restore a backup: see `rt store backup --help`. "
    "Nothing was changed."
)


class StoreFiles(Struct, frozen=True):
    """The content of a store's files. None: the file does not exist, or it cannot be read."""

    recovered: SqliteInformation | None
    """The last commit in the file and its write-ahead log. None: the store is new."""
    main: SqliteInformation | None
    """The same without the write-ahead log."""
    record: bytes | None


def require_agreement(path: str, files: StoreFiles) -> None:
    """`StateDamaged` unless the recovered commit is the last one that was reported."""
    found, record = files.recovered, files.record
    with naming_file(record_path(path)):
        last = None if record is None else decode(record)
    if record is not None and last is None:
        raise _damaged("the record of the last commit is damaged", record_path(path))
    if found is None:
        if last is not None:
            raise _damaged("the store's file is missing or empty", path, "no commit", _commit(last))
        return
    if last is None:
        if not found.is_complete:
            what = "the record of the last commit is missing: the store was copied in part"
            raise _damaged(what, record_path(path), _commit(found), "a record of the last commit")
    elif last.store_id != found.store_id:
        raise _damaged("the file and its record are of two stores", path, _commit(found), _commit(last))
    elif found.number < last.number:
        what = "the store has lost commits: it, or its write-ahead log, is damaged, missing or an older copy"
        raise _damaged(what, path, _commit(found), _commit(last))
    elif last.is_torn and found.number == last.number:
        raise _damaged("the record of the last commit is damaged", record_path(path))
    main = files.main
    if main is not None and (
        main.store_id != found.store_id or not found.base <= main.number <= found.number
    ):
        what = "the write-ahead log does not belong to the file: one of them is an older copy"
        expected = f"a file with commit {found.base:,} to {found.number:,} of store {found.store_id}"
        raise _damaged(what, path, _commit(main), expected)


def read_files(path: str) -> StoreFiles:
    """Read the files without changing them. The store may be in use."""
    with storage_errors(path, "reading an object store"):
        record = read_record(path)  # first, because commits may follow
        require_one_name(path)
        if not os.path.exists(path) or os.path.getsize(path) == 0:
            return StoreFiles(None, None, record)
    with sqlite_errors(path, "reading an object store"), open_to_read(path) as connection:
        if is_new(connection):
            return StoreFiles(None, None, record)
        require_format(connection, path)
        found = read_information(connection, path)
        return StoreFiles(found, read_main(path), record)


def read_main(path: str) -> SqliteInformation | None:
    """The last commit in the file without its write-ahead log. None if it cannot be read.

    If a crash happens while the log is copied into the file, the file has any mixture of pages. The log
    repairs it.
    """
    with (
        contextlib.suppress(*SQLITE_ERRORS, RtError),
        contextlib.closing(connect(path, "immutable=1")) as file,
    ):
        return read_information(file, path)
    return None


@contextlib.contextmanager
def open_to_read(path: str) -> Iterator[sqlite3.Connection]:
    """A transaction that reads one commit. The store may be in use, or on a read-only file system."""
    is_writable = os.access(os.path.dirname(path) or ".", os.W_OK)
    mode = "mode=ro" if is_writable or os.path.exists(f"{path}-wal") else "immutable=1"
    with contextlib.closing(connect(path, mode)) as connection:
        connection.execute("BEGIN")
        yield connection


def require_one_name(path: str) -> None:
    """`StorageError` for a directory, or a file with two names.

    Each name would have its own write-ahead log, and would miss the commits of the other name.
    """
    if not os.path.lexists(path):
        return
    found, hint = os.stat(path), "Copy the file instead, and remove the other names."
    if not stat.S_ISREG(found.st_mode):
        raise StorageError("the object store is not a file", where=path, hint="Correct the path.")
    if found.st_nlink > 1:
        what = "the file of the object store has several names (hard links)"
        raise StorageError(what, where=path, got=found.st_nlink, expected=1, hint=hint)


def _commit(of: SqliteInformation | LastCommit) -> str:
    return f"commit {of.number:,} of store {of.store_id}"


def _damaged(what: str, where: str, got: str | None = None, expected: str | None = None) -> StateDamaged:
    return StateDamaged(what, where=where, got=got, expected=expected, hint=_RESTORE)

"""Check a store's file, show what it holds, and copy it, also while a program uses it.

The store is never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import uuid
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from rt.errors import LogNotFound, StorageError, StorageFailed
from rt.log.disk import REAL, storage_errors
from rt.objects.commit_record import read_record, record_path
from rt.objects.core.errors import StateDamaged
from rt.objects.core.store_status import StoreContents, StoreStatus, object_sizes
from rt.objects.sqlite_file import (
    SqliteInformation,
    check_all,
    connect,
    is_new,
    read_information,
    require_format,
    require_short_path,
    sqlite_errors,
    write_information,
)
from rt.objects.sqlite_recovery import (
    StoreFiles,
    open_to_read,
    read_main,
    require_agreement,
    require_one_name,
)

_BESIDE: Final = ("", "-wal", "-commit", "-journal")
"""The suffixes of a store's files, after its path."""


class UnfinishedStore(StateDamaged):
    """A program has not finished creating the store. It has no commit."""


def check_store(path: str | os.PathLike[str]) -> StoreStatus:
    """Verify the last commit of a store: every row, and that its files belong together.

    Raises `StateDamaged`, `rt.FormatError`, `rt.UnknownVersion`, `rt.StorageError`.
    """
    found = os.path.realpath(path)
    with _opened(found) as (connection, information):
        with sqlite_errors(found, "checking an object store"):
            rows, categories = check_all(connection, found)
        return _status(found, information, rows, categories)


def store_contents(path: str | os.PathLike[str]) -> StoreContents:
    """What the last commit of a store holds. Rows are not verified; otherwise like `check_store`."""
    found = os.path.realpath(path)
    with _opened(found) as (connection, information):
        with sqlite_errors(found, "reading an object store"):
            sizes = connection.execute(
                "SELECT category, count(*), sum(length(value)) FROM rows GROUP BY category"
            ).fetchall()
        status = _status(found, information, sum(size[1] for size in sizes), len(sizes))
        return StoreContents(status, object_sizes(sizes))


def back_up_store(
    path: str | os.PathLike[str], to: str | os.PathLike[str], *, accept_loss: bool = False
) -> StoreStatus:
    """Copy the last commit of a store into the new file `to`, verify the copy, and sync it.

    The copy is one file. It is a store with another id. `accept_loss`: copy also a store that lost commits,
    at the commit that can still be read. Raises what `check_store` raises.
    """
    return _copy(os.path.realpath(path), os.path.abspath(to), uuid.uuid4().hex, accept_loss=accept_loss)


def take_over_store(path: str, to: str) -> None:
    """Like `back_up_store`, but the copy keeps the id: from now on, the copy is the store.

    Does not wait for a program that uses the store. `UnfinishedStore` if the store has no commit yet.
    """
    _copy(path, to, None)


def _copy(source: str, target: str, store_id: str | None, *, accept_loss: bool = False) -> StoreStatus:
    """Copy a store. If `store_id` is None, the copy keeps the id of the source."""
    require_short_path(target)
    aside = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.new")
    with contextlib.ExitStack() as undo:
        with storage_errors(target, "making a backup"):
            lock = undo.enter_context(contextlib.closing(REAL.lock(aside)))
            undo.callback(_remove, aside)
            _require_free(target)
            os.truncate(aside, 0)
        connection, _ = undo.enter_context(_opened(source, accept_loss=accept_loss))
        with sqlite_errors(target, "making a backup"), contextlib.closing(connect(aside)) as copy:
            connection.backup(copy)
            status = _finish_copy(copy, target, store_id)
        with storage_errors(target, "making a backup"):
            if not lock.is_linked():
                raise StorageFailed("another program removed the file of the backup", where=aside)
            with contextlib.closing(REAL.open(aside, write=True)) as file:
                file.sync()
            REAL.rename(aside, target)
            REAL.sync_directory(os.path.dirname(target))
    return status


def _finish_copy(copy: sqlite3.Connection, target: str, store_id: str | None) -> StoreStatus:
    """Make the copy one file that needs no record, and verify it."""
    copy.execute("PRAGMA synchronous = FULL")
    copy.execute("PRAGMA journal_mode = DELETE")
    found = read_information(copy, target)
    made = replace(found, store_id=store_id or found.store_id, base=found.number, is_complete=True)
    write_information(copy, made)
    rows, categories = check_all(copy, target)
    return StoreStatus(target, made.store_id, made.number, rows, categories, False, True)


def _remove(aside: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)


def _require_free(target: str) -> None:
    for name in _BESIDE:
        if os.path.lexists(target + name):
            raise StorageError(
                "a file is in the place of the backup",
                where=target + name,
                hint="Choose another name, or move the files of the old store away.",
            )


@contextlib.contextmanager
def _opened(
    path: str, *, accept_loss: bool = False
) -> Iterator[tuple[sqlite3.Connection, SqliteInformation]]:
    """A connection that reads one commit: the last one that was reported."""
    with storage_errors(path, "reading an object store"):
        record = read_record(path)  # first, because commits may follow
        require_one_name(path)
        if not os.path.exists(path) and record is None:
            raise LogNotFound("no such object store", where=path, hint="Correct the path.")
        is_empty = not os.path.exists(path) or os.path.getsize(path) == 0
        if is_empty:
            require_agreement(path, StoreFiles(None, None, record))
            raise _unfinished(path)
        if record is None and _has_only_journal(path):
            what = "a program has not finished opening the store for the first time"
            hint = "Nothing is lost. Start the program again: it opens the store, or creates it."
            raise UnfinishedStore(what, where=path, hint=hint)
    with sqlite_errors(path, "reading an object store"), open_to_read(path) as connection:
        if is_new(connection):
            require_agreement(path, StoreFiles(None, None, record))
            raise _unfinished(path)
        require_format(connection, path)
        information = read_information(connection, path)
        if not accept_loss:
            require_agreement(path, StoreFiles(information, read_main(path), record))
        yield connection, information


def _has_only_journal(path: str) -> bool:
    """Whether a crash happened before the file had a write-ahead log."""
    return os.path.exists(f"{path}-journal") and not os.path.exists(f"{path}-wal")


def _unfinished(path: str) -> UnfinishedStore:
    hint = "Start the program again: it creates the store."
    return UnfinishedStore(
        "the store is empty: a program has not finished creating it", where=path, hint=hint
    )


def _status(path: str, information: SqliteInformation, rows: int, categories: int) -> StoreStatus:
    return StoreStatus(
        path,
        information.store_id,
        information.number,
        rows,
        categories,
        is_in_use=_is_locked(path),
        is_complete=information.is_complete and not os.path.exists(record_path(path)),
    )


def _is_locked(path: str) -> bool:
    """Whether a program holds the store's lock. Takes a shared lock, and releases it at once."""
    try:
        fd = os.open(f"{path}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

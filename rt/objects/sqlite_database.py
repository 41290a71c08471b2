"""The SQLite file of a store: opened, recovered, checked; one transaction at a time; SQLite's errors as rt's.

Table `rows` (category, key, value, checksum). The checksum is the CRC-32C of category, NUL, key, NUL, value,
because SQLite does not detect a flipped bit in a value. A row in the wrong place fails too. Table
`information` has the store's id. `application_id` marks the file as rt's; `user_version` is the format's
version.

Invariants:
- One process writes: it holds the lock file beside the database.
- When `commit` returns, the commit is on disk.
- After a failed write or sync the database is dead, because the system reports a failed fsync only once.
- Opening copies the write-ahead log into the file again before anything is read or written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rt.errors import (
    Closed,
    DirectoryLocked,
    DiskFull,
    FormatError,
    RtError,
    StorageError,
    StorageFailed,
    UnknownVersion,
)
from rt.log.disk import REAL, storage_errors
from rt.log.format.checksum import crc32c
from rt.objects.core.errors import CommitUnknown, StateDamaged

APPLICATION_ID: Final = 0x72744F53
"""`rtOS`, in the file's header."""
VERSION: Final = 1
WAL_BYTES_MAX: Final = 8 * 2**20
"""Size of the write-ahead log above which a commit copies it into the file."""

_BUSY_S: Final = 5.0
_SCHEMA: Final = (
    "CREATE TABLE information (store_id TEXT NOT NULL)",
    """CREATE TABLE rows (category TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
       checksum INTEGER NOT NULL, PRIMARY KEY (category, key)) WITHOUT ROWID""",
)
_RESTORE: Final = "Restore the file from a backup. It was not changed."


def _require_directory(directory: str) -> None:
    """A directory made for a mistyped path would hold an empty store, which looks like lost state."""
    if not os.path.isdir(directory):
        raise StorageError(
            "the directory of the object store does not exist",
            where=directory,
            hint="Correct the path of the store, or create the directory.",
        )


class SqliteDatabase:
    """The rows in the file `path`. Any thread may read; one thread at a time may use the rest."""

    def __init__(self, path: str, *, check: bool) -> None:
        self.path: Final = path
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self._failure: RtError | None = None
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            with storage_errors(path, "opening an object store"):
                _require_directory(os.path.dirname(path))
                lock = REAL.lock(f"{path}.lock")
                undo.callback(lock.close)
                self._sync_files()
            with self._errors("opening an object store"):
                self._write_connection = undo.enter_context(contextlib.closing(self._connect()))
                self.store_id: Final = self._open(check=check)
                self._read_connection = undo.enter_context(contextlib.closing(self._connect()))
                self._read_connection.execute("PRAGMA query_only = ON")
            with storage_errors(path, "syncing the directory of an object store"):
                REAL.sync_directory(os.path.dirname(path))
            self._resources = undo.pop_all()

    def close(self) -> None:
        """End the transaction and release the file. A forked child releases nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # Closing here would drop the parent's locks.
        with self._reading, contextlib.suppress(sqlite3.Error):
            self._resources.close()

    def require_usable(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise Closed("the store is closed, or was opened by the parent process", where=self.path)
        if self._failure is not None:
            raise StorageFailed(
                "the store failed earlier", where=self.path, got=self._failure, hint="Open it again."
            ) from self._failure

    # Opening

    def _sync_files(self) -> None:
        """Sync the files of the process before.

        Must run before SQLite opens them: closing a file frees its locks.
        """
        for path in (self.path, f"{self.path}-wal"):
            if REAL.size(path) is not None:
                with contextlib.closing(REAL.open(path, write=True)) as file:
                    file.sync()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        connection.execute("PRAGMA synchronous = FULL")
        # SQLite hides the errors of automatic checkpoints.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA trusted_schema = OFF")
        return connection

    def _open(self, *, check: bool) -> str:
        """Recover and check the file, or create it. Returns the store's id."""
        application_id, version = self._first("PRAGMA application_id"), self._first("PRAGMA user_version")
        is_new = application_id == 0 and self._first("SELECT 1 FROM sqlite_master LIMIT 1") is None
        if not is_new and application_id != APPLICATION_ID:
            raise FormatError(
                "not an object store",
                where=self.path,
                got=hex(application_id),
                expected=hex(APPLICATION_ID),
                hint="Choose another path for the store.",
            )
        if not is_new and version != VERSION:
            raise UnknownVersion(
                "the object store has an unknown version",
                where=self.path,
                got=version,
                expected=VERSION,
                hint="Use a newer rt.",
            )
        if (mode := self._first("PRAGMA journal_mode = WAL")) != "wal":
            hint = "Use a local file system: SQLite needs shared memory."
            raise StorageFailed("no write-ahead log", where=self.path, got=mode, expected="wal", hint=hint)
        self._empty_wal()
        if is_new:
            return self._make()
        if check:
            self._check_all()
        store_id = self._first("SELECT store_id FROM information")
        if not isinstance(store_id, str):
            raise StateDamaged("the id of the store is missing", where=self.path, hint=_RESTORE)
        return store_id

    def _first(self, statement: str) -> Any:
        """The first column of the first row; None if there is no row."""
        row = self._write_connection.execute(statement).fetchone()
        return None if row is None else row[0]

    def _check_all(self) -> None:
        """Verify the structure and every row. A damaged key is found only here."""
        if (result := self._first("PRAGMA integrity_check(1)")) != "ok":
            raise StateDamaged("the store is damaged", where=self.path, got=result[:200], hint=_RESTORE)
        before, seed = None, 0
        for category, key, value, checksum in self._write_connection.execute("SELECT * FROM rows"):
            if category != before:
                before, seed = category, category_checksum(str(category))
            self.verify(category, key, value, checksum, seed)

    def verify(self, category: object, key: object, value: object, checksum: object, seed: int) -> None:
        """`StateDamaged` unless the row has this checksum. `seed` is the category's."""
        if (
            not isinstance(key, str)
            or not isinstance(value, bytes)
            or row_checksum(seed, key, value) != checksum
        ):
            where = f"{self.path}, {category}, {str(key)[:100]}"
            raise StateDamaged("wrong checksum of a row", where=where, hint=_RESTORE)

    def _make(self) -> str:
        store_id = uuid.uuid4().hex
        connection = self._write_connection
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO information VALUES (?)", (store_id,))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
        return store_id

    def _empty_wal(self) -> None:
        """Copy the write-ahead log into the file, sync it, truncate the log. If a reader is active: later."""
        self._write_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    # Reading and writing

    def read(self, statement: str, *values: object) -> list[Any]:
        """What the last commit holds."""
        self.require_usable()
        with self._reading, self._errors("reading"):
            return self._read_connection.execute(statement, values).fetchall()

    def begin(self) -> None:
        self.require_usable()
        with self._errors("starting a commit"):
            self._write_connection.execute("BEGIN IMMEDIATE")

    def write(self, statement: str, many: Sequence[tuple[str | bytes | int, ...]]) -> None:
        """Run the statement in the transaction, once for each of `many`."""
        with self._errors("writing"):
            self._write_connection.executemany(statement, many)

    def commit(self) -> None:
        try:
            self._write_connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._commit_failed(error) from error
        try:
            if os.stat(f"{self.path}-wal").st_size > WAL_BYTES_MAX:
                self._empty_wal()
        except (sqlite3.Error, OSError) as error:
            # This commit is on disk. Later ones must not trust the disk.
            failed = error if isinstance(error, sqlite3.Error) else sqlite3.OperationalError(str(error))
            self._record_failure(self._translate(failed, "copying the write-ahead log into the file"))

    def roll_back(self) -> bool:
        """End the transaction without its changes. Returns False if that failed."""
        try:
            if self._is_closed or os.getpid() != self._pid:
                return False
            if self._write_connection.in_transaction:  # SQLite ends it by itself after some errors.
                self._write_connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._record_failure(self._translate(error, "rolling back"))
            return False
        return True

    def _commit_failed(self, error: sqlite3.Error) -> RtError:
        translated = self._translate(error, "committing")
        if isinstance(translated, DiskFull) and self.roll_back():
            return translated
        self._record_failure(translated)
        return CommitUnknown(
            "the commit failed, and its outcome is unknown",
            where=self.path,
            got=translated.got,
            hint="Call on_save_failed(unknown_outcome=True), then open the store again.",
        )

    # Errors

    def _record_failure(self, error: RtError) -> None:
        if self._failure is None:
            self._failure = error

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Raise SQLite's errors as rt's. A disk error makes the database dead."""
        try:
            yield
        except sqlite3.Error as error:
            translated = self._translate(error, doing)
            if isinstance(translated, StorageFailed):
                self._record_failure(translated)
            raise translated from error

    def _translate(self, error: sqlite3.Error, doing: str) -> RtError:
        code = getattr(error, "sqlite_errorcode", None)
        got = f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"
        match code and code & 0xFF:
            case sqlite3.SQLITE_FULL:
                hint = "Free space. Committed data is safe."
                return DiskFull(f"disk full while {doing}", where=self.path, got=got, hint=hint)
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return StateDamaged(f"damage found while {doing}", where=self.path, got=got, hint=_RESTORE)
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                hint = "Another program has the file open. A store has one writer."
                return DirectoryLocked(f"file locked while {doing}", where=self.path, got=got, hint=hint)
        hint = "Repair the disk, then open the store again. Committed data is safe."
        return StorageFailed(f"the disk failed while {doing}", where=self.path, got=got, hint=hint)


def category_checksum(category: str) -> int:
    """The checksum of a category, with which the checksums of its rows begin."""
    return crc32c(f"{category}\0".encode())


def row_checksum(seed: int, key: str, value: bytes) -> int:
    """The checksum of key and value, continued from the category's."""
    return crc32c(value, crc32c(f"{key}\0".encode(), seed))

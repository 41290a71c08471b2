"""A store in an SQLite file: write-ahead log, a sync at every commit, checked when opened.

Table `rows` (category, key, value, checksum). The checksum is the CRC-32C of category, NUL, key, NUL, value,
because SQLite does not detect a flipped bit in a value. A row in the wrong place fails too. Table
`information` has the store's id. `application_id` marks the file as rt's; `user_version` is the format's
version.

Invariants:
- One process writes: it holds the lock file beside the store.
- When `commit` returns, the commit is on disk.
- After a failed write or sync the store is dead, because the system reports a failed fsync only once.
- Opening copies the write-ahead log into the file again before anything is read or written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from rt.errors import Closed, DirectoryLocked, DiskFull, FormatError, RtError, StorageFailed, UnknownVersion
from rt.log.disk import REAL, storage_errors
from rt.log.format.checksum import crc32c
from rt.objects.core.errors import CommitUnknown, OutOfTurn, StateDamaged
from rt.objects.core.store import CheckpointKind

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
_NOT_OURS: Final = "Choose another path for the store."
_RESTORE: Final = "Restore the file from a backup. It was not changed."


class SqliteStore:
    """The rows in the file `path`. The file and its directory are created if missing.

    `check` verifies every row when the store is opened (a few seconds for a million rows). Without it rows
    are verified when they are read, and a row with a damaged key only seems to be missing. Raises
    `rt.DirectoryLocked` if another process has the store open, `StateDamaged`, `rt.UnknownVersion`,
    `rt.FormatError` for a file that is not a store, `rt.StorageError` if the disk fails.

    Any thread may use readers; one thread at a time may use the writer. A forked child must not use the
    store.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = True) -> None:
        self.path: Final = os.path.abspath(os.fspath(path))
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self._writer: SqliteWriter | None = None
        self._failure: RtError | None = None
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            with storage_errors(self.path, "opening an object store"):
                REAL.make_directory(os.path.dirname(self.path))
                lock = REAL.lock(f"{self.path}.lock")
                undo.callback(lock.close)
                self._sync_files()
            with self._errors("opening an object store"):
                self._write_connection = undo.enter_context(contextlib.closing(self._connect()))
                self.store_id: Final = self._open(check=check)
                self._read_connection = undo.enter_context(contextlib.closing(self._connect()))
                self._read_connection.execute("PRAGMA query_only = ON")
            with storage_errors(self.path, "syncing the directory of an object store"):
                REAL.sync_directory(os.path.dirname(self.path))
            self._resources = undo.pop_all()

    def reader(self) -> SqliteReader:
        """A reader that sees every later commit."""
        self._require_usable()
        return SqliteReader(self)

    def begin(self, kind: CheckpointKind) -> SqliteWriter:
        self._require_usable()
        if self._writer is not None:
            raise OutOfTurn("another writer is open", hint="Commit it or roll it back first.")
        with self._errors("starting a commit"):
            self._write_connection.execute("BEGIN IMMEDIATE")
        return SqliteWriter(self, kind)

    def close(self) -> None:
        """Roll back an open writer and release the file. A forked child releases nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # Closing here would drop the parent's locks.
        with self._reading, contextlib.suppress(sqlite3.Error):
            self._resources.close()

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Opening

    def _sync_files(self) -> None:
        """Sync the files of the process before.

        Must run before SQLite opens them: closing a file frees its locks.
        """
        for path in (self.path, f"{self.path}-wal"):
            if REAL.size(path) is None:
                continue
            file = REAL.open(path, write=True)
            try:
                file.sync()
            finally:
                file.close()

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
        """Recover and check the store, or create it. Returns its id."""
        connection = self._write_connection
        application_id, version = _number(connection, "application_id"), _number(connection, "user_version")
        is_new = (
            application_id == 0 and not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        )
        if not is_new and application_id != APPLICATION_ID:
            raise FormatError(
                "not an object store",
                where=self.path,
                got=hex(application_id),
                expected=hex(APPLICATION_ID),
                hint=_NOT_OURS,
            )
        if not is_new and version != VERSION:
            raise UnknownVersion(
                "the object store has an unknown version",
                where=self.path,
                got=version,
                expected=VERSION,
                hint="Use a newer rt.",
            )
        if (mode := connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]) != "wal":
            hint = "Use a local file system: SQLite needs shared memory."
            raise StorageFailed("no write-ahead log", where=self.path, got=mode, expected="wal", hint=hint)
        self._empty_wal()
        if is_new:
            return self._make()
        if check:
            self._check_all()
        (store_id,) = connection.execute("SELECT store_id FROM information").fetchone() or (None,)
        if not isinstance(store_id, str):
            raise StateDamaged("the id of the store is missing", where=self.path, hint=_RESTORE)
        return store_id

    def _check_all(self) -> None:
        """Verify the structure and every row. A damaged key is found only here."""
        connection = self._write_connection
        if (result := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise StateDamaged("the store is damaged", where=self.path, got=result[:200], hint=_RESTORE)
        before, seed = None, 0
        for category, key, value, checksum in connection.execute("SELECT * FROM rows"):
            if category != before:
                before, seed = category, category_checksum(str(category))
            self._verify(category, key, value, checksum, seed)

    def _verify(self, category: object, key: object, value: object, checksum: object, seed: int) -> None:
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

    # Committing

    def _commit(self) -> None:
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

    def _commit_failed(self, error: sqlite3.Error) -> RtError:
        translated = self._translate(error, "committing")
        if isinstance(translated, DiskFull) and self._roll_back():
            return translated
        self._record_failure(translated)
        return CommitUnknown(
            "the commit failed, and its outcome is unknown",
            where=self.path,
            got=translated.got,
            hint="Call on_save_failed(unknown_outcome=True), then open the store again.",
        )

    def _roll_back(self) -> bool:
        """End the transaction without its changes. Returns False if that failed."""
        try:
            if self._write_connection.in_transaction:  # SQLite ends it by itself after some errors.
                self._write_connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._record_failure(self._translate(error, "rolling back"))
            return False
        return True

    def _record_failure(self, error: RtError) -> None:
        if self._failure is None:
            self._failure = error

    # Errors

    def _require_usable(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise Closed("the store is closed, or was opened by the parent process", where=self.path)
        if self._failure is not None:
            raise StorageFailed(
                "the store failed earlier", where=self.path, got=self._failure, hint="Open it again."
            ) from self._failure

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Raise SQLite's errors as rt's. A disk error makes the store dead."""
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


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (number,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(number)


_READ_AT_ONCE: Final = 4096
_WRITE_AT_ONCE: Final = 4096
_PUT: Final = "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)"
_DELETE: Final = "DELETE FROM rows WHERE category = ? AND key = ?"


class SqliteReader:
    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    @property
    def store_id(self) -> str:
        return self._store.store_id

    def categories(self, prefix: str = "") -> Iterator[str]:
        """One index lookup for each category."""
        found = self._all("SELECT category FROM rows WHERE category >= ? ORDER BY category LIMIT 1", prefix)
        while found and (category := str(found[0][0])).startswith(prefix):
            yield category
            found = self._all(
                "SELECT category FROM rows WHERE category > ? ORDER BY category LIMIT 1", category
            )

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Reads some thousand rows at a time, each verified. A commit meanwhile may be seen in part."""
        seed = category_checksum(category)
        columns = "SELECT key, value, checksum FROM rows WHERE category = ?"
        end = "ORDER BY key LIMIT ?"
        found = self._all(f"{columns} {end}", category, _READ_AT_ONCE)
        while found:
            for key, value, checksum in found:
                self._store._verify(category, key, value, checksum, seed)
                yield key, value
            if len(found) < _READ_AT_ONCE:
                return
            found = self._all(f"{columns} AND key > ? {end}", category, found[-1][0], _READ_AT_ONCE)

    def get(self, category: str, key: str) -> bytes | None:
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
    """An SQLite transaction, with the last rows still in memory."""

    def __init__(self, store: SqliteStore, kind: CheckpointKind) -> None:
        self._store = store
        self._kind = kind
        self._waiting: list[tuple[str, str, bytes, int]] = []
        store._writer = self
        if kind is CheckpointKind.FULL:
            self._run("DELETE FROM rows")

    @property
    def kind(self) -> CheckpointKind:
        return self._kind

    @property
    def store_id(self) -> str:
        return self._store.store_id

    def put(self, category: str, key: str, data: bytes) -> None:
        self._require_current()
        self._waiting.append((category, key, data, row_checksum(category_checksum(category), key, data)))
        if len(self._waiting) >= _WRITE_AT_ONCE:
            self._flush()

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
        self._run(_DELETE, deleted)

    def clear(self, category: str) -> None:
        self._require_current()
        self._flush()
        self._run("DELETE FROM rows WHERE category = ?", [(category,)])

    def commit(self) -> None:
        self._require_current()
        self._flush()
        self._store._writer = None
        self._store._commit()

    def rollback(self) -> None:
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
            raise OutOfTurn("the writer was committed or rolled back", hint="Begin another one.")


def category_checksum(category: str) -> int:
    """The checksum of a category, with which the checksums of its rows begin."""
    return crc32c(f"{category}\0".encode())


def row_checksum(seed: int, key: str, value: bytes) -> int:
    """The checksum of key and value, continued from the category's."""
    return crc32c(value, crc32c(f"{key}\0".encode(), seed))

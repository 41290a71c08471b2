"""The store in an SQLite file: WAL, a sync at every commit, checked when it is opened.

Table `rows` (category, key, value, checksum), where the checksum is the CRC-32C of the value, begun with that
of the category and the key, as SQLite itself does not notice a flipped bit in a value. `information` holds
the store's id. `application_id` says whose file it is, `user_version` of which version.

Laws. One process writes (a lock file beside it). What `commit` returned for is on the medium. After a failed
write or sync the store is dead: SQLite could be asked again, but the system would say that all is well (fsync
tells of a failure once). Opening it copies what the write-ahead log holds into the file, anew, before
anything is read or written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from typing import Final

from rt.errors import Closed, DirectoryLocked, DiskFull, FormatError, RtError, StorageFailed, UnknownVersion
from rt.log.disk import REAL, storage_errors
from rt.objects.errors import CommitUnknown, OutOfTurn, StateDamaged
from rt.objects.sqlite_rows import SqliteReader, SqliteWriter, category_checksum, row_checksum
from rt.objects.storing import CheckpointKind

APPLICATION_ID: Final = 0x72744F53
"""`rtOS` in the file's header: rt's object store."""
VERSION: Final = 1
WAL_BYTES_MAX: Final = 8 * 2**20
"""What the write-ahead log may grow to before a commit copies it into the file."""

_BUSY_S: Final = 5.0
_SCHEMA: Final = (
    "CREATE TABLE information (store_id TEXT NOT NULL)",
    """CREATE TABLE rows (category TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
       checksum INTEGER NOT NULL, PRIMARY KEY (category, key)) WITHOUT ROWID""",
)
_NOT_OURS: Final = "Give it a path of its own."
_RESTORE: Final = "Restore the file from a copy; nothing in it was changed."


class SqliteStore:
    """The rows in the file `path`, made with its directory if missing.

    `check` reads the whole file when it is opened (a few seconds for a million rows), and verifies all of it.
    Without it rows are verified when they are read, and one whose key was damaged is only missing. Raises
    `rt.DirectoryLocked` if another process has it open, `StateDamaged`, `rt.UnknownVersion`, `rt.FormatError`
    for a file of somebody else, `rt.StorageError` where the disk fails.

    Readers may be used by several threads; writers by one at a time. Not to be used in a forked child.
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
        """Sees every commit from the moment it is made."""
        self._require_usable()
        return SqliteReader(self)

    def begin(self, kind: CheckpointKind) -> SqliteWriter:
        """Start a commit."""
        self._require_usable()
        if self._writer is not None:
            raise OutOfTurn("another commit is open", hint="Commit it or roll it back first.")
        with self._errors("beginning a commit"):
            self._write_connection.execute("BEGIN IMMEDIATE")
        return SqliteWriter(self, kind)

    def close(self) -> None:
        """Roll back what is open, and let the file go."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # Closing would take the parent's locks away.
        with self._reading, contextlib.suppress(sqlite3.Error):
            self._resources.close()

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Opening

    def _sync_files(self) -> None:
        """Sync what a process before us left. Before SQLite has it open: closing a file frees its locks."""
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
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # Its errors would be kept from us.
        connection.execute("PRAGMA trusted_schema = OFF")
        return connection

    def _open(self, *, check: bool) -> str:
        """Recover, check, or make; the store's id."""
        connection = self._write_connection
        whose, version = _number(connection, "application_id"), _number(connection, "user_version")
        is_new = whose == 0 and not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if not is_new and whose != APPLICATION_ID:
            raise FormatError(
                "not an object store",
                where=self.path,
                got=hex(whose),
                wanted=hex(APPLICATION_ID),
                hint=_NOT_OURS,
            )
        if not is_new and version != VERSION:
            raise UnknownVersion(
                "an object store of another version",
                where=self.path,
                got=version,
                wanted=VERSION,
                hint="Use a newer rt.",
            )
        if (mode := connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]) != "wal":
            hint = "Use a local file system."
            raise StorageFailed("no write-ahead log there", where=self.path, got=mode, hint=hint)
        self._empty_wal()
        if is_new:
            return self._make()
        if check:
            self._check_all()
        (store_id,) = connection.execute("SELECT store_id FROM information").fetchone() or (None,)
        if not isinstance(store_id, str):
            raise StateDamaged("the store lacks its id", where=self.path, hint=_RESTORE)
        return store_id

    def _check_all(self) -> None:
        """Verify the structure and every row. One whose key is damaged would else only be missing."""
        connection = self._write_connection
        if (said := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise StateDamaged("the store is damaged", where=self.path, got=said[:200], hint=_RESTORE)
        before, begin = None, 0
        for category, key, value, checksum in connection.execute("SELECT * FROM rows"):
            if category != before:
                before, begin = category, category_checksum(str(category))
            self._verify(category, key, value, checksum, begin)

    def _verify(self, category: object, key: object, value: object, checksum: object, begin: int) -> None:
        if (
            not isinstance(key, str)
            or not isinstance(value, bytes)
            or row_checksum(begin, key, value) != checksum
        ):
            where = f"{self.path}, {category}, {str(key)[:100]}"
            raise StateDamaged("a row fails its checksum", where=where, hint=_RESTORE)

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
        """Copy the write-ahead log into the file, sync that, begin anew; if somebody reads, later."""
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
            # This commit is on the medium: only what comes after it must not trust the disk.
            failed = error if isinstance(error, sqlite3.Error) else sqlite3.OperationalError(str(error))
            self._die(self._translated(failed, "copying the write-ahead log into the file"))

    def _commit_failed(self, error: sqlite3.Error) -> RtError:
        translated = self._translated(error, "committing")
        if isinstance(translated, DiskFull) and self._roll_back():
            return translated
        self._die(translated)
        return CommitUnknown(
            "the commit failed half way",
            where=self.path,
            got=translated.got,
            hint="It may have happened: on_save_failed(unknown_outcome=True), then open the store again.",
        )

    def _roll_back(self) -> bool:
        """End the transaction without it; whether that is sure."""
        try:
            if self._write_connection.in_transaction:  # SQLite ends it by itself after some errors.
                self._write_connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._die(self._translated(error, "rolling back"))
            return False
        return True

    def _die(self, error: RtError) -> None:
        if self._failure is None:
            self._failure = error

    # Errors

    def _require_usable(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise Closed("the store is closed, or belongs to the parent of this process", where=self.path)
        if self._failure is not None:
            raise StorageFailed(
                "the store failed before", where=self.path, got=self._failure, hint="Open it again."
            ) from self._failure

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Raise SQLite's errors as ours; the store is dead after one that says the disk failed."""
        try:
            yield
        except sqlite3.Error as error:
            translated = self._translated(error, doing)
            if isinstance(translated, StorageFailed):
                self._die(translated)
            raise translated from error

    def _translated(self, error: sqlite3.Error, doing: str) -> RtError:
        code = getattr(error, "sqlite_errorcode", None)
        got = f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"
        match code and code & 0xFF:
            case sqlite3.SQLITE_FULL:
                hint = "Free space; what was committed is safe."
                return DiskFull(f"disk full while {doing}", where=self.path, got=got, hint=hint)
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return StateDamaged(f"damage found while {doing}", where=self.path, got=got, hint=_RESTORE)
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                hint = "Another program has the file open: one writer a store."
                return DirectoryLocked(f"already in use while {doing}", where=self.path, got=got, hint=hint)
        hint = "Mend the disk, then open it again; what was committed is safe."
        return StorageFailed(f"the disk failed while {doing}", where=self.path, got=got, hint=hint)


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (number,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(number)

"""The SQLite file of a store, open for one process: opened, recovered, checked; one transaction at a time.

Invariants:
- One process writes: it holds the lock file beside the database.
- When `commit` returns, the commit is on disk. The record of the commit is also on disk, written after it.
- A file that lost a reported commit is not opened, and not changed: see `sqlite_recovery`.
- After a failed write or sync the database is unusable, because the system reports a failed fsync only once.
- Opening copies the write-ahead log into the file again before anything is read or written.
- Commits to a file that was removed or replaced meanwhile are not reported as made.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from msgspec.structs import replace

from rt.errors import Closed, DirectoryLocked, DiskFull, RtError, StorageError, StorageFailed
from rt.log.disk import REAL, storage_errors
from rt.objects.commit_record import CommitRecord, record_path
from rt.objects.core.errors import CommitUnknown
from rt.objects.sqlite_file import (
    BUSY_S,
    SQLITE_ERRORS,
    SqliteInformation,
    check_all,
    connect,
    create,
    is_new,
    read_information,
    require_short_path,
    sqlite_errors,
    translate,
    write_information,
)
from rt.objects.sqlite_recovery import read_files, require_agreement, require_one_name

WAL_BYTES_MAX: Final = 8 * 2**20
"""Size of the write-ahead log above which a commit copies it into the file."""


class Fence(Protocol):
    """Says whether this process may still write. May be called by any thread."""

    def newer(self) -> int | None:
        """The fence of the latest owner; None if no owner is later than this one."""

    def require_current(self) -> None:
        """Raise `rt.Fenced` if there is a later owner."""


def resolve(path: str) -> str:
    """The absolute path without symbolic links: lock, log and record are beside the file itself.

    The directory must exist. If it were created for a mistyped path, it would hold an empty store, which
    looks like lost state. For the same reason, a broken link is refused.
    """
    found = os.path.realpath(path)
    require_short_path(found)
    if not os.path.isdir(os.path.dirname(found)):
        raise StorageError(
            "the directory of the object store does not exist",
            where=os.path.dirname(found),
            hint="Correct the path of the store, or create the directory.",
        )
    if os.path.islink(path) and not os.path.exists(found):
        raise StorageError(
            "the object store is a symbolic link to a file that does not exist",
            where=path,
            got=found,
            hint="Correct the link, or remove it to create a store here.",
        )
    return found


class SqliteDatabase:
    """The rows in the file `path`. Any thread may read; one thread at a time may use the rest."""

    def __init__(self, path: str, *, check: bool, fence: Fence | None = None) -> None:
        self.path: Final = path
        self._fence = fence
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self._committing = threading.Lock()
        self._failure: RtError | None = None
        self._is_closed = False
        self._is_changed = False
        """Whether the open transaction has changes."""
        self._is_settled = True
        """Whether the outcome of the last commit is known, and recorded."""
        with contextlib.ExitStack() as undo:
            with storage_errors(path, "opening an object store"):
                require_one_name(path)
                self._lock = REAL.lock(f"{path}.lock")
                undo.callback(self._lock.close)
                self._sync_files()
            self._roll_back_creation()
            require_agreement(path, read_files(path))
            with sqlite_errors(path, "opening an object store"):
                self._write_connection = undo.enter_context(contextlib.closing(self._connect()))
                self._information = self._open(check=check)
                self._record = undo.enter_context(contextlib.closing(self._start_record()))
                self._read_connection = undo.enter_context(contextlib.closing(self._connect()))
                self._read_connection.execute("PRAGMA query_only = ON")
            with storage_errors(path, "syncing the directory of an object store"):
                REAL.sync_directory(os.path.dirname(path))
                self._inodes = self._find_inodes()
            self._resources = undo.pop_all()

    @property
    def store_id(self) -> str:
        return self._information.store_id

    @property
    def last_commit(self) -> int:
        """The number of the last commit that changed rows."""
        return self._information.number

    def close(self) -> None:
        """End the transaction and release the file. A forked child releases nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._pid:
            return  # Closing here would drop the parent's locks.
        with self._committing, self._reading, contextlib.suppress(sqlite3.Error):
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
        """Sync the files that the previous process left.

        Must run before SQLite opens the files: closing a file releases its locks.
        """
        for path in (self.path, f"{self.path}-wal", record_path(self.path)):
            if REAL.size(path) is not None:
                with contextlib.closing(REAL.open(path, write=True)) as file:
                    file.sync()

    def _roll_back_creation(self) -> None:
        """Roll back the journal of a process killed before the write-ahead log existed. Readers refuse it."""
        if os.path.exists(f"{self.path}-journal") and not os.path.exists(f"{self.path}-wal"):
            with (
                sqlite_errors(self.path, "opening an object store"),
                contextlib.closing(self._connect()) as file,
            ):
                is_new(file)

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path)
        connection.execute("PRAGMA synchronous = FULL")
        # SQLite hides the errors of automatic checkpoints.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _open(self, *, check: bool) -> SqliteInformation:
        """Recover and check the file, or create it. Returns its last commit."""
        connection = self._write_connection
        if (mode := connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]) != "wal":
            hint = "Use a local file system: SQLite needs shared memory."
            raise StorageFailed("no write-ahead log", where=self.path, got=mode, expected="wal", hint=hint)
        if is_new(connection):
            create(connection, uuid.uuid4().hex)
        is_emptied = self._empty_wal()
        if check:
            check_all(connection, self.path)
        found = read_information(connection, self.path)
        return replace(found, base=found.number) if is_emptied else found

    def _start_record(self) -> CommitRecord:
        """Start the record. From now on the file needs it; the file states this before the first commit."""
        with storage_errors(record_path(self.path), "writing the record of the last commit"):
            record = CommitRecord(self.path, self._information.store_id, self._information.number)
        if self._information.is_complete:
            self._information = replace(self._information, is_complete=False)
            write_information(self._write_connection, self._information)
            if not self._empty_wal():
                record.close()
                hint = "Wait until the backup or check of the store has ended."
                raise DirectoryLocked("another program reads the file", where=self.path, hint=hint)
        return record

    def _empty_wal(self, *, timeout_s: float = BUSY_S) -> bool:
        """Copy the write-ahead log into the file, sync it, truncate the log.

        Return False if the log was not truncated because a reader is active. Then it is truncated later.
        """
        connection = self._write_connection
        connection.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")
        try:
            return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")

    def _find_inodes(self) -> list[tuple[int, int]]:
        found = [os.stat(path) for path in (self.path, f"{self.path}-wal")]
        return [(each.st_dev, each.st_ino) for each in found]

    def _require_in_place(self) -> None:
        """`StorageFailed` if a file was removed or replaced: the next process would not find the commits."""
        try:
            is_in_place = (
                self._find_inodes() == self._inodes and self._record.is_linked() and self._lock.is_linked()
            )
        except OSError:
            is_in_place = False
        if not is_in_place:
            failure = StorageFailed(
                "a file of the store was removed, renamed or replaced while the store was open",
                where=self.path,
                hint="Stop the program, put the files back, or restore a backup, then open the store again.",
            )
            self._record_failure(failure)
            raise failure

    # Reading and writing

    def read(self, statement: str, *values: object) -> list[Any]:
        """The result of a query on the last commit."""
        self.require_usable()
        with self._reading, self._errors("reading"):
            return self._read_connection.execute(statement, values).fetchall()

    def begin(self) -> None:
        self.require_usable()
        if self._fence is not None:
            self._fence.require_current()
        self._require_in_place()
        if not self._is_settled:
            self._settle()
        self._is_changed = False
        self.roll_back()  # An interrupt before COMMIT may have left it open.
        with self._errors("starting a commit"):
            self._write_connection.execute("BEGIN IMMEDIATE")

    def holds(self, statement: str, *values: object) -> bool:
        """Whether the statement finds a row in the open transaction."""
        with self._errors("reading"):
            return self._write_connection.execute(statement, values).fetchone() is not None

    def write(self, statement: str, many: Sequence[tuple[str | bytes | int, ...]]) -> None:
        """Run the statement in the transaction, once for each of `many`."""
        self._is_changed = True
        with self._errors("writing"):
            self._write_connection.executemany(statement, many)

    def commit(self) -> None:
        with self._committing:
            self.require_usable()
            self._require_current()
            self._commit()
            self._bound_wal()
            if self._fence is not None and (newer := self._fence.newer()) is not None:
                raise CommitUnknown(
                    "a later owner took over the store during a commit, perhaps without it",
                    where=self.path,
                    got=newer,
                )

    def _require_current(self) -> None:
        """`rt.Fenced` if there is a later owner. Then the transaction is rolled back."""
        try:
            if self._fence is not None:
                self._fence.require_current()
        except RtError:
            self.roll_back()
            raise

    def _commit(self) -> None:
        made = replace(self._information, number=self._information.number + self._is_changed)
        self._is_settled = False
        try:
            if self._is_changed:
                write_information(self._write_connection, made)
            self._write_connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._commit_failed(self._translate(error, "committing")) from error
        self._information = made
        try:
            if self._is_changed:
                self._record.write(made.number)
                self._require_in_place()
            self._is_settled = True
        except OSError as error:
            failure = StorageFailed(
                "the disk failed while writing the record of a commit",
                where=record_path(self.path),
                got=error,
                hint="Repair the disk, then open the store again.",
            )
            raise self._commit_failed(failure) from error
        except StorageFailed as failure:
            raise self._commit_failed(failure) from failure

    def _settle(self) -> None:
        """An interrupt or a full disk ended the last commit: find out whether it happened, and record it."""
        self.roll_back()
        with self._errors("reading"):
            self._information = read_information(self._write_connection, self.path)
        with storage_errors(record_path(self.path), "writing the record of the last commit"):
            self._record.write(self._information.number)
        self._is_settled = True

    def _bound_wal(self) -> None:
        """Empty a long write-ahead log, unless a reader is active."""
        try:
            if os.stat(f"{self.path}-wal").st_size > WAL_BYTES_MAX and self._empty_wal(timeout_s=0):
                self._information = replace(self._information, base=self._information.number)
        except (sqlite3.Error, OSError) as error:
            failed = error if isinstance(error, sqlite3.Error) else sqlite3.OperationalError(str(error))
            translated = self._translate(failed, "copying the write-ahead log into the file")
            # If the disk is full, the log keeps the commits; it is copied later.
            if not isinstance(translated, DiskFull):
                # This commit is on disk. Later ones must not trust the disk.
                self._record_failure(translated)

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

    def _commit_failed(self, failure: RtError) -> RtError:
        if isinstance(failure, DiskFull) and self.roll_back():
            return failure
        self._record_failure(failure)
        return CommitUnknown(
            "the commit failed, and its outcome is unknown",
            where=self.path,
            got=failure.got or failure,
            hint="Call on_save_failed(unknown_outcome=True), then open the store again.",
        )

    # Errors

    def _record_failure(self, error: RtError) -> None:
        if self._failure is None:
            self._failure = error

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Raise SQLite's errors as errors of rt. After a disk error the database is unusable."""
        try:
            yield
        except SQLITE_ERRORS as error:
            translated = self._translate(error, doing)
            if isinstance(translated, StorageFailed):
                self._record_failure(translated)
            raise translated from error

    def _translate(self, error: Exception, doing: str) -> RtError:
        return translate(error, self.path, doing)

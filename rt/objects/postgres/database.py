"""The database of a store: one owner, one transaction at a time, and the outcome of the last commit.

Invariants:
- A transaction locks the row of `information` before it reads or writes anything else. So the transactions of
  all programs run one after the other, and each sees the commit of the previous one.
- A transaction changes nothing unless that row has this owner and its fencing token. If not, `rt.Fenced` is
  raised, from then on.
- COMMIT is sent after the server has answered all earlier statements. If the connection is lost before COMMIT
  is sent, the commit did not happen. If it is lost after that, the outcome is unknown until the row can be
  locked again: then the old transaction has ended, and `number` shows whether it was committed.
- A program that is paused inside a transaction loses it: the server rolls it back after `idle_s`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from copy import copy
from typing import Final, LiteralString

import psycopg
from msgspec.structs import replace

from rt.errors import Closed, Fenced, RtError, StorageFailed
from rt.objects.core.errors import CommitUnknown, StateDamaged
from rt.objects.postgres.address import ServerAddress
from rt.objects.postgres.arrays import BigintArray, ByteaArray
from rt.objects.postgres.connections import Connections, Limits, Row, ServerConnection
from rt.objects.postgres.row_pages import RowBatch
from rt.objects.postgres.schema import PostgresInformation, fenced, take_over, to_information
from rt.objects.postgres.server_errors import RESTORE, translate
from rt.objects.postgres.statements import BEGIN, COMMIT, PUT, PUT_PAGES, SET_PAGES_MAX, TRIM

_SILENT: Final = "25P03"
"""The server ended the transaction because it received no statement in time, not even COMMIT."""

logger = logging.getLogger("rt.objects")


class PostgresDatabase:
    """The rows in one schema. Any thread may read; one thread at a time may use the rest."""

    def __init__(self, address: ServerAddress, schema: str, fence: int | None, limits: Limits) -> None:
        self.label: Final = address.label
        self._address: Final = address
        self._connections: Final = Connections(address, schema, limits)
        self._pid: Final = os.getpid()
        self._using = threading.RLock()
        self._failure: RtError | None = None
        self._is_closed = False
        self._is_settled = True
        """Whether the outcome of the last commit is known."""
        self._writing: ServerConnection | None = self._connections.open()
        try:
            found = take_over(self._writing, schema, self.label, fence)
        except psycopg.Error as error:
            self._drop()
            raise translate(error, address, "opening an object store") from error
        except BaseException:
            self._drop()
            raise
        self._information = found

    @property
    def information(self) -> PostgresInformation:
        """The row as the last transaction of this program found or left it."""
        return self._information

    def require_usable(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise Closed("the store is closed, or was opened by the parent process", where=self.label)
        if isinstance(self._failure, Fenced):
            raise copy(self._failure) from self._failure
        if self._failure is not None:
            raise StorageFailed(
                "the store failed earlier", where=self.label, got=self._failure, hint="Open it again."
            ) from self._failure

    def close(self) -> None:
        """Roll back, and close the connections. A forked child closes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:
            with self._using:
                self._drop()
            self._connections.close()

    # Reading

    def read(self, statement: LiteralString, *values: object) -> list[Row]:
        """Rows of the last commit. `rt.Fenced` if another owner has opened the store."""
        self.require_usable()
        self._settle()
        rows = self._read(statement, [self._information.owner, *values])
        if not rows:
            to_information([], self.label)
        is_owner, fence, *_ = rows[0]
        if not is_owner:
            raise self._fail(fenced(self.label, self._information.fence, fence))
        return [] if rows[0][2] is None else [row[2:] for row in rows]

    def _read(self, statement: LiteralString, values: list[object]) -> list[Row]:
        """Run a statement. A connection that broke because the server restarted is replaced once."""
        for fresh in (False, True):
            with self._connections.reader(fresh=fresh) as (connection, is_new):
                try:
                    return connection.run(statement, values)[1]
                except psycopg.Error as error:
                    if is_new or connection.is_whole:
                        raise translate(error, self._address, "reading") from error
        raise AssertionError("a fresh connection is new")

    # Writing

    def begin(self) -> None:
        """Begin a transaction. Wait until the transaction of another owner has ended."""
        with self._using:
            self.require_usable()
            found = to_information(self._begin(), self.label)
            try:
                self._check(found)
            except RtError as failure:
                self.roll_back()
                raise self._fail(failure) from None
            self._information = found
            self._is_settled = True

    def write(self, statement: LiteralString, values: Sequence[object]) -> None:
        """Run a statement in the transaction."""
        with self._using:
            self.require_usable()
            connection = self._in_transaction()
            try:
                connection.run(statement, values)
            except psycopg.Error as error:
                self.roll_back()
                raise translate(error, self._address, "writing") from error
            except BaseException:
                self._drop()
                raise

    def put(self, batch: RowBatch) -> None:
        """Write the pages in the transaction."""
        names = ByteaArray(batch.categories), ByteaArray(batch.keys)
        contents = ByteaArray(batch.values), BigintArray(batch.checksums)
        numbers = BigintArray(batch.page), BigintArray(batch.pages)
        if batch.is_plain:
            self.write(PUT, [*names, *contents])
        else:
            long = ByteaArray(batch.long_categories), ByteaArray(batch.long_keys)
            self.write(PUT_PAGES, [*names, *numbers, *contents, *long])
        if (most := max(batch.pages)) > self._information.pages_max:
            self.write(SET_PAGES_MAX, [most])
            self._information = replace(self._information, pages_max=most)
        if self._information.pages_max > 1:
            self.write(TRIM, [*names, numbers[1]])

    def commit(self) -> None:
        """Returns when the commit is durable. Raises `CommitUnknown` if it may have happened."""
        with self._using:
            self.require_usable()
            connection = self._in_transaction()
            try:
                tag, _ = connection.run(COMMIT)
                assert tag == "COMMIT", tag
                self._information = replace(self._information, number=self._information.number + 1)
            except BaseException as error:
                if isinstance(error, psycopg.Error) and (connection.is_whole or error.sqlstate == _SILENT):
                    self.roll_back()
                    raise translate(error, self._address, "committing") from error
                self._is_settled = False
                self._drop()
                if not isinstance(error, psycopg.Error):
                    raise
                raise CommitUnknown(
                    "the connection failed inside a commit, and its outcome is unknown",
                    where=self.label,
                    got=translate(error, self._address, "committing").got,
                    hint="Call on_save_failed(unknown_outcome=True). The next use of the store finds out.",
                ) from error

    def roll_back(self) -> None:
        """End the transaction without its changes. Never raises."""
        if os.getpid() != self._pid:
            return  # The connection is the parent's.
        with self._using:
            with contextlib.suppress(psycopg.Error):
                if self._writing is not None and self._writing.is_whole:
                    self._writing.run("ROLLBACK")
                    return
            self._drop()

    def _begin(self) -> list[Row]:
        """Begin a transaction. As in `_read`, an existing connection that is broken is replaced once."""
        while True:
            is_new = self._writing is None
            connection = self._writing = self._writing or self._connections.open()
            try:
                return connection.run(BEGIN)[1]
            except psycopg.Error as error:
                is_lost = not connection.is_whole
                self.roll_back()
                if is_new or not is_lost:
                    raise translate(error, self._address, "starting a commit") from error
            except BaseException:
                self._drop()
                raise

    def _settle(self) -> None:
        """Find out whether the last commit happened, if that is not known."""
        if self._is_settled:
            return
        with self._using:
            if not self._is_settled:
                self.begin()
                self.roll_back()

    def _check(self, found: PostgresInformation) -> None:
        mine = self._information
        if (found.owner, found.fence) != (mine.owner, mine.fence):
            raise fenced(self.label, mine.fence, found.fence)
        latest = mine.number if self._is_settled else mine.number + 1
        if found.store_id != mine.store_id or not mine.number <= found.number <= latest:
            raise StateDamaged(
                "the server has lost commits, or has another store now: it was restored, or an older copy"
                " took over",
                where=self.label,
                got=f"commit {found.number:,} of store {found.store_id}",
                expected=f"commit {latest:,} of store {mine.store_id}",
                hint=RESTORE,
            )
        if not self._is_settled:
            happened = found.number == latest
            logger.info("commit_resolved store=%s number=%d happened=%s", found.store_id, latest, happened)

    def _in_transaction(self) -> ServerConnection:
        if self._writing is None:
            raise Closed("the store is closed", where=self.label)
        return self._writing

    def _fail(self, failure: RtError) -> RtError:
        if self._failure is None:
            self._failure = failure
        return failure

    def _drop(self) -> None:
        connection, self._writing = self._writing, None
        if connection is not None:
            connection.close()

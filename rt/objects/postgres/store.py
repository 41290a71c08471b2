"""A store on a PostgreSQL server, which every host reaches. Each owner has a fencing token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, LiteralString

from rt.objects.claims import Claims, TreeClaim
from rt.objects.core.errors import OutOfTurn
from rt.objects.core.store import CheckpointKind, category_checksum, checked_kind
from rt.objects.postgres import statements
from rt.objects.postgres.address import parse_url
from rt.objects.postgres.arrays import ByteaArray
from rt.objects.postgres.check import check_database
from rt.objects.postgres.connections import Limits
from rt.objects.postgres.database import PostgresDatabase
from rt.objects.postgres.row_pages import (
    BYTES_AT_ONCE,
    KEPT_BYTES,
    ROWS_AT_ONCE,
    PageReader,
    RowBatch,
    batches,
    place_of,
)
from rt.option_checks import check_count, check_range

_READ_BYTES: Final = 8 * 2**20
_HELD_BYTES_MAX: Final = 32 * 2**20
"""A writer keeps its changes in memory until its commit. With more than this it begins to send them."""
_FENCE_MAX: Final = 2**63 - 1
_SECONDS_MAX: Final = 86_400


class PostgresStore:
    """The rows in the schema `schema` of the database in `url`. The schema is created if missing.

    `fence`: the fencing token of this owner, such as the token of its lease. An owner with a lower token than
    an earlier one is refused (`rt.Fenced`): here, and at its next commit or read. None: the next token, so
    that the last program that opens the store owns it. Of two owners with one token, the last one that opened
    the store owns it.

    - `timeout_s`: limit of the server for a statement. Half of it for the wait for another owner's commit. A
      server that is silent is given up after twice this limit, or 5 s after it, whichever is first.
    - `connect_timeout_s`: limit for connecting to one host of the URL.
    - `idle_s`: the server rolls a commit back if this program is silent for so long inside it. So it bounds
      how long a paused owner delays the next one.
    - `connections_max`: one for commits, the others for readers. At least 2.
    - `check` verifies every row when the store is opened. Rows are always verified when they are read.

    Unless the URL says otherwise, a server on another machine must prove its name (`sslmode=verify-full`).
    Raises `StoreUnavailable`, `rt.Fenced`, `StateDamaged`, `rt.UnknownVersion`, `rt.FormatError` for a schema
    with other tables, `rt.StorageError` if the server refuses access.

    Any thread may use readers; one thread at a time may use the writer. A forked child must not use the
    store.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = "rt",
        fence: int | None = None,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 10.0,
        idle_s: float = 5.0,
        connections_max: int = 4,
        check: bool = False,
    ) -> None:
        if fence is not None:
            check_range(fence, 0, _FENCE_MAX, name="fence", is_whole=True)
        check_range(timeout_s, 0.01, _SECONDS_MAX, name="timeout_s")
        check_range(connect_timeout_s, 0.01, _SECONDS_MAX, name="connect_timeout_s")
        check_range(idle_s, 0.01, _SECONDS_MAX, name="idle_s")
        limits = Limits(timeout_s, idle_s, check_count(connections_max, name="connections_max", least=2))
        address = parse_url(url, schema, connect_timeout_s)
        self.label: Final = address.label
        """Server, database and schema, without the password."""
        self._database: Final = PostgresDatabase(address, schema, fence, limits)
        try:
            if check:
                check_database(address, schema, limits)
        except BaseException:
            self._database.close()
            raise
        self.store_id: Final = self._database.information.store_id
        self.fence: Final = self._database.information.fence
        self._writer: PostgresWriter | None = None
        self._claims: Final = Claims(self.label)

    @property
    def last_commit(self) -> int:
        """The number of the last commit, as far as this program knows."""
        return self._database.information.number

    def reader(self) -> PostgresReader:
        """A reader that sees every later commit."""
        self._database.require_usable()
        return PostgresReader(self._database, self._claims)

    def begin(self, kind: CheckpointKind) -> PostgresWriter:
        """Open a writer. It does not call the server until it has 32 MiB of changes, or commits."""
        self._database.require_usable()
        if self._writer is not None and self._writer.is_open:
            raise OutOfTurn("another writer is open", hint="Commit it or roll it back first.")
        self._writer = PostgresWriter(self._database, self._claims, checked_kind(kind))
        return self._writer

    def claim(self, root: str) -> TreeClaim:
        """Reserve a tree for one owner in this process. Other processes are kept away by `fence`."""
        self._database.require_usable()
        return self._claims.claim(root)

    def close(self) -> None:
        """Roll back an open writer and close the connections. A forked child closes nothing."""
        self._database.close()

    def __enter__(self) -> PostgresStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PostgresStore({self.label!r})"


class PostgresReader:
    def __init__(self, database: PostgresDatabase, owners: Claims) -> None:
        self._database = database
        self._owners = owners

    @property
    def store_id(self) -> str:
        return self._database.information.store_id

    @property
    def owners(self) -> Claims:
        return self._owners

    def categories(self, prefix: str = "") -> Iterator[str]:
        low = prefix.encode()[:KEPT_BYTES]
        found = self._database.read(statements.CATEGORIES, low, low + b"\xff", low + b"\xff")
        names = sorted((place if long is None else long).decode() for place, long in found)
        return (name for name in names if name.startswith(prefix))

    def rows(self, category: str) -> Iterator[tuple[str, bytes]]:
        """Read up to 8 MiB and some thousand rows at a time. A commit in between may be visible in part."""
        place = place_of(category.encode())
        pages = PageReader(self._database.label, category, category_checksum(category))
        last, page = b"", -1
        while found := self._database.read(statements.ROWS, place, last, page, ROWS_AT_ONCE, _READ_BYTES):
            for stored in found:
                if (row := pages.add(stored)) is not None:
                    yield row
            last, page = found[-1][0], found[-1][1]
        pages.end()

    def get(self, category: str, key: str) -> bytes | None:
        pages = PageReader(self._database.label, category, category_checksum(category))
        row = None
        for stored in self._database.read(
            statements.GET, place_of(category.encode()), place_of(key.encode())
        ):
            row = pages.add(stored)
        pages.end()
        return None if row is None else row[1]


_Statement = tuple[LiteralString, tuple[object, ...]]


class PostgresWriter:
    """The changes of one commit, in memory. They are sent in its transaction, at the commit."""

    def __init__(self, database: PostgresDatabase, owners: Claims, kind: CheckpointKind) -> None:
        self._database = database
        self._owners = owners
        self._kind = kind
        self._rows: dict[tuple[str, int, str], bytes] = {}
        """The last rows that were put, by category, its checksum, and key."""
        self._waiting: list[RowBatch | _Statement] = []
        """The changes before `_rows`."""
        self._rows_bytes = self._waiting_bytes = 0
        self._has_begun = False
        """Whether the transaction is open on the server."""
        self.is_open = True

    @property
    def kind(self) -> CheckpointKind:
        return self._kind

    @property
    def store_id(self) -> str:
        return self._database.information.store_id

    def reader(self) -> PostgresReader:
        return PostgresReader(self._database, self._owners)

    def put(self, category: str, key: str, data: bytes) -> None:
        self.put_many(category, [(key, data)])

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        self._require_current()
        try:
            seed = category_checksum(category)
            for key, data in rows:
                self._rows[category, seed, key] = data
                self._rows_bytes += len(data)
                if len(self._rows) >= ROWS_AT_ONCE or self._rows_bytes >= BYTES_AT_ONCE:
                    self._pack()
        except BaseException:
            self.rollback()
            raise

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        self._require_current()
        try:
            deleted = [place_of(key.encode()) for key in keys]
            place = place_of(category.encode())
            for start in range(0, len(deleted), ROWS_AT_ONCE):
                self._add(statements.DELETE, place, ByteaArray(deleted[start : start + ROWS_AT_ONCE]))
        except BaseException:
            self.rollback()
            raise

    def clear(self, category: str) -> None:
        self._require_current()
        self._add(statements.CLEAR, place_of(category.encode()))

    def clear_tree(self, root: str) -> None:
        self._require_current()
        name = root.encode()
        low = name[:KEPT_BYTES]
        self._add(
            statements.CLEAR_TREE, low, low + b"\xff", name, name + b"/", name + b"0"
        )  # "0" is the character after "/"

    def commit(self) -> None:
        self._require_current()
        try:
            self._pack()
            self._send()
        except BaseException:
            self.rollback()
            raise
        self.is_open = False
        self._database.commit()

    def rollback(self) -> None:
        if self.is_open:
            self.is_open = False
            self._rows.clear()
            self._waiting.clear()
            if self._has_begun:
                self._database.roll_back()

    def _add(self, statement: LiteralString, *values: object) -> None:
        self._pack()
        self._waiting.append((statement, values))

    def _pack(self) -> None:
        """Turn the last rows into batches. Send the waiting changes if they reach `_HELD_BYTES_MAX`."""
        if self._rows:
            made = list(batches(self._rows.items()))
            self._rows.clear()
            self._rows_bytes = 0
            self._waiting += made
            self._waiting_bytes += sum(batch.size for batch in made)
        if self._waiting_bytes >= _HELD_BYTES_MAX:
            self._send()

    def _send(self) -> None:
        """Send the waiting changes in the transaction. The first call begins the transaction."""
        if not self._has_begun:
            self._database.begin()
            self._has_begun = True
        for each in self._waiting:
            if isinstance(each, RowBatch):
                self._database.put(each)
            else:
                self._database.write(*each)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _require_current(self) -> None:
        self._database.require_usable()
        if not self.is_open:
            raise OutOfTurn("the writer was committed or rolled back", hint="Begin another one.")

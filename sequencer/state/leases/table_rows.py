"""The tables of leases in the replicated state: rows in pages, and the staged parts of an open commit.

Pure. The key of a row determines its page. A page is encoded when a snapshot needs it, and again only after
one of its rows changed: most rows of a large table never change.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field  # noqa: TID251
from typing import Final, NamedTuple

from rt.names import lease_group

PAGES: Final = 256
"""A table of 100,000 rows has about 400 rows in each page."""
ROW_BYTES: Final = 128
"""Counted for each row in addition to its key and value: about what its objects take in memory."""
MAILBOX: Final = ("requests\0", "answers\0")
"""The keys of requests to the owner of a lease, and of its answers, start with these prefixes."""


class TableRow(NamedTuple):
    key: str
    value: bytes


class EncodedPage:
    """The rows of a page at one time, encoded when a snapshot first needs them."""

    __slots__ = ("_content", "_encode", "_rows")

    def __init__(
        self,
        rows: list[tuple[str, bytes]],
        encode: Callable[[list[tuple[str, bytes]]], bytes],
        content: bytes | None = None,
    ) -> None:
        self._rows, self._encode, self._content = rows, encode, content

    @property
    def content(self) -> bytes:
        """May be called from any thread."""
        rows, content = self._rows, self._content  # In this order: another thread may drop the rows.
        if content is None:
            content = self._content = self._encode(sorted(rows))
            self._rows = []
        return content


class PagedRows:
    """Rows by key. Two objects are equal if their rows are equal."""

    __slots__ = ("_encoded", "_pages", "count", "mailbox", "size_bytes")

    def __init__(self, rows: Iterable[tuple[str, bytes]] = ()) -> None:
        self._pages: dict[int, dict[str, bytes]] = {}
        """The pages that have rows."""
        self._encoded: dict[int, EncodedPage] = {}
        """The pages that were returned and did not change since."""
        self.count = 0
        self.size_bytes = 0
        """Keys, values, and `ROW_BYTES` for each row."""
        self.mailbox: dict[str, bytes] = {}
        """The rows of `MAILBOX`, in no certain order. Derived, because there are many other rows."""
        for key, value in rows:
            self.put(key, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedRows) and self._pages == other._pages

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PagedRows({self.count} rows, {self.size_bytes} bytes)"

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """All rows, ordered by page and key: the same for equal rows."""
        for at in sorted(self._pages):
            yield from self.page(at)

    def page(self, at: int) -> list[tuple[str, bytes]]:
        """The rows of a page, ordered by key."""
        return sorted(self._pages.get(at, {}).items())

    def get(self, key: str) -> bytes | None:
        return self._pages.get(_page_of(key), {}).get(key)

    def encoded(self, encode: Callable[[list[tuple[str, bytes]]], bytes]) -> Iterator[EncodedPage]:
        """The pages that have rows, encoded by `encode`. Must always be called with the same function."""
        for at in sorted(self._pages):
            known = self._encoded.get(at)
            if known is None:
                known = self._encoded[at] = EncodedPage([*self._pages[at].items()], encode)
            yield known

    def adopt(self, rows: list[tuple[str, bytes]], encoded: bytes) -> None:
        """Add a page that was encoded to these bytes before: it is not encoded again until it changes."""
        for key, value in rows:
            self.put(key, value)
        keys = [key for key, _ in rows]
        pages = {_page_of(key) for key in keys}
        if len(pages) == 1 and keys == sorted(self._pages[at := pages.pop()]):
            self._encoded[at] = EncodedPage([], _never, encoded)

    def put(self, key: str, value: bytes) -> None:
        at = _page_of(key)
        self._encoded.pop(at, None)
        rows = self._pages.setdefault(at, {})
        self._count(key, rows.get(key), -1)
        rows[key] = value
        if key.startswith(MAILBOX):
            self.mailbox[key] = value
        self._count(key, value, 1)

    def delete(self, key: str) -> None:
        """Delete a row. Do nothing if it does not exist."""
        at = _page_of(key)
        rows = self._pages.get(at)
        if rows is None or key not in rows:
            return
        self._encoded.pop(at, None)
        self._count(key, rows.pop(key), -1)
        self.mailbox.pop(key, None)
        if not rows:
            del self._pages[at]

    def clear(self, prefixes: tuple[str, ...]) -> None:
        """Delete all rows whose keys start with one of `prefixes`. Examines every row once."""
        for key in [key for rows in self._pages.values() for key in rows if key.startswith(prefixes)]:
            self.delete(key)

    def _count(self, key: str, value: bytes | None, sign: int) -> None:
        if value is not None:
            self.count += sign
            self.size_bytes += sign * row_bytes(key, value)


def _never(_: list[tuple[str, bytes]]) -> bytes:
    raise AssertionError("the page is encoded")


def _page_of(key: str) -> int:
    return zlib.crc32(key.encode()) % PAGES


def row_bytes(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) + ROW_BYTES


class StagedPart(NamedTuple):
    """A part of a commit that is not complete."""

    clears: tuple[str, ...]
    deletes: tuple[str, ...]
    puts: tuple[TableRow, ...]

    @property
    def key_count(self) -> int:
        """Number of keys."""
        return len(self.clears) + len(self.deletes) + len(self.puts)

    @property
    def size_bytes(self) -> int:
        """Size of the part, as it counts in a table."""
        deleted = sum(row_bytes(key, b"") for key in (*self.clears, *self.deletes))
        return deleted + sum(row_bytes(row.key, row.value) for row in self.puts)


@dataclass(slots=True)
class LeaseTable:
    """The table that the owners of a lease keep in the cluster."""

    commits: int = 0
    """Number of commits: each has the next number."""
    request: bytes = b""
    """The attempt that made the last commit; empty if there is none."""
    staged_token: int = 0
    staged_request: bytes = b""
    """The owner and the attempt of the staged parts."""
    staged: tuple[StagedPart, ...] = ()
    rows: PagedRows = field(default_factory=PagedRows)
    staged_bytes: int = field(init=False, default=0, repr=False)
    """Derived, like `staged_count`: a commit has up to a thousand parts, and each is counted only once."""
    staged_count: int = field(init=False, default=0, repr=False)
    """Number of keys in the staged parts."""

    def __post_init__(self) -> None:
        self.staged_bytes = sum(part.size_bytes for part in self.staged)
        self.staged_count = sum(part.key_count for part in self.staged)

    @property
    def size_bytes(self) -> int:
        return self.rows.size_bytes + self.staged_bytes

    def unstage(self) -> None:
        self.staged_token, self.staged_request, self.staged = 0, b"", ()
        self.staged_bytes = self.staged_count = 0

    def stage(self, part: StagedPart, token: int, request: bytes) -> None:
        """Keep a part for its commit. Parts of another attempt are dropped."""
        if (self.staged_token, self.staged_request) != (token, request):
            self.unstage()
        self.staged_token, self.staged_request = token, request
        self.staged = (*self.staged, part)
        self.staged_bytes += part.size_bytes
        self.staged_count += part.key_count

    def commit(self, parts: Iterable[StagedPart], request: bytes) -> None:
        for part in parts:
            if part.clears:
                self.rows.clear(part.clears)
            for key in part.deletes:
                self.rows.delete(key)
            for row in part.puts:
                self.rows.put(row.key, row.value)
        self.unstage()
        self.commits, self.request = self.commits + 1, request


@dataclass(slots=True)
class LeaseTables:
    """All tables, by name of their lease, and their sizes."""

    by_lease: dict[str, LeaseTable] = field(default_factory=dict)
    bytes_of: Counter[str] = field(init=False, default_factory=Counter)
    """By group: the bytes of its tables. Derived, like `count_of`."""
    count_of: Counter[str] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        for lease, table in self.by_lease.items():
            self._count(lease, table.size_bytes, 1)

    @property
    def size_bytes(self) -> int:
        return self.bytes_of.total()

    def copy(self) -> LeaseTables:
        """A copy with the same tables."""
        made = LeaseTables()
        made.by_lease = dict(self.by_lease)
        made.bytes_of, made.count_of = self.bytes_of.copy(), self.count_of.copy()
        return made

    def get(self, lease: str) -> LeaseTable | None:
        return self.by_lease.get(lease)

    def add(self, lease: str) -> LeaseTable:
        """Make an empty table."""
        table = self.by_lease[lease] = LeaseTable()
        self._count(lease, table.size_bytes, 1)
        return table

    def resized(self, lease: str, bytes_before: int) -> None:
        """Must be called after each change of a table."""
        self._count(lease, self.by_lease[lease].size_bytes - bytes_before, 0)

    def delete(self, lease: str) -> None:
        table = self.by_lease.pop(lease)
        self._count(lease, -table.size_bytes, -1)

    def on_released(self, lease: str) -> None:
        """The lease has no owner: drop the staged parts, and the table if it has no rows."""
        table = self.by_lease.get(lease)
        if table is None:
            return
        before = table.size_bytes
        table.unstage()
        self.resized(lease, before)
        if not table.rows.count:
            self.delete(lease)

    def _count(self, lease: str, more_bytes: int, more: int) -> None:
        group = lease_group(lease)
        self.bytes_of[group] += more_bytes
        self.count_of[group] += more
        if not self.count_of[group]:
            del self.bytes_of[group], self.count_of[group]

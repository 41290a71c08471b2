"""Rows as they are in the table: names that fit into an index, and large values in pages. Pure.

A name (a category or a key) is the UTF-8 of the text. A name of 1,000 bytes or more is stored completely in
`long_category` or `long_key`. In the index it is replaced by 1,000 bytes: its first 968 bytes, and its
SHA-256.

A value has one or more pages of up to 512 KiB, numbered from 0; `pages` is their number. The checksum of a
page covers the category, the key, the page, and the page's number if the value has several pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final

from msgspec import Struct, field

from rt.objects.core.errors import StateDamaged
from rt.objects.core.store import row_checksum
from rt.objects.postgres.server_errors import RESTORE

PAGE_BYTES: Final = 2**19
NAME_BYTES: Final = 1000
KEPT_BYTES: Final = NAME_BYTES - 32
ROWS_AT_ONCE: Final = 4096
BYTES_AT_ONCE: Final = 2**20
"""The page that reaches this size is the last page of a statement. The client counts as silent until the
whole statement has arrived.
"""

_ROW_BYTES: Final = 100
"""Approximate memory of a row, without key and value."""


def place_of(name: bytes) -> bytes:
    """The name in the index."""
    return name if len(name) < NAME_BYTES else name[:KEPT_BYTES] + sha256(name).digest()


def long_or_none(name: bytes) -> bytes | None:
    return name if len(name) >= NAME_BYTES else None


def page_checksum(seed: int, key: str, page: int, pages: int, data: bytes) -> int:
    """The checksum of a page. `seed` is the category's."""
    return row_checksum(seed, key if pages == 1 else f"{key}\0{page}/{pages}", data)


class RowBatch(Struct):
    """Pages to write in one statement, column by column. No two have the same category, key and number."""

    categories: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    page: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    long_categories: list[bytes | None] = field(default_factory=list)
    long_keys: list[bytes | None] = field(default_factory=list)
    size: int = 0
    is_plain: bool = True
    """No long names, and one page each."""

    @property
    def is_full(self) -> bool:
        return len(self.keys) >= ROWS_AT_ONCE or self.size >= BYTES_AT_ONCE


def batches(rows: Iterable[tuple[tuple[str, int, str], bytes]]) -> Iterator[RowBatch]:
    """Rows `((category, its checksum, key), value)` to write in order. They differ in category or key."""
    made = RowBatch()
    for (category, seed, key), value in rows:
        names = category.encode(), key.encode()
        count = max(1, -(-len(value) // PAGE_BYTES))
        for page in range(count):
            data = value if count == 1 else value[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            made.categories.append(place_of(names[0]))
            made.keys.append(place_of(names[1]))
            made.page.append(page)
            made.pages.append(count)
            made.values.append(data)
            made.checksums.append(page_checksum(seed, key, page, count, data))
            made.long_categories.append(long_or_none(names[0]))
            made.long_keys.append(long_or_none(names[1]))
            made.size += len(data) + len(names[0]) + len(names[1]) + _ROW_BYTES
            if count > 1 or max(len(names[0]), len(names[1])) >= NAME_BYTES:
                made.is_plain = False
            if made.is_full:
                yield made
                made = RowBatch()
    if made.keys:
        yield made


StoredPage = tuple[bytes, int, int, bytes, int, bytes | None, bytes | None]
"""key, page, pages, value, checksum, long_category, long_key"""


class PageReader:
    """Joins the pages of one category, in order, into rows. Raises `StateDamaged` if a check fails."""

    def __init__(self, label: str, category: str, seed: int) -> None:
        self._label: Final = label
        self._category: Final = category
        self._seed: Final = seed
        self._long: Final = long_or_none(category.encode())
        self._key: str | None = None
        self._count = 0
        self._pages: list[bytes] = []

    def add(self, stored: StoredPage) -> tuple[str, bytes] | None:
        """The row that this page completes; None if more pages follow."""
        place, page, pages, value, checksum, long_category, long_key = stored
        key = self._decoded(place, long_key)
        is_next = (
            (page == 0 if self._key is None else (key, pages) == (self._key, self._count))
            and page == len(self._pages) < pages
            and long_category == self._long
        )
        if not is_next:
            raise self._damaged("a page of a row is missing or in the wrong place", key)
        if page_checksum(self._seed, key, page, pages, value) != checksum:
            raise self._damaged("wrong checksum of a row", key)
        if pages == 1:
            return key, value
        self._key, self._count = key, pages
        self._pages.append(value)
        if page + 1 < pages:
            return None
        whole = b"".join(self._pages)
        self._key, self._pages = None, []
        return key, whole

    def end(self) -> None:
        """Call when no page follows."""
        if self._key is not None:
            raise self._damaged("a page of a row is missing", self._key)

    def _decoded(self, place: bytes, long: bytes | None) -> str:
        name = place if long is None else long
        try:
            if place_of(name) == place:
                return name.decode()
        except UnicodeDecodeError:
            pass
        raise self._damaged("damaged key of a row", repr(name))

    def _damaged(self, what: str, key: str) -> StateDamaged:
        return StateDamaged(what, where=f"{self._label}, {self._category}, {key[:100]}", hint=RESTORE)

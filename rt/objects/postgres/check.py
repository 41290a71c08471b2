"""Check a store on a server, or show what it holds, also while a program uses it.

Nothing is changed, and no owner is fenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import psycopg

from rt.errors import LogNotFound
from rt.objects.core.store import category_checksum
from rt.objects.core.store_status import StoreContents, StoreStatus, object_sizes
from rt.objects.postgres.address import ServerAddress, application_name, parse_url
from rt.objects.postgres.connections import Connections, Limits, ServerConnection
from rt.objects.postgres.row_pages import ROWS_AT_ONCE, PageReader
from rt.objects.postgres.schema import read_information, stored_version
from rt.objects.postgres.server_errors import translate
from rt.objects.postgres.statements import ALL_ROWS, CATEGORY_SIZES

_READ_BYTES: Final = 8 * 2**20
_LIMITS: Final = Limits(timeout_s=60.0, idle_s=60.0, connections_max=2)
_CONNECT_TIMEOUT_S: Final = 10.0


def check_postgres(url: str, *, schema: str = "rt") -> StoreStatus:
    """Verify every row of the last commit, as it was when the check began.

    Raises `StateDamaged`, `rt.FormatError`, `rt.UnknownVersion`, `rt.LogNotFound`, `rt.StorageError`.
    """
    return check_database(parse_url(url, schema, _CONNECT_TIMEOUT_S), schema, _LIMITS)


def postgres_contents(url: str, *, schema: str = "rt") -> StoreContents:
    """What the last commit of a store holds. Rows are not verified; otherwise like `check_postgres`."""
    address = parse_url(url, schema, _CONNECT_TIMEOUT_S)
    with _snapshot(address, schema, _LIMITS) as connection:
        sizes = [
            (bytes(name).decode(errors="replace"), rows, size)
            for name, rows, size in connection.run(CATEGORY_SIZES)[1]
        ]
        status = _status(connection, address, schema, sum(size[1] for size in sizes), len(sizes))
    return StoreContents(status, object_sizes(sizes))


def check_database(address: ServerAddress, schema: str, limits: Limits) -> StoreStatus:
    with _snapshot(address, schema, limits) as connection:
        return _status(connection, address, schema, *_check_rows(connection, address.label))


def _status(
    connection: ServerConnection, address: ServerAddress, schema: str, rows: int, categories: int
) -> StoreStatus:
    found = read_information(connection, address.label)
    is_in_use = _is_in_use(connection, schema)
    return StoreStatus(
        address.label, found.store_id, found.number, rows, categories, is_in_use, True, found.fence
    )


@contextlib.contextmanager
def _snapshot(address: ServerAddress, schema: str, limits: Limits) -> Iterator[ServerConnection]:
    """A transaction that reads one commit."""
    with contextlib.closing(Connections(address, schema, limits).open(read_only=True)) as connection:
        try:
            connection.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if stored_version(connection, schema, address.label) is None:
                hint = "Correct the URL or schema."
                raise LogNotFound("no such object store", where=address.label, hint=hint)
            yield connection
        except psycopg.Error as error:
            raise translate(error, address, "reading an object store") from error


def _check_rows(connection: ServerConnection, label: str) -> tuple[int, int]:
    """Verify all rows. Return the number of rows and of categories."""
    rows, categories, place = 0, 0, None
    pages = PageReader(label, "", 0)
    last: tuple[bytes, bytes, int] = b"", b"", -1
    while found := connection.run(ALL_ROWS, [*last, ROWS_AT_ONCE, _READ_BYTES])[1]:
        for category, *stored in found:
            if category != place:
                pages.end()
                name = category if stored[5] is None else stored[5]
                text = name.decode(errors="replace")
                pages = PageReader(label, text, category_checksum(text))
                place, categories = category, categories + 1
            key, page, count, value, checksum, long_category, long_key = stored
            rows += pages.add((key, page, count, value, checksum, long_category, long_key)) is not None
        last = found[-1][:3]
    pages.end()
    return rows, categories


def _is_in_use(connection: ServerConnection, schema: str) -> bool:
    """Whether a program of the same role is connected."""
    _, found = connection.run(
        "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
        " AND pid <> pg_backend_pid() LIMIT 1",
        [application_name(schema)],
    )
    return bool(found)

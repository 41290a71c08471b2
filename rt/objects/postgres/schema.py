"""The tables of a store in a PostgreSQL schema, their versions, and who owns them.

    version       format text, version int                       this format never changes
    information   store_id, number, fence, owner, pages_max      one row; a commit locks it first
    rows          category, key, page, pages, value, checksum, long_category, long_key

`number` counts commits. `fence` is the fencing token of the last owner, `owner` a random id of its store
object. So `(owner, number)` identifies a commit. `pages_max` is the largest number of pages that a value had.
`rows`: see `row_pages`.
"""

from __future__ import annotations

import uuid
from typing import Final, LiteralString

from msgspec import Struct
from psycopg import sql

from rt.errors import Fenced, FormatError, StorageError, UnknownVersion
from rt.objects.core.errors import StateDamaged
from rt.objects.postgres.connections import ServerConnection
from rt.objects.postgres.server_errors import RESTORE

FORMAT: Final = "rt object store"

MIGRATIONS: tuple[tuple[LiteralString, ...], ...] = (
    (
        """CREATE TABLE information (
             is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
             store_id text NOT NULL, number bigint NOT NULL CHECK (number >= 0),
             fence bigint NOT NULL CHECK (fence >= 0), owner text NOT NULL,
             pages_max int NOT NULL CHECK (pages_max > 0)) WITH (fillfactor = 10)""",
        """CREATE TABLE rows (
             category bytea NOT NULL, key bytea NOT NULL, page int NOT NULL, pages int NOT NULL,
             value bytea NOT NULL, checksum bigint NOT NULL, long_category bytea, long_key bytea,
             PRIMARY KEY (category, key, page)) WITH (fillfactor = 90)""",
        """INSERT INTO information (store_id, number, fence, owner, pages_max)
             VALUES (replace(gen_random_uuid()::text, '-', ''), 0, 0, '', 1)""",
    ),
)
"""The statements that migrate from version n to n + 1. Version 0 has no tables."""


class PostgresInformation(Struct, frozen=True):
    """The row of the table `information`."""

    store_id: str
    number: int
    fence: int
    owner: str
    pages_max: int


READ_INFORMATION: Final = "SELECT store_id, number, fence, owner, pages_max FROM information"
LOCK_INFORMATION: Final = READ_INFORMATION + " FOR UPDATE"


def read_information(connection: ServerConnection, label: str, *, lock: bool = False) -> PostgresInformation:
    _, rows = connection.run(LOCK_INFORMATION if lock else READ_INFORMATION)
    return to_information(rows, label)


def to_information(rows: list[tuple[object, ...]], label: str) -> PostgresInformation:
    if len(rows) != 1:
        raise StateDamaged("the table `information` is damaged", where=label, got=rows, hint=RESTORE)
    return PostgresInformation(*rows[0])  # type: ignore[arg-type]


def take_over(
    connection: ServerConnection, schema: str, label: str, fence: int | None
) -> PostgresInformation:
    """Create or migrate the store, and make this program its owner, in one transaction.

    Wait for the commit of the previous owner. If `fence` is None, use the next token. Raises `rt.Fenced`,
    `rt.UnknownVersion`, `rt.FormatError`.
    """
    connection.run("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
    connection.run("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"{FORMAT} {schema}"])
    before = stored_version(connection, schema, label)
    if before is None:
        _create(connection, schema)
    for version in range(before or 0, len(MIGRATIONS)):
        for statement in MIGRATIONS[version]:
            connection.run(statement)
    if before is not None and before < len(MIGRATIONS):
        connection.run("UPDATE version SET version = %s", [len(MIGRATIONS)])
    found = read_information(connection, label, lock=True)
    if fence is not None and fence < found.fence:
        raise fenced(label, fence, found.fence)
    owner, token = uuid.uuid4().hex, found.fence + 1 if fence is None else fence
    connection.run("UPDATE information SET owner = %s, fence = %s", [owner, token])
    connection.run("COMMIT")
    return PostgresInformation(found.store_id, found.number, token, owner, found.pages_max)


def fenced(label: str, got: int, expected: int) -> Fenced:
    return Fenced(
        "another owner has taken over the store",
        where=label,
        got=f"fencing token {got}",
        expected=f"{expected} or later, and the last one that opened the store",
        hint="Nothing was changed. Unload, and let the owner go on.",
    )


def stored_version(connection: ServerConnection, schema: str, label: str) -> int | None:
    """The version in the schema; None if it has no tables. Raises `rt.FormatError`, `rt.UnknownVersion`.

    `rt.StorageError` if a pooler has reassigned the connection since it was opened: statements would use the
    tables of another store.
    """
    _, ((path,),) = connection.run("SELECT current_setting('search_path')")
    if path != f'"{schema}"':
        raise StorageError(
            "the connection to the server has other settings now",
            where=label,
            got=path,
            expected=schema,
            hint="A pooler such as PgBouncer must be in session mode (pool_mode=session).",
        )
    _, found = connection.run(
        "SELECT c.relname, has_schema_privilege(n.oid, 'USAGE')"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind IN ('r', 'p', 'v', 'm', 'f')",
        [schema],
    )
    if not found:
        return None
    if not found[0][1]:
        hint = "Grant the user USAGE on the schema, and SELECT, INSERT, UPDATE, DELETE on its tables."
        raise StorageError("the user has no right to use the schema of the store", where=label, hint=hint)
    versions: list[tuple[object, ...]] = []
    if ("version", True) in found and _has_format(connection, schema):
        _, versions = connection.run("SELECT format, version FROM version")
    if len(versions) != 1 or versions[0][0] != FORMAT or not isinstance(version := versions[0][1], int):
        hint = "Choose another schema for the store."
        raise FormatError("the schema has other tables", where=label, expected=FORMAT, hint=hint)
    if version > len(MIGRATIONS):
        raise UnknownVersion(
            "the object store has an unknown version",
            where=label,
            got=version,
            expected=f"at most {len(MIGRATIONS)}",
            hint="Use a newer rt.",
        )
    return version


def _has_format(connection: ServerConnection, schema: str) -> bool:
    _, found = connection.run(
        "SELECT a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = 'version' AND a.attname IN ('format', 'version')",
        [schema],
    )
    return len(found) == 2


def _create(connection: ServerConnection, schema: str) -> None:
    _, found = connection.run("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema])
    if not found:
        with connection.cursor() as cursor:
            cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    connection.run("CREATE TABLE version (format text NOT NULL, version int NOT NULL)")
    connection.run("INSERT INTO version VALUES (%s, %s)", [FORMAT, len(MIGRATIONS)])

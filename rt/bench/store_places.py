"""Where benchmarks keep object stores: in files of a directory, or on a PostgreSQL server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from rt.objects import SqliteStore, Store

if TYPE_CHECKING:
    from rt.objects import PostgresStore


class StorePlace(Protocol):
    """Makes stores by name."""

    def open(self, name: str) -> AbstractContextManager[Store]:
        """Open the store, or create it. Every row is verified."""

    def size_bytes(self, name: str) -> int:
        """The size of a closed store."""

    def close(self) -> None:
        """Delete the stores, unless they are deleted with the directory."""


class FilePlace:
    """SQLite files in `directory`."""

    def __init__(self, directory: str) -> None:
        self._directory: Final = directory

    def open(self, name: str) -> SqliteStore:
        return SqliteStore(self._path(name))

    def size_bytes(self, name: str) -> int:
        return os.path.getsize(self._path(name))

    def close(self) -> None:
        """Do nothing: the directory is deleted as a whole."""

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, f"{name}.db")


class ServerPlace:
    """Schemas `rt_bench_…` of the database in `url`, which are dropped at the end."""

    def __init__(self, url: str) -> None:
        self._url: Final = url
        self._prefix: Final = f"rt_bench_{secrets.token_hex(4)}"
        self._schemas: set[str] = set()

    def open(self, name: str) -> PostgresStore:
        from rt.objects.postgres.store import PostgresStore

        schema = f"{self._prefix}_{name}"
        self._schemas.add(schema)
        return PostgresStore(self._url, schema=schema, timeout_s=3600, check=True)

    def size_bytes(self, name: str) -> int:
        ((size,),) = self._run("SELECT pg_total_relation_size(%s)", [f"{self._prefix}_{name}.rows"])
        return int(size)

    def close(self) -> None:
        for schema in sorted(self._schemas):
            self._run(f"DROP SCHEMA IF EXISTS {schema} CASCADE")

    def _run(self, statement: Any, values: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else []


def store_place(store: str | None, directory: str) -> StorePlace:
    """`store`: the URL of a server. None: files in the directory."""
    return FilePlace(directory) if store is None else ServerPlace(store)

"""`rt store`: check object stores, show their contents, and copy the file of a store.

Invariants:
- The store is not changed and not locked: a program may use it.
- Exit status 1 means damage, or that nothing was copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from msgspec.structs import asdict

from rt.cli.formats.console import show
from rt.cli.formats.tables import escape, format_size, table
from rt.cli.options import json_option, option
from rt.errors import InvalidOption
from rt.objects.core.store_status import StoreContents, StoreStatus
from rt.objects.sqlite_backup import back_up_store, check_store, store_contents

_URLS = ("postgresql://", "postgres://")


@click.group()
def store() -> None:
    """Check an object store, show what it holds, and copy it.

    It is a file (`rt.objects.SqliteStore`), or a schema on a PostgreSQL server (`rt.objects.PostgresStore`).
    """


@store.command()
@click.argument("store", metavar="FILE|URL")
@option("--schema", default="rt", show_default=True, help="Schema of the store on the server of URL.")
@json_option
def check(store: str, schema: str, as_json: bool) -> None:
    """Verify the last commit in FILE, or on the server of URL (postgresql://user@host/database).

    In FILE: every row, and that no commit was lost. On a server: every row. The store may be in use. Damage
    makes the exit status 1. The environment variable PGPASSWORD or the file ~/.pgpass can have the password,
    so that it is not on the command line.
    """
    status = _check_postgres(store, schema) if store.startswith(_URLS) else check_store(store)
    show(status, as_json=as_json, to_object=_object, to_lines=_lines)


@store.command("show")
@click.argument("store", metavar="FILE|URL")
@option("--schema", default="rt", show_default=True, help="Schema of the store on the server of URL.")
@option(
    "--top",
    default=20,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of objects to list. 0: all.",
)
@json_option
def show_contents(store: str, schema: str, top: int, as_json: bool) -> None:
    """Show what the last commit in FILE, or on the server of URL, holds: its objects, the largest first.

    An owner is a space, by its prefix, or "query": an engine of queries. Rows without an object are its index
    and its definitions. Rows are not verified: see `rt store check`. The store may be in use.
    """
    if store.startswith(_URLS):
        from rt.objects.postgres.check import postgres_contents

        found = postgres_contents(store, schema=schema)
    else:
        found = store_contents(store)
    show(found, as_json=as_json, to_object=_contents, to_lines=lambda each: _contents_lines(each, top))


@store.command()
@click.argument("file", metavar="FILE", type=click.Path())
@click.argument("to", metavar="TO", type=click.Path())
@option(
    "--accept-loss",
    is_flag=True,
    help="Copy a store that lost commits too, at the commit that can still be read.",
)
@json_option
def backup(file: str, to: str, accept_loss: bool, as_json: bool) -> None:
    """Copy the last commit in FILE into the new file TO, and verify the copy.

    The store may be in use. TO gets its name when it is complete and synced. It needs no other file.

    To restore it, stop the program, move FILE and the files FILE-* away, and copy TO to FILE.

    A store on a server is copied with pg_dump.
    """
    if file.startswith(_URLS):
        hint = "Use pg_dump --schema=NAME: it copies one commit, also while the store is in use."
        raise InvalidOption("rt store backup copies files only", where="FILE", hint=hint)
    copied = back_up_store(file, to, accept_loss=accept_loss)
    show(copied, as_json=as_json, to_object=_object, to_lines=_lines)


def _check_postgres(url: str, schema: str) -> StoreStatus:
    from rt.objects.postgres.check import check_postgres

    return check_postgres(url, schema=schema)


def _object(status: StoreStatus) -> dict[str, Any]:
    return {name: value for name, value in asdict(status).items() if value is not None}


def _contents(found: StoreContents) -> dict[str, Any]:
    return {**_object(found.status), "objects": [asdict(each) for each in found.objects]}


def _contents_lines(found: StoreContents, top: int) -> Iterator[str]:
    yield _summary(found.status, "")
    shown = found.objects[: top or None]
    rows = [
        [escape(each.owner), escape(each.object), f"{each.rows:,}", format_size(each.bytes)] for each in shown
    ]
    yield from table(("owner", "object", "rows", "size"), rows, right=frozenset({"rows", "size"}))
    if rest := found.objects[len(shown) :]:
        size = format_size(sum(each.bytes for each in rest))
        yield f"{len(rest):,} more with {sum(each.rows for each in rest):,} rows, {size}: --top 0 lists all"


def _lines(status: StoreStatus) -> Iterator[str]:
    yield _summary(status, "intact: ")


def _summary(status: StoreStatus, verdict: str) -> str:
    is_backup = status.is_complete and status.fence is None
    notes = "; in use by a program" if status.is_in_use else "; a backup" if is_backup else ""
    fence = "" if status.fence is None else f"; fencing token {status.fence}"
    return (
        f"{escape(status.path)}: {verdict}commit {status.commit:,}, {status.rows:,} rows "
        f"in {status.categories:,} categories{notes}; store {status.store_id}{fence}"
    )

"""The columns of `format("rt")`, and which of them a query reads. Pure.

A user's schema is a projection: some of the columns, in any order. Invariant: `value` and `headers` are read
and verified only if one of them is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from rt.errors import InvalidOption

HEADERS_KIND: Final = "array<struct<key:string,value:binary>>"
"""The same type as in Spark's Kafka source. Null if a message has no headers."""

COLUMNS: Final = {
    "position": "bigint",
    "timestamp": "timestamp",
    "session": "string",
    "number": "bigint",
    "topic": "string",
    "value": "binary",
    "headers": HEADERS_KIND,
    "timestamp_ns": "bigint",
    "run": "bigint",
}
"""The name and the Spark type of each column. `timestamp` has microseconds, like Spark's type. The exact
`timestamp_ns` and the `run` of the publisher are read only if a schema names them. A `number` is unique
within a `run`. `headers` are read if a schema names them, or with the option includeHeaders.
"""

_ON_REQUEST: Final = frozenset({"headers", "timestamp_ns", "run"})


def default_columns(*, include_headers: bool = False) -> tuple[str, ...]:
    """The columns that are read without a user's schema."""
    names = [name for name in COLUMNS if name not in _ON_REQUEST]
    return (*names, "headers") if include_headers else tuple(names)


def default_schema(*, include_headers: bool = False) -> str:
    """`default_columns` with their types, as SQL."""
    return ", ".join(f"{name} {COLUMNS[name]}" for name in default_columns(include_headers=include_headers))


def check_columns(fields: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Check `fields`, pairs of a name and Spark's type name; return the names. Raises `rt.InvalidOption`."""
    known = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    for name, kind in fields:
        if name not in COLUMNS:
            raise InvalidOption(
                f"the schema has an unknown column {name!r}", hint=f"The columns are {known}."
            )
        if kind != COLUMNS[name]:
            raise InvalidOption(
                f"the schema has the wrong type for column {name}",
                got=kind,
                expected=COLUMNS[name],
                hint="Cast it after reading: a schema only selects columns.",
            )
    names = tuple(name for name, _ in fields)
    if not names or len(set(names)) != len(names):
        raise InvalidOption("the schema is empty or has a duplicate column", hint=f"The columns are {known}.")
    return names


def timestamp_ns(when: datetime) -> int:
    """Nanoseconds since the Unix epoch. `when` must have a time zone."""
    # Not converted to UTC: the year could become 0 or 10,000.
    since = when - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000

"""The columns of `format("rt")`, and which of them a query reads.

Pure. A user's schema is a projection: some of the columns, in any order. Law: `value` is read and verified
only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rt.errors import InvalidOption

COLUMNS: Final = {
    "position": "bigint",
    "timestamp": "timestamp",
    "session": "string",
    "number": "bigint",
    "topic": "string",
    "value": "binary",
    "timestamp_ns": "bigint",
}
"""The type of each, as Spark spells it. `timestamp` has microseconds, as Spark's type; `timestamp_ns` is
there for who asks for it."""

SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items() if name != "timestamp_ns")
"""What is read without a user's schema."""


def check_columns(fields: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The names of `fields`, each a name and Spark's name of its type; `rt.InvalidOption` for others."""
    known = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    for name, kind in fields:
        if name not in COLUMNS:
            raise InvalidOption(f"the schema names a column {name!r}", hint=f"The columns are {known}.")
        if kind != COLUMNS[name]:
            raise InvalidOption(
                f"the schema gives the column {name} another type",
                got=kind,
                wanted=COLUMNS[name],
                hint="Cast it behind the source: a schema only says which columns are read.",
            )
    names = tuple(name for name, _ in fields)
    if not names or len(set(names)) != len(names):
        raise InvalidOption("the schema has no column, or one twice", hint=f"The columns are {known}.")
    return names

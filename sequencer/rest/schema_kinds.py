"""The kinds of JSON Schema that answers are described with (the dialect of OpenAPI 3.1).

Pure. Every field of a record is always there; one that is unknown is "", 0 or null as its description says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

Schema: TypeAlias = dict[str, Any]


def text(description: str) -> Schema:
    """A string."""
    return {"type": "string", "description": description}


def number(description: str, *, low: int | None = 0) -> Schema:
    """A whole number, of 64 bits, from `low`."""
    bounds = {} if low is None else {"minimum": low}
    return {"type": "integer", "format": "int64", "description": description, **bounds}


def flag(description: str) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": description}


def choice(description: str, options: Sequence[str]) -> Schema:
    """One of a few words."""
    return {"type": "string", "enum": list(options), "description": description}


def optional(schema: Schema) -> Schema:
    """The same, or null."""
    kind = schema["type"]
    return {**schema, "type": [kind, "null"]}


def array(items: Schema, description: str) -> Schema:
    """A list."""
    return {"type": "array", "items": items, "description": description}


def record(description: str, fields: dict[str, Schema]) -> Schema:
    """An object with just these fields."""
    return {
        "type": "object",
        "description": description,
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


TIME: Final = "RFC 3339, nanoseconds; empty: never"

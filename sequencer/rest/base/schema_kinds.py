"""Constructors of JSON Schema (dialect of OpenAPI 3.1) for responses. Pure.

Every field of a record is always present. An unknown value is "", 0 or null, as its description says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

Schema: TypeAlias = dict[str, Any]


def text(description: str) -> Schema:
    return {"type": "string", "description": description}


def number(description: str, *, low: int | None = 0) -> Schema:
    """A 64-bit integer with minimum `low`."""
    bounds = {} if low is None else {"minimum": low}
    return {"type": "integer", "format": "int64", "description": description, **bounds}


def flag(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def choice(description: str, options: Sequence[str]) -> Schema:
    return {"type": "string", "enum": list(options), "description": description}


def optional(schema: Schema) -> Schema:
    kind = schema["type"]
    return {**schema, "type": [kind, "null"]}


def array(items: Schema, description: str) -> Schema:
    return {"type": "array", "items": items, "description": description}


def record(description: str, fields: dict[str, Schema]) -> Schema:
    """An object with exactly these fields, all required."""
    return {
        "type": "object",
        "description": description,
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


TIME: Final = "RFC 3339 with nanoseconds. Empty: never"

"""Rows as JSON text. Plain values are not traversed in Python.

The text equals that of `rt.objects.ANY`, and `ANY.load` reads it.
"""

from __future__ import annotations

from typing import Any, Final

from rt.objects import ANY, StateDamaged
from rt.objects.core import typed_json

_PLAIN: Final = frozenset({str, bool, type(None)})
_SHORT: Final = 2**63


def plain(value: Any) -> Any:
    """Convert a value of a user or operator to values that JSON can express.

    `NotSerializable` if that is not possible.
    """
    kind = type(value)
    if kind in _PLAIN or (kind is int and -_SHORT < value < _SHORT):
        return value
    typed_json.check(value)
    return typed_json.plain(value)


def encode(row: dict[str, Any]) -> bytes:
    """A row of plain values."""
    return typed_json.encode_plain(row)


def decode(data: bytes, where: str, *keys: str) -> dict[str, Any]:
    """Read a row; `StateDamaged` if it is not a JSON object with these keys."""
    found = ANY.load(data)
    if type(found) is not dict or not found.keys() >= set(keys):
        expected = f"a JSON object with {', '.join(keys)}" if keys else "a JSON object"
        hint = "Restore the store from a backup."
        raise StateDamaged("damaged row", where=where, got=repr(data[:60]), expected=expected, hint=hint)
    return found

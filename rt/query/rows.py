"""Rows as JSON text, made without walking through what is known to be plain.

The text is what `rt.objects.ANY` makes of the same value, and `ANY.load` reads it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from rt.objects import json_values

_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_PLAIN: Final = frozenset({str, bool, type(None)})
_SHORT: Final = 2**63


def plain(value: Any) -> Any:
    """A value of a user's or an operator's as JSON has words for it; `NotSerializable` if it has none."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and -_SHORT < value < _SHORT):
        return value
    json_values.check(value)
    return json_values.plain(value)


def encode(row: dict[str, Any]) -> bytes:
    """A row whose values are plain."""
    return _encode(row).encode()

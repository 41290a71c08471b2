"""Messages between a process and its children: lines of JSON, `{"type": "finish", "number": 3}`.

The messages of a protocol are a union of tagged `msgspec.Struct`s, whose annotations are checked. Pure.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

LINE_BYTES_MAX: Final = 16 * 2**20
"""The rest of a longer line is dropped, so that it is no message."""


def encode_line(message: msgspec.Struct) -> bytes:
    """Returns the line with its newline. Raises `TypeError` if a field cannot be encoded."""
    # The encoder of msgspec rejects paths that are not Unicode.
    return json.dumps(msgspec.to_builtins(message, builtin_types=(bytes,))).encode() + b"\n"


def decode_line(line: bytes, kind: Any) -> Any:
    """The message in a line; None if it is not one of `kind`, a class or a union of classes."""
    try:
        return msgspec.convert(json.loads(line), kind)
    except (ValueError, RecursionError):
        return None


class LineBuffer:
    """Splits received bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        """Add `data` and return the lines that are complete."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:LINE_BYTES_MAX]
        return lines

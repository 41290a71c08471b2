"""The state of one key as bytes: the content of its store. Pure.

The bytes are:

    version u8 = 1, number of categories u32
    for every category:  name, number of rows u32
        for every row:   name, data

Names and data are a length u32, then that many bytes. Names are UTF-8. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from rt.errors import UnknownVersion
from rt.objects import StateDamaged

VERSION: Final = 1

_LENGTH: Final = struct.Struct("<I")


def encode_state(content: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """Encode the content. The same content in the same order gives the same bytes."""
    pack = _LENGTH.pack
    parts = [bytes((VERSION,)), pack(len(content))]
    for category, rows in content.items():
        name = category.encode()
        parts += pack(len(name)), name, pack(len(rows))
        for key, data in rows.items():
            name = key.encode()
            parts += pack(len(name)), name, pack(len(data)), data
    return b"".join(parts)


def decode_state(data: bytes) -> dict[str, dict[str, bytes]]:
    """Decode the content. Raises `rt.UnknownVersion` or `StateDamaged`."""
    if data[:1] != bytes((VERSION,)):
        what = "the state of a key has an unknown version"
        got, hint = data[:1].hex() or "no bytes", "Use a newer rt."
        raise UnknownVersion(what, got=got, expected=VERSION, hint=hint)
    content: dict[str, dict[str, bytes]] = {}
    try:
        count, place = _number(data, 1)
        for _ in range(count):
            category, place = _read(data, place)
            row_count, place = _number(data, place)
            rows = content[category.decode()] = {}
            for _ in range(row_count):
                key, place = _read(data, place)
                rows[key.decode()], place = _read(data, place)
    except (struct.error, UnicodeDecodeError) as error:
        raise _damaged(data, str(error)) from None
    if place != len(data):
        raise _damaged(data, f"{place} bytes")
    return content


def _number(data: bytes, place: int) -> tuple[int, int]:
    """The number at offset `place`, and the offset after it."""
    return _LENGTH.unpack_from(data, place)[0], place + _LENGTH.size


def _read(data: bytes, place: int) -> tuple[bytes, int]:
    """The bytes at offset `place`, and the offset after them."""
    length, start = _number(data, place)
    end = start + length
    if end > len(data):
        raise _damaged(data, f"{length} bytes at {start}")
    return data[start:end], end


def _damaged(data: bytes, expected: str) -> StateDamaged:
    return StateDamaged("damaged state of a key", got=f"{len(data)} bytes", expected=expected)

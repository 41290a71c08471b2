"""Arrays of bytes and of numbers as PostgreSQL receives them in binary: several times faster than psycopg's.

dimensions i32, has nulls i32, type oid u32, length i32, lower bound i32
then for each element: its size i32 (-1: null), its bytes                      big-endian
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec import Struct
from psycopg import Connection
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

_HEAD = struct.Struct("!iiIii")
_SIZE = struct.Struct("!i")
_BYTEA, _BIGINT = 17, 20
_BYTEA_ARRAY, _BIGINT_ARRAY = 1001, 1016


class ByteaArray(Struct, frozen=True):
    items: Sequence[bytes | None]


class BigintArray(Struct, frozen=True):
    items: Sequence[int]


class _ByteaArrayDumper(Dumper):
    format = Format.BINARY
    oid = _BYTEA_ARRAY

    def dump(self, obj: ByteaArray) -> Buffer:
        items, size = obj.items, _SIZE.pack
        parts = [b""] * (2 * len(items))
        parts[::2] = [size(-1 if each is None else len(each)) for each in items]
        parts[1::2] = [each or b"" for each in items]
        return _HEAD.pack(1, 1, _BYTEA, len(items), 1) + b"".join(parts)


class _BigintArrayDumper(Dumper):
    format = Format.BINARY
    oid = _BIGINT_ARRAY

    def dump(self, obj: BigintArray) -> Buffer:
        items = obj.items
        columns: list[int] = [8] * (2 * len(items))
        columns[1::2] = items
        return _HEAD.pack(1, 0, _BIGINT, len(items), 1) + struct.pack("!" + "iq" * len(items), *columns)


def register(connection: Connection[tuple[object, ...]]) -> None:
    """Let the connection send `ByteaArray` and `BigintArray`."""
    connection.adapters.register_dumper(ByteaArray, _ByteaArrayDumper)
    connection.adapters.register_dumper(BigintArray, _BigintArrayDumper)

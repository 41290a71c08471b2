"""A key and a value as one row, as dictionaries store them.

Both JSON: `{"key":…,"value":…}`. Else: the length of the key's bytes, 4 bytes little-endian, then the key's
bytes, then the value's.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

from rt.objects import json_values
from rt.objects.errors import StateDamaged
from rt.objects.serializers import JsonSerializer, Serializer

K = TypeVar("K")
V = TypeVar("V")

_LENGTH = struct.Struct("<I")


class Pairs(Generic[K, V]):
    """Rows of keys that `keys` serializes, and values that `values` does."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Serializer[K], values: Serializer[V]) -> None:
        self.keys = keys
        self.values = values

    def dump(self, key: K, value: V) -> bytes:
        """The row."""
        first, second = self.keys.dump(key), self.values.dump(value)
        if isinstance(self.keys, JsonSerializer) and isinstance(self.values, JsonSerializer):
            return b'{"key":%b,"value":%b}' % (first, second)
        return b"%b%b%b" % (_LENGTH.pack(len(first)), first, second)

    def load(self, data: bytes) -> tuple[K, V]:
        """Key and value; `StateDamaged` where that is no such row."""
        if isinstance(self.keys, JsonSerializer) and isinstance(self.values, JsonSerializer):
            pair = json_values.decode(data)
            if type(pair) is not dict or pair.keys() != {"key", "value"}:
                raise StateDamaged("not a row of a key and a value", got=repr(data[:60]))
            return self.keys.of_plain(pair["key"]), self.values.of_plain(pair["value"])
        if len(data) < _LENGTH.size or (end := _LENGTH.size + _LENGTH.unpack_from(data)[0]) > len(data):
            raise StateDamaged("not a row of a key and a value", got=repr(data[:60]))
        return self.keys.load(data[_LENGTH.size : end]), self.values.load(data[end:])

"""Persisted dictionaries, unsorted and sorted.

    items/<slot>    the key and its value

The interface is that of `dict`.

A row is `{"key":…,"value":…}` if both serializers are JSON. Otherwise: the length of the key's bytes
(4 bytes, little-endian), the key's bytes, the value's bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, Reversible
from typing import Any, Generic, TypeVar

from rt.objects.collections.keyed import Keyed, unchanged
from rt.objects.collections.sorted_keys import SortedKeys
from rt.objects.core import typed_json
from rt.objects.core.errors import StateDamaged
from rt.objects.core.persisted import Kind, ObjectOwner, StoredRows
from rt.objects.core.serializers import JsonValueSerializer, ValueSerializer
from rt.objects.core.store import ITEMS

K = TypeVar("K")
V = TypeVar("V")


class PersistedDictionary(Keyed[K], MutableMapping[K, V]):
    """Values by hashable keys. A change inside a value is not saved: assign the value again."""

    __slots__ = ("_pairs", "_values")

    KIND = Kind.DICTIONARY

    def __init__(
        self, owner: ObjectOwner, object_id: str, keys: ValueSerializer[K], values: ValueSerializer[V]
    ) -> None:
        super().__init__(owner, object_id, keys, values)
        self._pairs = Pairs(keys, values)
        self._values: list[Any] = []  # by slot

    def __getitem__(self, key: K) -> V:
        return self._values[self._slot_by_key[key]]  # type: ignore[no-any-return]

    def get(self, key: K, default: Any = None) -> Any:
        slot = self._slot_by_key.get(key)
        return default if slot is None else self._values[slot]

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    # Edits

    def __setitem__(self, key: K, value: V) -> None:
        slot = self._slot_by_key.get(key)
        self._pairs.values.check(value)
        if slot is None:
            self._pairs.keys.check(key)
            key = typed_json.key_of(key)
            slot = self._slot_by_key.get(key)
        if not self._is_marked:
            self.mark()
        if slot is None:
            slot = self._add_key(key)
            if slot == len(self._values):
                self._values.append(None)
        else:
            self._edits.touch(slot)
        self._values[slot] = value

    def add(self, key: K, value: V) -> None:
        """Add a new key; `ValueError` if it exists."""
        if key in self._slot_by_key:
            raise ValueError(f"the key exists: {key!r}")
        self[key] = value

    def __delitem__(self, key: K) -> None:
        if key not in self._slot_by_key:
            raise KeyError(key)
        if not self._is_marked:
            self.mark()
        self._values[self._remove_key(key)] = None
        del self._values[len(self._slots.entries) :]

    def popitem(self) -> tuple[K, V]:
        """Remove and return the item in the highest slot; `KeyError` if the dictionary is empty."""
        key = self._last_key()
        return key, self.pop(key)

    def clear(self) -> None:
        super().clear()
        self._values.clear()

    # Saving and loading

    def _dump(self, key: K) -> bytes:
        return self._pairs.dump(key, self._values[self._slot_by_key[key]])

    def _load(self, rows: StoredRows) -> None:
        values: dict[int, V] = {}

        def keys() -> Iterator[tuple[int, K]]:
            for slot, (key, value) in rows.slots(ITEMS, self._pairs.load):
                values[slot] = value
                yield slot, key

        self._load_keys(rows, keys())
        self._values = [values.get(slot) for slot in range(len(self._slots.entries))]


class _Items(ItemsView[K, V]):
    """Like `ItemsView`, but without a call for each item."""

    __slots__ = ()
    _mapping: PersistedDictionary[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        found, values = self._mapping._slot_by_key, self._mapping._values
        return ((key, values[found[key]]) for key in self._mapping)


class PersistedSortedDictionary(PersistedDictionary[K, V], Reversible[K]):
    """A dictionary whose keys have a total order (`<`). Iterates ascending.

    A key that cannot be compared with the others raises `TypeError`; NaN raises `ValueError`.
    """

    __slots__ = ()

    KIND = Kind.SORTED_DICTIONARY
    IS_SORTED = True
    _order: SortedKeys[K]

    def __reversed__(self) -> Iterator[K]:
        return unchanged(self._order.between_reversed(), self._slot_by_key)

    def min(self) -> K:
        """The least key; `ValueError` if the dictionary is empty."""
        return self._order.least

    def max(self) -> K:
        """The greatest key; `ValueError` if the dictionary is empty."""
        return self._order.greatest

    def between(self, low: K | None = None, high: K | None = None) -> Iterator[K]:
        """Keys from `low` to `high`, both included, ascending. None: no bound."""
        return unchanged(self._order.between(low, high), self._slot_by_key)


_LENGTH = struct.Struct("<I")


class Pairs(Generic[K, V]):
    """Rows of a key and a value."""

    __slots__ = ("_is_plain", "_of_plain", "keys", "values")

    def __init__(self, keys: ValueSerializer[K], values: ValueSerializer[V]) -> None:
        self.keys = keys
        self.values = values
        self._of_plain: tuple[Callable[[Any], K], Callable[[Any], V]] | None = None
        """If rows are JSON: the functions that turn decoded JSON into a key and into a value."""
        if isinstance(keys, JsonValueSerializer) and isinstance(values, JsonValueSerializer):
            self._of_plain = keys.of_plain, values.of_plain
            self._is_plain = keys.is_plain and values.is_plain

    def dump(self, key: K, value: V) -> bytes:
        first, second = self.keys.dump(key), self.values.dump(value)
        if self._of_plain is not None:
            return b'{"key":%b,"value":%b}' % (first, second)
        return b"%b%b%b" % (_LENGTH.pack(len(first)), first, second)

    def load(self, data: bytes) -> tuple[K, V]:
        """Key and value; `StateDamaged` if `data` is not such a row."""
        if self._of_plain is not None:
            pair = typed_json.decode(data)
            if type(pair) is not dict or len(pair) != 2 or "key" not in pair or "value" not in pair:
                raise StateDamaged("not a row of a key and a value", got=repr(data[:60]))
            if self._is_plain:
                return pair["key"], pair["value"]
            of_key, of_value = self._of_plain
            return of_key(pair["key"]), of_value(pair["value"])
        if len(data) < _LENGTH.size or (end := _LENGTH.size + _LENGTH.unpack_from(data)[0]) > len(data):
            raise StateDamaged("not a row of a key and a value", got=repr(data[:60]))
        return self.keys.load(data[_LENGTH.size : end]), self.values.load(data[end:])

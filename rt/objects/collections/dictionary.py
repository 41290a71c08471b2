"""Persisted dictionaries, unsorted and sorted: one row for each key.

    items/<slot>    the key and its value

The interface is that of `dict`. An unsorted dictionary iterates in the order of slots, which a reload keeps.

A row is `{"key":…,"value":…}` if both serializers are JSON. Otherwise: the length of the key's bytes
(4 bytes, little-endian), the key's bytes, the value's bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, MutableMapping, Reversible
from typing import Any, Generic, TypeVar

from rt.objects.collections.slots import Edits, Free, Slots, write_all
from rt.objects.collections.sorted_keys import SortedKeys
from rt.objects.core import typed_json
from rt.objects.core.errors import StateDamaged
from rt.objects.core.persisted import Kind, ObjectOwner, Persisted, StoredRows
from rt.objects.core.serializers import JsonSerializer, Serializer
from rt.objects.core.store import ITEMS, ObjectRows

K = TypeVar("K")
V = TypeVar("V")


class PersistedDictionary(Persisted, MutableMapping[K, V]):
    """Values by hashable keys. A change inside a value is not saved: assign the value again."""

    __slots__ = ("_edits", "_pairs", "_slot_by_key", "_slots", "_values")

    KIND = Kind.DICTIONARY
    PARTS = (ITEMS,)

    def __init__(
        self, owner: ObjectOwner, object_id: str, keys: Serializer[K], values: Serializer[V]
    ) -> None:
        super().__init__(owner, object_id, keys, values)
        self._pairs = Pairs(keys, values)
        self._slot_by_key: dict[K, int] = {}
        self._slots: Slots[K] = Slots()
        self._values: list[Any] = []  # by slot
        self._edits = Edits()

    def __len__(self) -> int:
        return len(self._slot_by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_by_key

    def __iter__(self) -> Iterator[K]:
        return self._slots.each(self._slot_by_key)

    def __getitem__(self, key: K) -> V:
        return self._values[self._slot_by_key[key]]  # type: ignore[no-any-return]

    def get(self, key: K, default: Any = None) -> Any:
        slot = self._slot_by_key.get(key)
        return default if slot is None else self._values[slot]

    # Edits

    def __setitem__(self, key: K, value: V) -> None:
        slot = self._slot_by_key.get(key)
        self._pairs.values.check(value)
        if slot is None:
            self._pairs.keys.check(key)
        if not self._is_marked:
            self._mark()
        if slot is None:
            slot = self._add_key(key)
        self._values[slot] = value
        self._edits.touch(slot)

    def add(self, key: K, value: V) -> None:
        """Add a new key; `ValueError` if it exists."""
        if key in self._slot_by_key:
            raise ValueError(f"the key exists: {key!r}")
        self[key] = value

    def __delitem__(self, key: K) -> None:
        slot = self._slot_by_key[key]
        if not self._is_marked:
            self._mark()
        self._before_remove(key)
        del self._slot_by_key[key]
        self._slots.remove(slot)
        self._values[slot] = None
        del self._values[len(self._slots.entries) :]
        self._edits.touch(slot)

    def popitem(self) -> tuple[K, V]:
        """Remove and return the item in the highest slot; `KeyError` if the dictionary is empty."""
        if not self._slot_by_key:
            raise KeyError("popitem of an empty dictionary")
        key = self._slots.entries[-1]
        assert not isinstance(key, Free)
        return key, self.pop(key)

    def clear(self) -> None:
        if not self._is_marked:
            self._mark()
        self._slot_by_key.clear()
        self._slots.clear()
        self._values.clear()
        self._edits.mark_all()

    def _add_key(self, key: K) -> int:
        self._before_add(key)
        slot = self._slot_by_key[key] = self._slots.add(key)
        if slot == len(self._values):
            self._values.append(None)
        return slot

    # Overridden by the sorted dictionary

    def _before_add(self, key: K) -> None:
        """Called before a key is added. May raise to refuse it; nothing is changed then."""

    def _before_remove(self, key: K) -> None:
        """Called before a key is removed."""

    # Saving and loading

    def _dump(self, key: K) -> bytes:
        return self._pairs.dump(key, self._values[self._slot_by_key[key]])

    def _is_whole(self) -> bool:
        return self._edits.edited is None

    def _write_whole(self, rows: ObjectRows) -> None:
        write_all(rows, ITEMS, self._slots, self._dump)

    def _write_changes(self, rows: ObjectRows) -> None:
        self._edits.write(rows, ITEMS, self._slots, self._dump)

    def _start_save(self) -> None:
        self._edits.start_save(len(self._slots.entries))

    def _finish_save(self) -> None:
        self._edits.finish_save()

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        self._edits.abort_save(unknown_outcome=unknown_outcome)

    def _load(self, rows: StoredRows) -> None:
        values: dict[int, V] = {}

        def keys() -> Iterator[tuple[int, K]]:
            for slot, (key, value) in rows.slots(ITEMS, self._pairs.load):
                values[slot] = value
                yield slot, key

        self._slots.load(rows, ITEMS, keys())
        end = len(self._slots.entries)
        self._values = [values.get(slot) for slot in range(end)]
        self._edits.mark_none(end)
        try:
            self._slot_by_key = {key: slot for slot, key in self._slots.numbered()}
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error
        if len(self._slot_by_key) != len(values):
            raise rows.damaged(ITEMS, "a key is stored twice")


class PersistedSortedDictionary(PersistedDictionary[K, V], Reversible[K]):
    """A dictionary whose keys have a total order (`<`). Iterates ascending.

    A key that cannot be compared with the others raises `TypeError`; NaN raises `ValueError`.
    """

    __slots__ = ("_keys",)

    KIND = Kind.SORTED_DICTIONARY

    def __init__(
        self, owner: ObjectOwner, object_id: str, keys: Serializer[K], values: Serializer[V]
    ) -> None:
        super().__init__(owner, object_id, keys, values)
        self._keys: SortedKeys[K] = SortedKeys()

    def __iter__(self) -> Iterator[K]:
        return self._check_size(self._keys.between())

    def __reversed__(self) -> Iterator[K]:
        return self._check_size(self._keys.between_reversed())

    def min(self) -> K:
        """The least key; `ValueError` if the dictionary is empty."""
        if not self._slot_by_key:
            raise ValueError("min of an empty dictionary")
        return self._keys.least

    def max(self) -> K:
        """The greatest key; `ValueError` if the dictionary is empty."""
        if not self._slot_by_key:
            raise ValueError("max of an empty dictionary")
        return self._keys.greatest

    def between(self, low: K | None = None, high: K | None = None) -> Iterator[K]:
        """Keys from `low` to `high`, both included, ascending. None: no bound."""
        return self._check_size(self._keys.between(low, high))

    def clear(self) -> None:
        super().clear()
        self._keys.clear()

    def _check_size(self, keys: Iterator[K]) -> Iterator[K]:
        size = len(self._slot_by_key)
        for key in keys:
            yield key
            if len(self._slot_by_key) != size:
                raise RuntimeError("the dictionary changed size during iteration")

    def _before_add(self, key: K) -> None:
        self._keys.add(key)

    def _before_remove(self, key: K) -> None:
        self._keys.remove(key)

    def _load(self, rows: StoredRows) -> None:
        super()._load(rows)
        try:
            self._keys = SortedKeys(self._slot_by_key)
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error


_LENGTH = struct.Struct("<I")


class Pairs(Generic[K, V]):
    """Rows of a key and a value."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Serializer[K], values: Serializer[V]) -> None:
        self.keys = keys
        self.values = values

    def dump(self, key: K, value: V) -> bytes:
        first, second = self.keys.dump(key), self.values.dump(value)
        if isinstance(self.keys, JsonSerializer) and isinstance(self.values, JsonSerializer):
            return b'{"key":%b,"value":%b}' % (first, second)
        return b"%b%b%b" % (_LENGTH.pack(len(first)), first, second)

    def load(self, data: bytes) -> tuple[K, V]:
        """Key and value; `StateDamaged` if `data` is not such a row."""
        if isinstance(self.keys, JsonSerializer) and isinstance(self.values, JsonSerializer):
            pair = typed_json.decode(data)
            if type(pair) is not dict or pair.keys() != {"key", "value"}:
                raise StateDamaged("not a row of a key and a value", got=repr(data[:60]))
            return self.keys.of_plain(pair["key"]), self.values.of_plain(pair["value"])
        if len(data) < _LENGTH.size or (end := _LENGTH.size + _LENGTH.unpack_from(data)[0]) > len(data):
            raise StateDamaged("not a row of a key and a value", got=repr(data[:60]))
        return self.keys.load(data[_LENGTH.size : end]), self.values.load(data[end:])

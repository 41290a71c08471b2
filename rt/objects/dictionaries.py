"""Persisted dictionaries, unsorted and sorted: one row a key.

    items/<slot>    the key and its value, as in `pairs.py`

The interface is that of `dict`. An unsorted one iterates in the order of slots, which is the same after a
reload.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Reversible
from typing import Any, TypeVar

from rt.objects.pairs import Pairs
from rt.objects.persisted import Kind, Owner, Persisted, StoredRows
from rt.objects.serializers import Serializer
from rt.objects.slots import Edits, Free, Slots, write_all
from rt.objects.sorted_keys import SortedKeys
from rt.objects.storing import ITEMS, Rows

K = TypeVar("K")
V = TypeVar("V")


class PersistedDictionary(Persisted, MutableMapping[K, V]):
    """Values by hashable keys. A change inside a value is not seen: assign it again."""

    __slots__ = ("_edits", "_pairs", "_places", "_slots", "_values")

    KIND = Kind.DICTIONARY
    PARTS = (ITEMS,)

    def __init__(self, owner: Owner, object_id: str, keys: Serializer[K], values: Serializer[V]) -> None:
        super().__init__(owner, object_id, keys, values)
        self._pairs = Pairs(keys, values)
        self._places: dict[K, int] = {}
        self._slots: Slots[K] = Slots()
        self._values: list[Any] = []  # by slot
        self._edits = Edits()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[K]:
        return self._slots.each(self._places)

    def __getitem__(self, key: K) -> V:
        return self._values[self._places[key]]  # type: ignore[no-any-return]

    def get(self, key: K, default: Any = None) -> Any:
        """The value, or `default`."""
        slot = self._places.get(key)
        return default if slot is None else self._values[slot]

    # Edits

    def __setitem__(self, key: K, value: V) -> None:
        slot = self._places.get(key)
        self._pairs.values.check(value)
        if slot is None:
            self._pairs.keys.check(key)
        if not self._is_marked:
            self._mark()
        if slot is None:
            slot = self._place(key)
        self._values[slot] = value
        self._edits.touch(slot)

    def add(self, key: K, value: V) -> None:
        """Add a key that is not there; `ValueError` if it is."""
        if key in self._places:
            raise ValueError(f"the key is there already: {key!r}")
        self[key] = value

    def __delitem__(self, key: K) -> None:
        slot = self._places[key]
        if not self._is_marked:
            self._mark()
        self._dismiss(key)
        del self._places[key]
        self._slots.remove(slot)
        self._values[slot] = None
        del self._values[len(self._slots.entries) :]
        self._edits.touch(slot)

    def popitem(self) -> tuple[K, V]:
        """Take one out, the one of the highest slot; `KeyError` if there is none."""
        if not self._places:
            raise KeyError("popitem of an empty dictionary")
        key = self._slots.entries[-1]
        assert not isinstance(key, Free)
        return key, self.pop(key)

    def clear(self) -> None:
        """Take all out."""
        if not self._is_marked:
            self._mark()
        self._places.clear()
        self._slots.clear()
        self._values.clear()
        self._edits.forget()

    def _place(self, key: K) -> int:
        self._admit(key)
        slot = self._places[key] = self._slots.add(key)
        if slot == len(self._values):
            self._values.append(None)
        return slot

    # What a sorted one does besides

    def _admit(self, key: K) -> None:
        """A key is about to come in; raising keeps it out, with nothing changed."""

    def _dismiss(self, key: K) -> None:
        """A key is about to leave."""

    # Saving and loading

    def _dump(self, key: K) -> bytes:
        return self._pairs.dump(key, self._values[self._places[key]])

    def _is_whole(self) -> bool:
        return self._edits.edited is None

    def _write_whole(self, rows: Rows) -> None:
        write_all(rows, ITEMS, self._slots, self._dump)

    def _write_changes(self, rows: Rows) -> None:
        self._edits.write(rows, ITEMS, self._slots, self._dump)

    def _take_off(self) -> None:
        self._edits.take_off(len(self._slots.entries))

    def _land(self) -> None:
        self._edits.land()

    def _turn_back(self, *, unknown_outcome: bool) -> None:
        self._edits.turn_back(unknown_outcome=unknown_outcome)

    def _load(self, rows: StoredRows) -> None:
        values: dict[int, V] = {}

        def keys() -> Iterator[tuple[int, K]]:
            for slot, (key, value) in rows.slots(ITEMS, self._pairs.load):
                values[slot] = value
                yield slot, key

        self._slots.load(rows, ITEMS, keys())
        end = len(self._slots.entries)
        self._values = [values.get(slot) for slot in range(end)]
        self._edits.loaded(end)
        try:
            self._places = {key: slot for slot, key in self._slots.numbered()}
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error
        if len(self._places) != len(values):
            raise rows.damaged(ITEMS, "a key is there twice")


class PersistedSortedDictionary(PersistedDictionary[K, V], Reversible[K]):
    """A dictionary of keys that have a total order (`<`); iterates ascending.

    A key that does not compare with the others is kept out with `TypeError`, a NaN with `ValueError`.
    """

    __slots__ = ("_keys",)

    KIND = Kind.SORTED_DICTIONARY

    def __init__(self, owner: Owner, object_id: str, keys: Serializer[K], values: Serializer[V]) -> None:
        super().__init__(owner, object_id, keys, values)
        self._keys: SortedKeys[K] = SortedKeys()

    def __iter__(self) -> Iterator[K]:
        return self._watched(self._keys.between())

    def __reversed__(self) -> Iterator[K]:
        return self._watched(self._keys.between_reversed())

    def min(self) -> K:
        """The least key; `ValueError` if it is empty."""
        if not self._places:
            raise ValueError("min of an empty dictionary")
        return self._keys.least

    def max(self) -> K:
        """The greatest key; `ValueError` if it is empty."""
        if not self._places:
            raise ValueError("max of an empty dictionary")
        return self._keys.greatest

    def between(self, low: K | None = None, high: K | None = None) -> Iterator[K]:
        """Keys from `low` to `high`, both included, ascending; None: without bound."""
        return self._watched(self._keys.between(low, high))

    def clear(self) -> None:
        """Take all out."""
        super().clear()
        self._keys.clear()

    def _watched(self, keys: Iterator[K]) -> Iterator[K]:
        size = len(self._places)
        for key in keys:
            yield key
            if len(self._places) != size:
                raise RuntimeError("the dictionary changed its size during iteration")

    def _admit(self, key: K) -> None:
        self._keys.add(key)

    def _dismiss(self, key: K) -> None:
        self._keys.remove(key)

    def _load(self, rows: StoredRows) -> None:
        super()._load(rows)
        try:
            self._keys = SortedKeys(self._places)
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error

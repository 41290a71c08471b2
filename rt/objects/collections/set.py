"""A persisted set.

    items/<slot>    the element

The interface is that of `set`; operators between sets return plain sets.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSet
from typing import Any, Self, TypeVar

from rt.objects.collections.keyed import Keyed
from rt.objects.core.persisted import Kind, StoredRows
from rt.objects.core.store import ITEMS
from rt.objects.core.typed_json import key_of

T = TypeVar("T")


class PersistedSet(Keyed[T], MutableSet[T]):
    """Distinct hashable elements."""

    __slots__ = ()

    KIND = Kind.SET

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> set[Any]:
        return set(values)

    # Edits

    def add(self, value: T) -> bool:  # type: ignore[override]
        """Returns whether the element is new."""
        if value in self._slot_by_key:
            return False
        self._serializers[0].check(value)
        if (key := key_of(value)) in self._slot_by_key:
            return False
        if not self._is_marked:
            self.mark()
        self._add_key(key)
        return True

    def discard(self, value: T) -> bool:  # type: ignore[override]
        """Returns whether the element was in the set."""
        if value not in self._slot_by_key:
            return False
        if not self._is_marked:
            self.mark()
        self._remove_key(value)
        return True

    def remove(self, value: T) -> None:
        """`KeyError` if the element is not in the set."""
        if not self.discard(value):
            raise KeyError(value)

    def pop(self) -> T:
        """Remove and return the element in the highest slot; `KeyError` if the set is empty."""
        value = self._last_key()
        self.discard(value)
        return value

    def update(self, *others: Iterable[T]) -> None:
        for other in others:
            for value in list(other):  # a copy: it may be this set or a view of it
                self.add(value)

    def difference_update(self, *others: Iterable[Any]) -> None:
        for other in others:
            for value in list(other):  # a copy: it may be this set or a view of it
                self.discard(value)

    def intersection_update(self, *others: Iterable[Any]) -> None:
        kept = set(self._slot_by_key).intersection(*others)
        for value in [value for value in self if value not in kept]:
            self.discard(value)

    def symmetric_difference_update(self, other: Iterable[T]) -> None:
        for value in dict.fromkeys(other):
            if not self.discard(value):
                self.add(value)

    def __iand__(self, other: Iterable[Any]) -> Self:
        self.intersection_update(other)
        return self

    # Methods of `set` that return plain values

    def union(self, *others: Iterable[Any]) -> set[Any]:
        return set(self).union(*others)

    def intersection(self, *others: Iterable[Any]) -> set[T]:
        return set(self._slot_by_key).intersection(*others)

    def difference(self, *others: Iterable[Any]) -> set[T]:
        return set(self._slot_by_key).difference(*others)

    def symmetric_difference(self, other: Iterable[Any]) -> set[Any]:
        return set(self._slot_by_key).symmetric_difference(other)

    def issubset(self, other: Iterable[Any]) -> bool:
        return self._slot_by_key.keys() <= set(other)

    def issuperset(self, other: Iterable[Any]) -> bool:
        return all(value in self._slot_by_key for value in other)

    def overlaps(self, other: Iterable[Any]) -> bool:
        """Whether a value of `other` is in the set."""
        return any(value in self._slot_by_key for value in other)

    # Saving and loading

    def _dump(self, key: T) -> bytes:
        return self._serializers[0].dump(key)

    def _load(self, rows: StoredRows) -> None:
        self._load_keys(rows, rows.slots(ITEMS, self._serializers[0].load))

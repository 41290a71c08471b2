"""A persisted set: one row for each element.

    items/<slot>    the element

The interface is that of `set`; operators between sets return plain sets. Iterates in the order of slots,
which a reload keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any, Self, TypeVar

from rt.objects.collections.slots import Edits, Free, Slots, write_all
from rt.objects.core.persisted import Kind, ObjectOwner, Persisted, StoredRows
from rt.objects.core.serializers import Serializer
from rt.objects.core.store import ITEMS, ObjectRows

T = TypeVar("T")


class PersistedSet(Persisted, MutableSet[T]):
    """Distinct hashable elements."""

    __slots__ = ("_edits", "_slot_by_key", "_slots")

    KIND = Kind.SET
    PARTS = (ITEMS,)

    def __init__(self, owner: ObjectOwner, object_id: str, serializer: Serializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._slot_by_key: dict[T, int] = {}
        self._slots: Slots[T] = Slots()
        self._edits = Edits()

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> set[Any]:
        return set(values)

    def __len__(self) -> int:
        return len(self._slot_by_key)

    def __contains__(self, value: object) -> bool:
        return value in self._slot_by_key

    def __iter__(self) -> Iterator[T]:
        return self._slots.each(self._slot_by_key)

    # Edits

    def add(self, value: T) -> bool:  # type: ignore[override]
        """Returns whether the element is new."""
        if value in self._slot_by_key:
            return False
        self._serializers[0].check(value)
        if not self._is_marked:
            self._mark()
        self._before_add(value)
        slot = self._slot_by_key[value] = self._slots.add(value)
        self._edits.touch(slot)
        return True

    def discard(self, value: T) -> bool:  # type: ignore[override]
        """Returns whether the element was in the set."""
        if value not in self._slot_by_key:
            return False
        if not self._is_marked:
            self._mark()
        self._before_remove(value)
        slot = self._slot_by_key.pop(value)
        self._slots.remove(slot)
        self._edits.touch(slot)
        return True

    def remove(self, value: T) -> None:
        """`KeyError` if the element is not in the set."""
        if not self.discard(value):
            raise KeyError(value)

    def pop(self) -> T:
        """Remove and return the element in the highest slot; `KeyError` if the set is empty."""
        if not self._slot_by_key:
            raise KeyError("pop from an empty set")
        value = self._slots.entries[-1]
        assert not isinstance(value, Free)
        self.discard(value)
        return value

    def clear(self) -> None:
        if not self._is_marked:
            self._mark()
        self._slot_by_key.clear()
        self._slots.clear()
        self._edits.mark_all()

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

    # Overridden by the sorted set

    def _before_add(self, value: T) -> None:
        """Called before an element is added. May raise to refuse it; nothing is changed then."""

    def _before_remove(self, value: T) -> None:
        """Called before an element is removed."""

    # Saving and loading

    def _is_whole(self) -> bool:
        return self._edits.edited is None

    def _write_whole(self, rows: ObjectRows) -> None:
        write_all(rows, ITEMS, self._slots, self._serializers[0].dump)

    def _write_changes(self, rows: ObjectRows) -> None:
        self._edits.write(rows, ITEMS, self._slots, self._serializers[0].dump)

    def _start_save(self) -> None:
        self._edits.start_save(len(self._slots.entries))

    def _finish_save(self) -> None:
        self._edits.finish_save()

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        self._edits.abort_save(unknown_outcome=unknown_outcome)

    def _load(self, rows: StoredRows) -> None:
        self._slots.load(rows, ITEMS, rows.slots(ITEMS, self._serializers[0].load))
        self._edits.mark_none(len(self._slots.entries))
        try:
            self._slot_by_key = {value: slot for slot, value in self._slots.numbered()}
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error
        if len(self._slot_by_key) != sum(1 for _ in self._slots.numbered()):
            raise rows.damaged(ITEMS, "an element is stored twice")

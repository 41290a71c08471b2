"""A persisted set: one row an element.

    items/<slot>    the element

The interface is that of `set`; operators between sets make plain sets. Iteration is in the order of slots,
which is the same after a reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any, Self, TypeVar

from rt.objects.persisted import Kind, Owner, Persisted, StoredRows
from rt.objects.serializers import Serializer
from rt.objects.slots import Edits, Free, Slots, write_all
from rt.objects.storing import ITEMS, Rows

T = TypeVar("T")


class PersistedSet(Persisted, MutableSet[T]):
    """Elements that are hashable, each once."""

    __slots__ = ("_edits", "_places", "_slots")

    KIND = Kind.SET
    PARTS = (ITEMS,)

    def __init__(self, owner: Owner, object_id: str, serializer: Serializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._places: dict[T, int] = {}
        self._slots: Slots[T] = Slots()
        self._edits = Edits()

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> set[Any]:
        return set(values)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, value: object) -> bool:
        return value in self._places

    def __iter__(self) -> Iterator[T]:
        return self._slots.each(self._places)

    # Edits

    def add(self, value: T) -> bool:  # type: ignore[override]
        """Add it; whether it was new."""
        if value in self._places:
            return False
        self._serializers[0].check(value)
        if not self._is_marked:
            self._mark()
        self._admit(value)
        slot = self._places[value] = self._slots.add(value)
        self._edits.touch(slot)
        return True

    def discard(self, value: T) -> bool:  # type: ignore[override]
        """Take it out; whether it was there."""
        if value not in self._places:
            return False
        if not self._is_marked:
            self._mark()
        self._dismiss(value)
        slot = self._places.pop(value)
        self._slots.remove(slot)
        self._edits.touch(slot)
        return True

    def remove(self, value: T) -> None:
        """Take it out; `KeyError` if it is not there."""
        if not self.discard(value):
            raise KeyError(value)

    def pop(self) -> T:
        """Take one out, the one of the highest slot; `KeyError` if there is none."""
        if not self._places:
            raise KeyError("pop from an empty set")
        value = self._slots.entries[-1]
        assert not isinstance(value, Free)
        self.discard(value)
        return value

    def clear(self) -> None:
        """Take all out."""
        if not self._is_marked:
            self._mark()
        self._places.clear()
        self._slots.clear()
        self._edits.forget()

    def update(self, *others: Iterable[T]) -> None:
        """Add what is in others."""
        for other in others:
            for value in list(other):  # it may be this set, or a view of it
                self.add(value)

    def difference_update(self, *others: Iterable[Any]) -> None:
        """Take out what is in others."""
        for other in others:
            for value in list(other):  # it may be this set, or a view of it
                self.discard(value)

    def intersection_update(self, *others: Iterable[Any]) -> None:
        """Take out what is not in all others."""
        kept = set(self._places).intersection(*others)
        for value in [value for value in self if value not in kept]:
            self.discard(value)

    def symmetric_difference_update(self, other: Iterable[T]) -> None:
        """Take out what is in both, add what is only in `other`."""
        for value in dict.fromkeys(other):
            if not self.discard(value):
                self.add(value)

    def __iand__(self, other: Iterable[Any]) -> Self:
        self.intersection_update(other)
        return self

    # Questions, as `set` answers them

    def union(self, *others: Iterable[Any]) -> set[Any]:
        """A plain set of what is here or there."""
        return set(self).union(*others)

    def intersection(self, *others: Iterable[Any]) -> set[T]:
        """A plain set of what is everywhere."""
        return set(self._places).intersection(*others)

    def difference(self, *others: Iterable[Any]) -> set[T]:
        """A plain set of what is only here."""
        return set(self._places).difference(*others)

    def symmetric_difference(self, other: Iterable[Any]) -> set[Any]:
        """A plain set of what is in one of the two."""
        return set(self._places).symmetric_difference(other)

    def issubset(self, other: Iterable[Any]) -> bool:
        """Whether all of it is in `other`."""
        return self._places.keys() <= set(other)

    def issuperset(self, other: Iterable[Any]) -> bool:
        """Whether all of `other` is in it."""
        return all(value in self._places for value in other)

    def overlaps(self, other: Iterable[Any]) -> bool:
        """Whether something is in both."""
        return any(value in self._places for value in other)

    # What a sorted set does besides

    def _admit(self, value: T) -> None:
        """An element is about to come in; raising keeps it out, with nothing changed."""

    def _dismiss(self, value: T) -> None:
        """An element is about to leave."""

    # Saving and loading

    def _is_whole(self) -> bool:
        return self._edits.edited is None

    def _write_whole(self, rows: Rows) -> None:
        write_all(rows, ITEMS, self._slots, self._serializers[0].dump)

    def _write_changes(self, rows: Rows) -> None:
        self._edits.write(rows, ITEMS, self._slots, self._serializers[0].dump)

    def _take_off(self) -> None:
        self._edits.take_off(len(self._slots.entries))

    def _land(self) -> None:
        self._edits.land()

    def _turn_back(self, *, unknown_outcome: bool) -> None:
        self._edits.turn_back(unknown_outcome=unknown_outcome)

    def _load(self, rows: StoredRows) -> None:
        self._slots.load(rows, ITEMS, rows.slots(ITEMS, self._serializers[0].load))
        self._edits.loaded(len(self._slots.entries))
        try:
            self._places = {value: slot for slot, value in self._slots.numbered()}
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error
        if len(self._places) != sum(1 for _ in self._slots.numbered()):
            raise rows.damaged(ITEMS, "an element is there twice")

"""Base of arrays, lists and stacks: items numbered from 0.

    metadata/<length>    the number of items (a stack's key is `count`)
    items/0 … items/n-1  the items

Items below `_kept` are stored as they are in memory, except those in `_edited`. Other items may differ. An
append records nothing, an assignment one number. An edit that moves items marks all items after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Generic, NamedTuple, TypeVar

from rt.objects.core.persisted import ObjectOwner, Persisted, StoredRows, digits
from rt.objects.core.serializers import ValueSerializer
from rt.objects.core.slot_keys import encode
from rt.objects.core.store import ITEMS, METADATA, ObjectRows

T = TypeVar("T")


class _Flight(NamedTuple):
    kept: int
    edited: set[int] | None
    stored_length: int | None
    stored_end: int


class ItemRun(Persisted, Generic[T]):
    """Items, and which of their rows may differ from the store."""

    __slots__ = ("_edited", "_flight", "_items", "_kept", "_stored_end", "_stored_length")

    PARTS = (METADATA, ITEMS)
    LENGTH: ClassVar[str] = "length"

    def __init__(self, owner: ObjectOwner, object_id: str, serializer: ValueSerializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._items: list[T] = []
        self._kept = 0
        self._edited: set[int] | None = None
        self._stored_length: int | None = None  # None: unknown
        self._stored_end = 0  # no row at or above this number is stored
        self._flight: _Flight | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, value: object) -> bool:
        return value in self._items

    # Called by edits before they change anything

    def _edit(self, index: int) -> None:
        """The item at `index` (0 or more) will change."""
        if not self._is_marked:
            self.mark()
        if index < self._kept:
            if self._edited is None:
                self._edited = set()
            self._edited.add(index)

    def _move(self, index: int) -> None:
        """Items from `index` on will change."""
        if not self._is_marked:
            self.mark()
        self._kept = min(self._kept, index)

    def _extend(self, values: Iterable[T]) -> None:
        """Append all values, or none if one is refused."""
        new = self._checked(values)
        self._move(len(self._items))
        self._items.extend(new)

    # Saving and loading

    def _is_whole(self) -> bool:
        return self._kept == 0

    def _write_whole(self, rows: ObjectRows) -> None:
        rows.put(METADATA, self.LENGTH, digits(len(self._items)))
        rows.put_many(ITEMS, self._rows(range(len(self._items))))

    def _write_changes(self, rows: ObjectRows) -> None:
        length = len(self._items)
        if self._stored_length != length:
            rows.put(METADATA, self.LENGTH, digits(length))
        if self._edited:
            rows.put_many(ITEMS, self._rows(sorted(index for index in self._edited if index < self._kept)))
        rows.put_many(ITEMS, self._rows(range(self._kept, length)))
        if length < self._stored_end:
            rows.delete_many(ITEMS, map(encode, range(length, self._stored_end)))

    def _rows(self, indexes: range | list[int]) -> Iterator[tuple[str, bytes]]:
        dump, items = self._serializers[0].dump, self._items
        return ((encode(index), dump(items[index])) for index in indexes)

    def _start_save(self) -> None:
        self._flight = _Flight(self._kept, self._edited, self._stored_length, self._stored_end)
        self._kept = self._stored_length = len(self._items)
        self._stored_end = max(self._stored_end, self._kept)
        self._edited = None

    def saved(self) -> None:
        if self._stored_length is not None:
            self._stored_end = self._stored_length
        self._flight = None

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        flight = self._flight
        if flight is None:
            return
        self._kept = min(self._kept, flight.kept)
        if flight.edited:
            self._edited = flight.edited | (self._edited or set())
        self._stored_length = None if unknown_outcome else flight.stored_length
        if not unknown_outcome:
            self._stored_end = flight.stored_end
        self._flight = None

    def _load(self, rows: StoredRows) -> None:
        length = rows.number(METADATA, self.LENGTH)
        self._items = rows.run(ITEMS, 0, length, self._serializers[0].load)
        self._kept = self._stored_length = self._stored_end = length

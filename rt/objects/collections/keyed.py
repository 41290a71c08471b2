"""Base of sets and dictionaries: distinct hashable keys. Each key has one row, at the key's slot.

Unsorted collections iterate in the order of slots; a reload keeps this order. Sorted collections iterate in
ascending order: their keys must have a total order (`<`). A key that cannot be compared with the others
raises `TypeError`. A key that is not equal to itself raises `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, ClassVar, Generic, TypeVar

from rt.objects.collections.slots import FREE, Edits, Free, Slots, write_all
from rt.objects.collections.sorted_keys import SortedKeys
from rt.objects.core.persisted import ObjectOwner, Persisted, StoredRows
from rt.objects.core.serializers import ValueSerializer
from rt.objects.core.store import ITEMS, ObjectRows

K = TypeVar("K")


class Keyed(Persisted, Generic[K]):
    """Keys by slot. Each kind adds the data that belongs to a key."""

    __slots__ = ("_edits", "_order", "_slot_by_key", "_slots")

    PARTS = (ITEMS,)
    IS_SORTED: ClassVar[bool] = False

    def __init__(self, owner: ObjectOwner, object_id: str, *serializers: ValueSerializer[Any]) -> None:
        super().__init__(owner, object_id, *serializers)
        self._slot_by_key: dict[K, int] = {}
        self._slots: Slots[K] = Slots()
        self._order: SortedKeys[K] | None = SortedKeys() if self.IS_SORTED else None
        self._edits = Edits()

    def __len__(self) -> int:
        return len(self._slot_by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_by_key

    def __iter__(self) -> Iterator[K]:
        if self._order is not None:
            return unchanged(self._order.between(), self._slot_by_key)
        keys: Any = self._slots.entries
        return unchanged((key for key in keys if key is not FREE), self._slot_by_key)

    def clear(self) -> None:
        self.mark()
        self._slot_by_key.clear()
        self._slots.clear()
        if self._order is not None:
            self._order.clear()
        self._edits.mark_all()

    def _add_key(self, key: K) -> int:
        """Add a new key. Return its slot. If the key cannot be ordered, nothing is changed."""
        if self._order is not None:
            self._order.add(key)
        slot = self._slot_by_key[key] = self._slots.add(key)
        self._edits.touch(slot)
        return slot

    def _remove_key(self, key: K) -> int:
        """Remove an existing key. Returns the slot that it had."""
        if self._order is not None:
            self._order.remove(key)
        slot = self._slot_by_key.pop(key)
        self._slots.remove(slot)
        self._edits.touch(slot)
        return slot

    def _last_key(self) -> K:
        """The key in the highest slot; `KeyError` if there is none."""
        if not self._slot_by_key:
            raise KeyError("the collection is empty")
        key = self._slots.entries[-1]
        assert not isinstance(key, Free)
        return key

    # Saving and loading

    def _dump(self, key: K) -> bytes:
        raise NotImplementedError

    def _is_whole(self) -> bool:
        return self._edits.edited is None

    def _write_whole(self, rows: ObjectRows) -> None:
        write_all(rows, ITEMS, self._slots, self._dump)

    def _write_changes(self, rows: ObjectRows) -> None:
        self._edits.write(rows, ITEMS, self._slots, self._dump)

    def _start_save(self) -> None:
        self._edits.start_save(len(self._slots.entries))

    def saved(self) -> None:
        self._edits.finish_save()

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        self._edits.abort_save(unknown_outcome=unknown_outcome)

    def _load_keys(self, rows: StoredRows, found: Iterable[tuple[int, K]]) -> None:
        """Put each key into its stored slot."""
        count = self._slots.load(rows, ITEMS, found)
        entries = self._slots.entries
        self._edits.mark_none(len(entries))
        try:
            self._slot_by_key = {key: slot for slot, key in enumerate(entries) if not isinstance(key, Free)}
            if self._order is not None:
                self._order = SortedKeys(self._slot_by_key)
        except TypeError as error:
            raise rows.damaged(ITEMS, str(error)) from error
        if len(self._slot_by_key) != count:
            raise rows.damaged(ITEMS, "a key is stored twice")


def unchanged(keys: Iterable[K], of: Sized) -> Iterator[K]:
    """The keys; `RuntimeError` if the length of `of` changes meanwhile."""
    size = len(of)
    for key in keys:
        yield key
        if len(of) != size:
            raise RuntimeError("the collection changed size during iteration")

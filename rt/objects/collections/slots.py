"""Slot numbers for elements without their own position, and which of their rows may differ from the store.

An element of a set or dictionary, or a node, gets the lowest free number. This number depends only on the
earlier edits, and a reload finds the same free numbers. So a reload keeps the order of slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from rt.objects.core.persisted import StoredRows
from rt.objects.core.slot_keys import encode
from rt.objects.core.store import ObjectRows

E = TypeVar("E")


class Free:
    """Marks a free slot."""

    __slots__ = ()


FREE: Final = Free()


class Slots(Generic[E]):
    """Entries by slot. The last slot is never free."""

    __slots__ = ("_free", "entries")

    def __init__(self) -> None:
        self.entries: list[E | Free] = []
        self._free: list[int] = []  # a heap; may contain slots that are in use or past the end

    def add(self, entry: E) -> int:
        """Put the entry into the least free slot. Returns the slot."""
        entries = self.entries
        while self._free:
            slot = heapq.heappop(self._free)
            if slot < len(entries) and entries[slot] is FREE:
                entries[slot] = entry
                return slot
        entries.append(entry)
        return len(entries) - 1

    def remove(self, slot: int) -> None:
        entries = self.entries
        if slot < len(entries) - 1:
            entries[slot] = FREE
            heapq.heappush(self._free, slot)
            return
        del entries[slot]
        while entries and entries[-1] is FREE:
            entries.pop()
        if not entries:
            self._free.clear()

    def clear(self) -> None:
        self.entries.clear()
        self._free.clear()

    def numbered(self) -> Iterator[tuple[int, E]]:
        """Slots and their entries, in order."""
        return ((slot, entry) for slot, entry in enumerate(self.entries) if not isinstance(entry, Free))

    def load(self, rows: StoredRows, part: str, found: Iterable[tuple[int, E]]) -> int:
        """Put each entry into its stored slot. Returns their number."""
        by_slot = dict(found)
        try:
            self.entries = [FREE] * (max(by_slot, default=-1) + 1)
        except (MemoryError, OverflowError):
            raise rows.damaged(part, f"slot {max(by_slot)} does not fit into memory") from None
        for slot, entry in by_slot.items():
            self.entries[slot] = entry
        is_dense = len(by_slot) == len(self.entries)
        self._free = [] if is_dense else [slot for slot, each in enumerate(self.entries) if each is FREE]
        return len(by_slot)


class _Flight(NamedTuple):
    edited: set[int] | None
    written_end: int
    stored_end: int


class Edits:
    """Which rows, one for each slot, may differ from the store: those in `edited`, or all if it is None."""

    __slots__ = ("_flight", "_stored_end", "edited")

    def __init__(self) -> None:
        self.edited: set[int] | None = None
        self._stored_end = 0  # no row at or above this number is stored
        self._flight: _Flight | None = None

    def touch(self, slot: int) -> None:
        if self.edited is not None:
            self.edited.add(slot)

    def mark_all(self) -> None:
        self.edited = None

    def write(self, rows: ObjectRows, part: str, slots: Slots[E], dump: Callable[[E], bytes]) -> None:
        """Write the marked rows as they are now, and delete those of free slots."""
        entries, deleted = slots.entries, []
        changed: list[tuple[int, E]] = []
        for slot in sorted(self.edited or ()):
            entry = entries[slot] if slot < len(entries) else FREE
            if not isinstance(entry, Free):
                changed.append((slot, entry))
            elif slot < self._stored_end:
                deleted.append(encode(slot))
        if changed:
            rows.put_many(part, ((encode(slot), dump(entry)) for slot, entry in changed))
        if deleted:
            rows.delete_many(part, deleted)

    def start_save(self, slots_end: int) -> None:
        """Move the marked rows into the flight. Rows below `slots_end` may be stored from now on."""
        self._flight = _Flight(self.edited, slots_end, self._stored_end)
        self._stored_end = max(self._stored_end, slots_end)
        self.edited = set()

    def finish_save(self) -> None:
        if self._flight is not None:
            self._stored_end = self._flight.written_end
            self._flight = None

    def abort_save(self, *, unknown_outcome: bool) -> None:
        """If a save is in flight, mark its rows again."""
        flight = self._flight
        if flight is None:
            return
        if self.edited is not None:
            self.edited = None if flight.edited is None else self.edited | flight.edited
        if not unknown_outcome:
            self._stored_end = flight.stored_end
        self._flight = None

    def mark_none(self, slots_end: int) -> None:
        self.edited = set()
        self._stored_end = slots_end


def write_all(rows: ObjectRows, part: str, slots: Slots[E], dump: Callable[[E], bytes]) -> None:
    """Write every row. Call only if no row is stored."""
    rows.put_many(part, ((encode(slot), dump(entry)) for slot, entry in slots.numbered()))

"""Numbers for elements that have no place of their own, and which of their rows may differ from the store.

An element of a set or dictionary, or a node, gets the least number that is free. Which one depends on nothing
but the edits before, and a reload finds the same numbers free: so an order by slots is the same before and
after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Final, Generic, NamedTuple, TypeVar

from rt.objects.persisted import StoredRows
from rt.objects.slot_keys import encode
from rt.objects.storing import Rows

E = TypeVar("E")


class Free:
    """What stands in a slot that nobody has."""

    __slots__ = ()


FREE: Final = Free()


class Slots(Generic[E]):
    """Entries by slot. The last one is never free."""

    __slots__ = ("_free", "entries")

    def __init__(self) -> None:
        self.entries: list[E | Free] = []
        self._free: list[int] = []  # a heap; some of it was taken or cut off since

    def add(self, entry: E) -> int:
        """Put it in the least free slot."""
        entries = self.entries
        while self._free:
            slot = heapq.heappop(self._free)
            if slot < len(entries) and entries[slot] is FREE:
                entries[slot] = entry
                return slot
        entries.append(entry)
        return len(entries) - 1

    def remove(self, slot: int) -> None:
        """Free the slot."""
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
        """Free all."""
        self.entries.clear()
        self._free.clear()

    def each(self, sized: Sized) -> Iterator[E]:
        """Entries in the order of slots; `RuntimeError` if the length of `sized` changes meanwhile."""
        size = len(sized)
        for entry in self.entries:
            if not isinstance(entry, Free):
                yield entry
                if len(sized) != size:
                    raise RuntimeError("the collection changed its size during iteration")

    def numbered(self) -> Iterator[tuple[int, E]]:
        """Slots and entries, in order."""
        return ((slot, entry) for slot, entry in enumerate(self.entries) if not isinstance(entry, Free))

    def load(self, rows: StoredRows, part: str, found: Iterable[tuple[int, E]]) -> None:
        """Put each entry in the slot it had."""
        by_slot = dict(found)
        try:
            self.entries = [FREE] * (max(by_slot, default=-1) + 1)
        except (MemoryError, OverflowError):
            raise rows.damaged(part, f"there is no slot {max(by_slot)}") from None
        for slot, entry in by_slot.items():
            self.entries[slot] = entry
        self._free = [slot for slot, entry in enumerate(self.entries) if entry is FREE]


class _Flight(NamedTuple):
    edited: set[int] | None
    written_end: int
    stored_end: int


class Edits:
    """Which rows, one a slot, may differ from the store: those in `edited`, or, where that is None, all."""

    __slots__ = ("_flight", "_stored_end", "edited")

    def __init__(self) -> None:
        self.edited: set[int] | None = None
        self._stored_end = 0  # no row at or above it is stored
        self._flight: _Flight | None = None

    def touch(self, slot: int) -> None:
        """The row differs."""
        if self.edited is not None:
            self.edited.add(slot)

    def forget(self) -> None:
        """All rows differ."""
        self.edited = None

    def write(self, rows: Rows, part: str, slots: Slots[E], dump: Callable[[E], bytes]) -> None:
        """Write the rows that differ, as they are now, and delete those that are no more."""
        entries, gone = slots.entries, []
        changed: list[tuple[int, E]] = []
        for slot in sorted(self.edited or ()):
            entry = entries[slot] if slot < len(entries) else FREE
            if not isinstance(entry, Free):
                changed.append((slot, entry))
            elif slot < self._stored_end:
                gone.append(encode(slot))
        if changed:
            rows.put_many(part, ((encode(slot), dump(entry)) for slot, entry in changed))
        if gone:
            rows.delete_many(part, gone)

    def take_off(self, slots_end: int) -> None:
        """Put them aside; rows below `slots_end` may be stored from now on."""
        self._flight = _Flight(self.edited, slots_end, self._stored_end)
        self._stored_end = max(self._stored_end, slots_end)
        self.edited = set()

    def land(self) -> None:
        """What was put aside is stored."""
        if self._flight is not None:
            self._stored_end = self._flight.written_end
            self._flight = None

    def turn_back(self, *, unknown_outcome: bool) -> None:
        """Join it, if anything was, with what was edited since."""
        flight = self._flight
        if flight is None:
            return
        if self.edited is not None:
            self.edited = None if flight.edited is None else self.edited | flight.edited
        if not unknown_outcome:
            self._stored_end = flight.stored_end
        self._flight = None

    def loaded(self, slots_end: int) -> None:
        """Nothing differs."""
        self.edited = set()
        self._stored_end = slots_end


def write_all(rows: Rows, part: str, slots: Slots[E], dump: Callable[[E], bytes]) -> None:
    """Write every row, where none is."""
    rows.put_many(part, ((encode(slot), dump(entry)) for slot, entry in slots.numbered()))

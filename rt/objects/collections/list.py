"""A persisted list, and an array: a list of fixed length.

The rows are described in `item_run.py`. The interface is that of `list`, with negative indexes, slices and
clamping. An edit at the end costs only the items that it changes. An insertion or a deletion elsewhere writes
all items after it again, because their numbers change: use a linked list for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Self, SupportsIndex, TypeVar, overload

from rt.objects.collections.item_run import ItemRun
from rt.objects.core.persisted import Kind

T = TypeVar("T")


class _IndexedItems(ItemRun[T], Sequence[T]):
    """Items that can be read and assigned by index, like those of a `list`."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return self._items[index]

    @overload
    def __setitem__(self, index: SupportsIndex, value: T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        if isinstance(index, slice):
            self._assign_slice(index, self._checked(value))
            return
        self._serializers[0].check(value)
        place = self._place(index)
        self._edit(place)
        self._items[place] = value

    def _assign_slice(self, index: slice, values: list[T]) -> None:
        """Assign the values. `ValueError`, with nothing changed, if the numbers of values and items
        differ.
        """
        places = range(len(self._items))[index]
        if len(values) != len(places):
            raise ValueError(f"attempt to assign {len(values)} values to {len(places)} places")
        for place, value in zip(places, values, strict=True):
            self._edit(place)
            self._items[place] = value

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ItemRun):
            return self._items == other._items
        return self._items == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _place(self, index: SupportsIndex) -> int:
        """The index as 0 or more; `IndexError` if there is no such item."""
        try:
            return range(len(self._items))[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range: there are {len(self._items)} items") from None


class PersistedArray(_IndexedItems[T]):
    """Items that can be assigned. Their number is fixed at creation."""

    __slots__ = ()

    KIND = Kind.ARRAY

    def _fill(self, length: int, value: T) -> None:
        self._serializers[0].check(value)
        self._items = [value] * length


class PersistedList(_IndexedItems[T], MutableSequence[T]):
    __slots__ = ()

    KIND = Kind.LIST

    def _assign_slice(self, index: slice, values: list[T]) -> None:
        places = range(len(self._items))[index]
        if len(values) == len(places) or index.step not in {None, 1}:
            super()._assign_slice(index, values)
            return
        self._move(places.start)
        self._items[index] = values

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        if isinstance(index, slice):
            places = range(len(self._items))[index]
            if places:
                self._move(min(places))
        else:
            self._move(self._place(index))
        del self._items[index]

    def __iadd__(self, values: Iterable[T]) -> Self:
        self.extend(values)
        return self

    def append(self, value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self.mark()
        self._items.append(value)

    def extend(self, values: Iterable[T]) -> None:
        """Append all values, or none if one is refused."""
        self._extend(values)

    def insert(self, index: SupportsIndex, value: T) -> None:
        """Insert before `index`; an index out of range is clamped."""
        self._serializers[0].check(value)
        # Clamps like list.insert.
        self._move(slice(index, None).indices(len(self._items))[0])
        self._items.insert(index, value)

    def pop(self, index: SupportsIndex = -1) -> T:
        """Remove and return an item; `IndexError` if there is none."""
        self._move(self._place(index))
        return self._items.pop(index)

    def remove(self, value: T) -> None:
        """Remove the first equal value; `ValueError` if there is none."""
        del self[self._items.index(value)]

    def clear(self) -> None:
        self._move(0)
        self._items.clear()

    def reverse(self) -> None:
        self._move(0)
        self._items.reverse()

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """Sort in place. If a comparison raises, nothing is changed."""
        ordered = sorted(self._items, key=key, reverse=reverse)
        self._move(0)
        self._items = ordered

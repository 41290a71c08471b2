"""A persisted list, and an array: a list of fixed length.

Rows as in `item_run.py`. The interface is that of `list`, with negative indexes, slices and clamping. Edits
at the end cost what they change. An insertion or a deletion elsewhere writes all items after it again,
because their numbers change: use a linked list for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Self, SupportsIndex, TypeVar, overload

from rt.objects.collections.item_run import ItemRun, same_items
from rt.objects.core.persisted import Kind

T = TypeVar("T")


class PersistedArray(ItemRun[T], Sequence[T]):
    """Items that can be assigned. Their number is fixed at creation."""

    __slots__ = ()

    KIND = Kind.ARRAY

    def _fill(self, length: int, value: T) -> None:
        self._check(value)
        self._items = [value] * length

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | list[T]:
        return self._items[index]

    @overload
    def __setitem__(self, index: SupportsIndex, value: T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        if isinstance(index, slice):
            _assign_places(self, range(len(self._items))[index], value)
        else:
            _assign(self, index, value)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._items)

    def __eq__(self, other: object) -> bool:
        return same_items(self._items, other)

    __hash__ = None  # type: ignore[assignment]


class PersistedList(ItemRun[T], MutableSequence[T]):
    __slots__ = ()

    KIND = Kind.LIST

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
        if not isinstance(index, slice):
            _assign(self, index, value)
            return
        places, values = range(len(self._items))[index], list(value)
        if len(values) == len(places) or index.step not in {None, 1}:
            _assign_places(self, places, values)
            return
        for each in values:
            self._check(each)
        self._move(places.start)
        self._items[index] = values

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        if isinstance(index, slice):
            places = range(len(self._items))[index]
            if places:
                self._move(min(places))
        else:
            self._move(_checked_index(self, index))
        del self._items[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._items)

    def __eq__(self, other: object) -> bool:
        return same_items(self._items, other)

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, values: Iterable[T]) -> Self:
        self.extend(values)
        return self

    def append(self, value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self._mark()
        self._items.append(value)

    def extend(self, values: Iterable[T]) -> None:
        """Append all values, or none if one is refused."""
        self._extend(values)

    def insert(self, index: SupportsIndex, value: T) -> None:
        """Insert before `index`; an index out of range is clamped."""
        self._check(value)
        # Clamps like list.insert.
        self._move(slice(index, None).indices(len(self._items))[0])
        self._items.insert(index, value)

    def pop(self, index: SupportsIndex = -1) -> T:
        """Remove and return an item; `IndexError` if there is none."""
        self._move(_checked_index(self, index))
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


def _checked_index(run: ItemRun[T], index: SupportsIndex) -> int:
    """The index as 0 or more; `IndexError` if there is no such item."""
    try:
        return range(len(run._items))[index]
    except IndexError:
        raise IndexError(f"index {index} is out of range: there are {len(run._items)} items") from None


def _assign(run: ItemRun[T], index: SupportsIndex, value: T) -> None:
    run._check(value)
    place = _checked_index(run, index)
    run._edit(place)
    run._items[place] = value


def _assign_places(run: ItemRun[T], places: range, values: Iterable[T]) -> None:
    """Assign one value to each place. `ValueError`, with nothing changed, if the numbers differ."""
    new = [run._check(value) for value in values]
    if len(new) != len(places):
        raise ValueError(f"attempt to assign {len(new)} values to {len(places)} places")
    for place, value in zip(places, new, strict=True):
        run._edit(place)
        run._items[place] = value

"""A persisted list, and an array: a list whose length is fixed.

Rows as in `runs.py`. The interface is that of `list`, negative indexes, slices and clamping included. A list
that grows and shrinks at its end costs what was changed; an insertion or a deletion elsewhere writes all
items behind it again, as their numbers change: take a `LinkedList` for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Self, SupportsIndex, TypeVar, overload

from rt.objects.persisted import Kind
from rt.objects.runs import Run, same_items

T = TypeVar("T")


class PersistedArray(Run[T], Sequence[T]):
    """Items whose number was fixed when it was made; each can be assigned."""

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


class PersistedList(Run[T], MutableSequence[T]):
    """A list."""

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
            self._move(_place(self, index))
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
        """Add at the end."""
        self._serializers[0].check(value)
        if not self._is_marked:
            self._mark()
        self._items.append(value)

    def extend(self, values: Iterable[T]) -> None:
        """Add all of them at the end, or none."""
        self._extend(values)

    def insert(self, index: SupportsIndex, value: T) -> None:
        """Add before `index`; beyond either end: at that end."""
        self._check(value)
        # The same clamping as that of list.insert.
        self._move(slice(index, None).indices(len(self._items))[0])
        self._items.insert(index, value)

    def pop(self, index: SupportsIndex = -1) -> T:
        """Take an item out; `IndexError` if there is none."""
        self._move(_place(self, index))
        return self._items.pop(index)

    def remove(self, value: T) -> None:
        """Take the first that equals `value` out; `ValueError` if none does."""
        del self[self._items.index(value)]

    def clear(self) -> None:
        """Take all out."""
        self._move(0)
        self._items.clear()

    def reverse(self) -> None:
        """Turn it round, in place."""
        self._move(0)
        self._items.reverse()

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """Sort in place, as `list.sort`; where comparing raises, nothing is changed."""
        ordered = sorted(self._items, key=key, reverse=reverse)
        self._move(0)
        self._items = ordered


def _place(run: Run[T], index: SupportsIndex) -> int:
    """The index, not negative; `IndexError` if there is no such item."""
    try:
        return range(len(run._items))[index]
    except IndexError:
        raise IndexError(f"index {index} is out of range: there are {len(run._items)} items") from None


def _assign(run: Run[T], index: SupportsIndex, value: T) -> None:
    run._check(value)
    place = _place(run, index)
    run._edit(place)
    run._items[place] = value


def _assign_places(run: Run[T], places: range, values: Iterable[T]) -> None:
    """One value each; `ValueError`, and nothing changed, for more or fewer."""
    new = [run._check(value) for value in values]
    if len(new) != len(places):
        raise ValueError(f"attempt to assign {len(new)} values to {len(places)} places")
    for place, value in zip(places, new, strict=True):
        run._edit(place)
        run._items[place] = value

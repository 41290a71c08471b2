"""A persisted sorted set, and views of a range of it. Rows as in `set.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet, Reversible
from typing import Any, TypeVar

from rt.objects.collections.keyed import unchanged
from rt.objects.collections.set import PersistedSet
from rt.objects.collections.sorted_keys import SortedKeys
from rt.objects.core.persisted import Kind

T = TypeVar("T")


class PersistedSortedSet(PersistedSet[T], Reversible[T]):
    """A set of elements that have a total order (`<`). Iterates ascending.

    An element that cannot be compared with the others raises `TypeError`; NaN raises `ValueError`.
    """

    __slots__ = ()

    KIND = Kind.SORTED_SET
    IS_SORTED = True
    _order: SortedKeys[T]

    def __reversed__(self) -> Iterator[T]:
        return unchanged(self._order.between_reversed(), self._slot_by_key)

    def min(self) -> T:
        """The least element; `ValueError` if the set is empty."""
        return self._order.least

    def max(self) -> T:
        """The greatest element; `ValueError` if the set is empty."""
        return self._order.greatest

    def view(self, low: T, high: T) -> SortedView[T]:
        """The elements from `low` to `high`, both included. Edits of the set or the view are visible in
        both.
        """
        return SortedView(self, low, high)


class SortedView(MutableSet[T], Reversible[T]):
    """A range of a sorted set. Edits of either are seen in both. An element outside raises `ValueError`."""

    __slots__ = ("_high", "_low", "_set")

    def __init__(self, of: PersistedSortedSet[T], low: T, high: T) -> None:
        if high < low:  # type: ignore[operator]
            raise ValueError(f"the end of the range, {high!r}, is less than its start, {low!r}")
        self._set = of
        self._low = low
        self._high = high

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> set[Any]:
        return set(values)

    def __len__(self) -> int:
        return self._set._order.count(self._low, self._high)

    def __contains__(self, value: object) -> bool:
        return value in self._set and self._is_inside(value)

    def __iter__(self) -> Iterator[T]:
        return unchanged(self._set._order.between(self._low, self._high), self._set._slot_by_key)

    def __reversed__(self) -> Iterator[T]:
        return unchanged(self._set._order.between_reversed(self._low, self._high), self._set._slot_by_key)

    def add(self, value: T) -> bool:  # type: ignore[override]
        """Returns whether the element is new. `ValueError` outside the range."""
        if not self._is_inside(value):
            raise ValueError(f"{value!r} is outside [{self._low!r}, {self._high!r}]")
        return self._set.add(value)

    def discard(self, value: T) -> bool:  # type: ignore[override]
        """Returns whether the element was in the range."""
        return value in self and self._set.discard(value)

    def clear(self) -> None:
        """Remove the elements in the range from the set."""
        for value in list(self):
            self._set.discard(value)

    def min(self) -> T:
        """The least element of the range; `ValueError` if it is empty."""
        for value in self:
            return value
        raise ValueError("min of an empty range")

    def max(self) -> T:
        """The greatest element of the range; `ValueError` if it is empty."""
        for value in reversed(self):
            return value
        raise ValueError("max of an empty range")

    def view(self, low: T, high: T) -> SortedView[T]:
        """A view of a part of the range; `ValueError` if the part is not inside the range."""
        if not (self._is_inside(low) and self._is_inside(high)):
            raise ValueError(f"[{low!r}, {high!r}] is not inside [{self._low!r}, {self._high!r}]")
        return SortedView(self._set, low, high)

    def _is_inside(self, value: Any) -> bool:
        return not (value < self._low or self._high < value)

"""Sorted keys in buckets: adding, removing and finding cost little also with many keys.

Keys must have a total order (`<`). A key that cannot be compared raises `TypeError`, a key that is not equal
to itself `ValueError`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_BUCKET_MAX: Final = 1024


class SortedKeys(Generic[T]):
    """Distinct keys, ascending. No bucket is empty. `_lasts` are the greatest keys of the buckets."""

    __slots__ = ("_buckets", "_lasts")

    def __init__(self, keys: Iterable[T] = ()) -> None:
        ordered: list[Any] = sorted(keys)
        half = _BUCKET_MAX // 2
        self._buckets: list[list[Any]] = [ordered[at : at + half] for at in range(0, len(ordered), half)]
        self._lasts: list[Any] = [bucket[-1] for bucket in self._buckets]

    def add(self, key: T) -> None:
        if key != key:  # noqa: PLR0124 - true for NaN
            raise ValueError(f"a sorted key must be equal to itself, got {key!r}")
        if not self._buckets:
            key < key  # type: ignore[operator]  # noqa: B015, PLR0124 - raises if the type has no order
            self._buckets.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        bucket = self._buckets[at]
        insort(bucket, key)
        self._lasts[at] = bucket[-1]
        if len(bucket) > _BUCKET_MAX:
            half = len(bucket) // 2
            self._buckets[at : at + 1] = [bucket[:half], bucket[half:]]
            self._lasts[at : at + 1] = [bucket[half - 1], bucket[-1]]

    def remove(self, key: T) -> None:
        at = bisect_left(self._lasts, key)
        bucket = self._buckets[at]
        del bucket[bisect_left(bucket, key)]
        if bucket:
            self._lasts[at] = bucket[-1]
        else:
            del self._buckets[at], self._lasts[at]

    def clear(self) -> None:
        self._buckets.clear()
        self._lasts.clear()

    @property
    def least(self) -> T:
        self._require_keys()
        return self._buckets[0][0]  # type: ignore[no-any-return]

    @property
    def greatest(self) -> T:
        self._require_keys()
        return self._lasts[-1]  # type: ignore[no-any-return]

    def _require_keys(self) -> None:
        if not self._lasts:
            raise ValueError("min or max of an empty collection")

    def between(self, low: T | None = None, high: T | None = None) -> Iterator[T]:
        """Keys from `low` to `high`, both included. None: no bound."""
        first = 0 if low is None else bisect_left(self._lasts, low)
        for at in range(first, len(self._buckets)):
            bucket = self._buckets[at]
            start = bisect_left(bucket, low) if low is not None and at == first else 0
            if high is not None and high < self._lasts[at]:
                yield from bucket[start : bisect_right(bucket, high)]
                return
            yield from bucket[start:]

    def between_reversed(self, low: T | None = None, high: T | None = None) -> Iterator[T]:
        """The same keys, descending."""
        last = (
            len(self._buckets) - 1
            if high is None
            else min(bisect_left(self._lasts, high), len(self._lasts) - 1)
        )
        for at in range(last, -1, -1):
            bucket = self._buckets[at]
            end = bisect_right(bucket, high) if high is not None and at == last else len(bucket)
            if low is not None and bucket[0] < low:
                yield from reversed(bucket[bisect_left(bucket, low) : end])
                return
            yield from reversed(bucket[:end])

    def count(self, low: T, high: T) -> int:
        """The number of keys from `low` to `high`, both included."""
        if high < low:  # type: ignore[operator]
            return 0
        return max(0, self._rank(high, bisect_right) - self._rank(low, bisect_left))

    def _rank(self, key: T, bisect: Any) -> int:
        at = bisect(self._lasts, key)
        before = sum(map(len, self._buckets[:at]))
        return before + (bisect(self._buckets[at], key) if at < len(self._buckets) else 0)

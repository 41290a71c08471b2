"""Operators that let some values pass."""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any, Final, TypeVar

from rt.objects import PersistedSet
from rt.query.observing import Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import ABSENT, FAILED, Asking, compose, key_of, storable

A = TypeVar("A")


def where(predicate: Callable[[Any], object]) -> Transform:
    """The values for which `predicate` is true. Saves nothing."""
    return applied(Where, predicate)


def take(count: int) -> Transform:
    """The first `count` values; ends with the last of them, at once if it is 0. Saves how many are left."""
    if count < 0:
        raise ValueError(f"take({count})")
    return applied(Take, count)


def filter_indexed(predicate: Callable[[Any, int], object]) -> Transform:
    """The values for which `predicate(value, index)` is true; indexes from 0. Saves the index."""
    return applied(FilterIndexed, predicate)


def distinct(key_mapper: Callable[[Any], Any] | None = None) -> Transform:
    """The values whose key, which must be hashable, none before had. Saves all keys, in the object space."""
    return applied(Distinct, key_mapper)


def distinct_until_changed(
    key_mapper: Callable[[Any], Any] | None = None, comparer: Callable[[Any, Any], object] = eq
) -> Transform:
    """The values whose key differs from that of the one before. Saves the last key."""
    return applied(DistinctUntilChanged, key_mapper, comparer)


def only(predicate: Callable[[Any], object] | None, transform: Transform) -> Transform:
    """`transform` behind `where(predicate)`, or alone without a predicate."""
    return transform if predicate is None else compose(where(predicate), transform)


class Where(Operator[A, A]):
    """See `where`."""

    __slots__ = ("_predicate",)

    NAME = "where"

    def __init__(self, predicate: Callable[[A], object]) -> None:
        self._predicate: Final = predicate

    def on_next(self, value: A, /) -> None:
        """Let it pass or not."""
        try:
            passes = self._predicate(value)
        except Exception as error:  # noqa: BLE001 - a function of the user's
            self.fail(error)
            return
        if passes:
            self.emit(value)


class Take(Operator[A, A]):
    """See `take`."""

    __slots__ = ("_left",)

    NAME = "take"

    def __init__(self, count: int) -> None:
        self._left = count

    def on_start(self) -> None:
        """With nothing to wait for, end as soon as time runs."""
        if self._left == 0:
            self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """See `on_start`."""
        self.complete()

    def on_next(self, value: A, /) -> None:
        """Count it, then send it on, so that a value which comes back from there finds it counted."""
        if self._left == 0:
            return
        self._left -= 1
        self.changed()
        is_last = self._left == 0
        self.emit(value)
        if is_last:
            self.complete()

    def save_state(self) -> int:
        """How many are left."""
        return self._left

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """How many were left."""
        self._left = state


class FilterIndexed(Asking[Any, Any]):
    """See `filter_indexed`."""

    __slots__ = ("_next", "_predicate")

    NAME = "filter_indexed"

    def __init__(self, predicate: Callable[[Any, int], object]) -> None:
        self._predicate: Final = predicate
        self._next = 0

    def on_next(self, value: Any, /) -> None:
        """Let it pass or not."""
        index = self._next
        self._next += 1
        self.changed()
        if self.ask(self._predicate, value, index):  # FAILED is true, and nothing is emitted behind it
            self.emit(value)

    def save_state(self) -> int:
        """The index of the next value."""
        return self._next

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._next = state


class Distinct(Asking[Any, Any]):
    """See `distinct`."""

    __slots__ = ("_key_mapper", "_keys")

    NAME = "distinct"

    def __init__(self, key_mapper: Callable[[Any], Any] | None) -> None:
        self._key_mapper: Final = key_mapper
        self._keys: PersistedSet[Any]

    def on_open(self) -> None:
        """The keys."""
        self._keys = self.objects.set("keys")

    def on_next(self, value: Any, /) -> None:
        """Let it pass if its key is new."""
        key = key_of(value if self._key_mapper is None else self.ask(self._key_mapper, value))
        if key is not FAILED and not self.ask(self._keys.__contains__, key):
            self._keys.add(key)
            self.emit(value)


class DistinctUntilChanged(Asking[Any, Any]):
    """See `distinct_until_changed`."""

    __slots__ = ("_comparer", "_key", "_key_mapper")

    NAME = "distinct_until_changed"

    def __init__(
        self, key_mapper: Callable[[Any], Any] | None, comparer: Callable[[Any, Any], object]
    ) -> None:
        self._key_mapper: Final = key_mapper
        self._comparer: Final = comparer
        self._key: Any = ABSENT

    def on_next(self, value: Any, /) -> None:
        """Let it pass if its key is another."""
        key = value if self._key_mapper is None else self.ask(self._key_mapper, value)
        if key is FAILED or (self._key is not ABSENT and self.ask(self._comparer, self._key, key)):
            return
        self._key = storable(key)
        self.changed()
        self.emit(value)

    def save_state(self) -> list[Any]:
        """The key, if there is one."""
        return [] if self._key is ABSENT else [self._key]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._key = state[0] if state else ABSENT

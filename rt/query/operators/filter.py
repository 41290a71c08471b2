"""Operators that emit some of the values."""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any, Final, TypeVar

from rt.objects import PersistedSet
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.user_functions import ABSENT, FAILED, UserFunctionOperator, compose, key_of, storable

A = TypeVar("A")


def where(predicate: Callable[[Any], object]) -> Transform:
    """The values for which `predicate` is true. Saves nothing."""
    return applied(Where, predicate)


def take(count: int) -> Transform:
    """The first `count` values; then completes, at once if `count` is 0. Saves the number still to emit."""
    if count < 0:
        raise ValueError(f"take: count must be 0 or more, got {count}")
    return applied(Take, count)


def filter_indexed(predicate: Callable[[Any, int], object]) -> Transform:
    """The values for which `predicate(value, index)` is true, index from 0. Saves the index."""
    return applied(FilterIndexed, predicate)


def distinct(key_mapper: Callable[[Any], Any] | None = None) -> Transform:
    """The values whose hashable key is new. Saves all keys, in the object space."""
    return applied(Distinct, key_mapper)


def distinct_until_changed(
    key_mapper: Callable[[Any], Any] | None = None, comparer: Callable[[Any, Any], object] = eq
) -> Transform:
    """The values whose key differs from the key of the value before. Saves the last key."""
    return applied(DistinctUntilChanged, key_mapper, comparer)


def only(predicate: Callable[[Any], object] | None, transform: Transform) -> Transform:
    """`transform` after `where(predicate)`; without a predicate, `transform` alone."""
    return transform if predicate is None else compose(where(predicate), transform)


class Where(Operator[A, A]):
    __slots__ = ("_predicate",)

    NAME = "where"

    def __init__(self, predicate: Callable[[A], object]) -> None:
        self._predicate: Final = predicate

    def on_next(self, value: A, /) -> None:
        try:
            passes = self._predicate(value)
        except Exception as error:  # noqa: BLE001 - a user's function
            self.fail(error)
            return
        if passes:
            self.emit(value)


class Take(Operator[A, A]):
    __slots__ = ("_left",)

    NAME = "take"

    def __init__(self, count: int) -> None:
        self._left = count

    def on_start(self) -> None:
        """If `count` is 0, complete at the next timer: nothing may be emitted here."""
        if self._left == 0:
            self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        self.complete()

    def on_next(self, value: A, /) -> None:
        """Counts before it emits, because the value may cause another event here."""
        if self._left == 0:
            return
        self._left -= 1
        self.changed()
        is_last = self._left == 0
        self.emit(value)
        if is_last:
            self.complete()

    def save_state(self) -> int:
        return self._left

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._left = state


class FilterIndexed(UserFunctionOperator[Any, Any]):
    __slots__ = ("_next", "_predicate")

    NAME = "filter_indexed"

    def __init__(self, predicate: Callable[[Any, int], object]) -> None:
        self._predicate: Final = predicate
        self._next = 0

    def on_next(self, value: Any, /) -> None:
        index = self._next
        self._next += 1
        self.changed()
        if self.call(self._predicate, value, index):  # FAILED is true; emit does nothing then
            self.emit(value)

    def save_state(self) -> int:
        return self._next

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._next = state


class Distinct(UserFunctionOperator[Any, Any]):
    __slots__ = ("_key_mapper", "_keys")

    NAME = "distinct"

    def __init__(self, key_mapper: Callable[[Any], Any] | None) -> None:
        self._key_mapper: Final = key_mapper
        self._keys: PersistedSet[Any]

    def on_open(self) -> None:
        self._keys = self.objects.set("keys")

    def on_next(self, value: Any, /) -> None:
        key = key_of(value if self._key_mapper is None else self.call(self._key_mapper, value))
        if key is not FAILED and not self.call(self._keys.__contains__, key):
            self._keys.add(key)
            self.emit(value)


class DistinctUntilChanged(UserFunctionOperator[Any, Any]):
    __slots__ = ("_comparer", "_key", "_key_mapper")

    NAME = "distinct_until_changed"

    def __init__(
        self, key_mapper: Callable[[Any], Any] | None, comparer: Callable[[Any, Any], object]
    ) -> None:
        self._key_mapper: Final = key_mapper
        self._comparer: Final = comparer
        self._key: Any = ABSENT

    def on_next(self, value: Any, /) -> None:
        key = value if self._key_mapper is None else self.call(self._key_mapper, value)
        if key is FAILED or (self._key is not ABSENT and self.call(self._comparer, self._key, key)):
            return
        self._key = storable(key)
        self.changed()
        self.emit(value)

    def save_state(self) -> list[Any]:
        return [] if self._key is ABSENT else [self._key]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._key = state[0] if state else ABSENT

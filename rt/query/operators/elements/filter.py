"""Operators that emit some of the values, or one of them.

Operators for one value fail with `WrongCount` if there is none; `…_or_default` emit their default instead.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any, Final, TypeVar

from rt.objects import PersistedSet
from rt.objects.core.typed_json import key_of
from rt.query.core.errors import WrongCount
from rt.query.core.key_expiry import KeyExpiry
from rt.query.core.observable import Observable, Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration
from rt.query.core.source import ValueTest
from rt.query.operators.user_functions import (
    ABSENT,
    FAILED,
    IndexedOperator,
    UserFunctionOperator,
    check_least,
    compose,
    period_ns,
    storable,
)

A = TypeVar("A")
Predicate = Callable[[Any], object]


def where(predicate: Predicate) -> Transform:
    """The values for which `predicate` is true. Saves nothing."""
    return applied(Where, predicate)


def filter_indexed(predicate: Callable[[Any, int], object]) -> Transform:
    """The values for which `predicate(value, index)` is true, index from 0. Saves the index."""
    return applied(FilterIndexed, predicate)


def partition(predicate: Predicate) -> Callable[[Observable[Any]], tuple[Observable[Any], Observable[Any]]]:
    """Two observables: the values for which `predicate` is true, and the others.

    `matching, others = partition(predicate)(source)`. Each subscribes to the source: use it inside `share`,
    so that the operators before it run once. Saves nothing.
    """

    def split(source: Observable[Any]) -> tuple[Observable[Any], Observable[Any]]:
        return source.pipe(where(predicate)), source.pipe(where(lambda value: not predicate(value)))

    return split


def distinct(key_mapper: Callable[[Any], Any] | None = None, *, ttl: Duration | None = None) -> Transform:
    """The values whose hashable key is new. With `ttl`, also if that time passed without values of its key.

    Saves all keys, in the object space.
    """
    if ttl is None:
        return applied(Distinct, key_mapper)
    period_ns("distinct", ttl)
    return applied(DistinctFor, key_mapper, ttl)


def distinct_until_changed(
    key_mapper: Callable[[Any], Any] | None = None, comparer: Callable[[Any, Any], object] = eq
) -> Transform:
    """The values whose key differs from the key of the value before. Saves the last key."""
    return applied(DistinctUntilChanged, key_mapper, comparer)


def first(predicate: Predicate | None = None) -> Transform:
    """The first value for which `predicate` is true; then completes. Saves nothing."""
    return only(predicate, applied(ElementAt, 0, ABSENT))


def first_or_default(predicate: Predicate | None = None, default_value: Any = None) -> Transform:
    """As `first`, or the default. Saves nothing."""
    return only(predicate, applied(ElementAt, 0, default_value))


def last(predicate: Predicate | None = None) -> Transform:
    """At the end, the last value for which `predicate` is true. Saves the last value so far."""
    return only(predicate, applied(Last, ABSENT))


def last_or_default(default_value: Any = None, predicate: Predicate | None = None) -> Transform:
    """As `last`, or the default. Saves the last value so far."""
    return only(predicate, applied(Last, default_value))


def single(predicate: Predicate | None = None) -> Transform:
    """At the end, the only value for which `predicate` is true; `WrongCount` at a second. Saves the value."""
    return only(predicate, applied(Single, ABSENT))


def single_or_default(predicate: Predicate | None = None, default_value: Any = None) -> Transform:
    """As `single`, or the default. Saves the value."""
    return only(predicate, applied(Single, default_value))


def element_at(index: int) -> Transform:
    """The value at `index`, from 0; then completes. Saves the number of values before it."""
    return element_at_or_default(index, ABSENT)


def element_at_or_default(index: int, default_value: Any = None) -> Transform:
    """As `element_at`, or the default. Saves the number of values before it."""
    check_least("element_at", "index", index, 0)
    return applied(ElementAt, index, default_value)


def only(predicate: Predicate | None, transform: Transform) -> Transform:
    """`transform` after `where(predicate)`; without a predicate, `transform` alone."""
    return transform if predicate is None else compose(where(predicate), transform)


class Where(UserFunctionOperator[A, A], ValueTest):
    __slots__ = ("_predicate",)
    NAME = "where"

    def __init__(self, predicate: Callable[[A], object]) -> None:
        self._predicate: Final = predicate

    def on_next(self, value: A, /) -> None:
        try:
            passes = self._predicate(value)
        except Exception as error:  # noqa: BLE001 - a user's function
            self.on_test_failed(error, value)
            return
        if passes:
            self.emit(value)

    def test_and_send(self) -> tuple[Callable[[A], object], Callable[[A], object]] | None:
        return (self._predicate, self._out.on_next) if type(self) is Where else None

    def on_test_failed(self, error: Exception, value: A, /) -> None:
        passes = self.call_again(error, self._predicate, value)
        if passes and passes is not FAILED:
            self.emit(value)


class FilterIndexed(IndexedOperator):
    __slots__ = ()
    NAME = "filter_indexed"

    def on_next(self, value: Any, /) -> None:
        passes = self.call_indexed(value)
        if passes and passes is not FAILED:
            self.emit(value)


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


class DistinctFor(UserFunctionOperator[Any, Any]):
    __slots__ = ("_key_mapper", "_keys", "_ttl")
    NAME = "distinct_for"

    def __init__(self, key_mapper: Callable[[Any], Any] | None, ttl: Duration) -> None:
        self._key_mapper: Final = key_mapper
        self._ttl: Final = ttl
        self._keys: KeyExpiry

    def on_open(self) -> None:
        self._keys = KeyExpiry(self, self._ttl)

    def on_next(self, value: Any, /) -> None:
        key = key_of(value if self._key_mapper is None else self.call(self._key_mapper, value))
        if key is FAILED or (is_known := self.call(self._keys.__contains__, key)) is FAILED:
            return
        self._keys.touch(key)
        if not is_known:
            self.emit(value)

    def on_timer(self, key: str, /) -> None:
        self._keys.expire()


class DistinctUntilChanged(UserFunctionOperator[Any, Any]):
    """`_key` holds the last key, or nothing."""

    __slots__ = ("_comparer", "_key", "_key_mapper")
    NAME = "distinct_until_changed"
    SAVED = "_key"

    def __init__(
        self, key_mapper: Callable[[Any], Any] | None, comparer: Callable[[Any, Any], object]
    ) -> None:
        self._key_mapper: Final = key_mapper
        self._comparer: Final = comparer
        self._key: list[Any] = []

    def on_next(self, value: Any, /) -> None:
        key = value if self._key_mapper is None else self.call(self._key_mapper, value)
        if key is FAILED or (self._key and self.call(self._comparer, self._key[0], key)):
            return
        self._key = [storable(key)]
        self.changed()
        self.emit(value)


class ElementAt(Operator[Any, Any]):
    __slots__ = ("_at", "_default", "_left")
    NAME = "element_at"
    SAVED = "_left"

    def __init__(self, index: int, default: Any) -> None:
        self._at: Final = index
        self._default: Final = default
        self._left = index

    def on_next(self, value: Any, /) -> None:
        if self._left:
            self._left -= 1
            self.changed()
        else:
            complete_with(self, value)

    def on_completed(self) -> None:
        complete_with(self, self._default, self._at - self._left, f"{self._at + 1} or more values")


class Last(Operator[Any, Any]):
    """`_last` holds the last value, or nothing."""

    __slots__ = ("_default", "_last")
    NAME = "last"
    SAVED = "_last"

    def __init__(self, default: Any) -> None:
        self._default: Final = default
        self._last: list[Any] = []

    def on_next(self, value: Any, /) -> None:
        self._last = [storable(value)]
        self.changed()

    def on_completed(self) -> None:
        complete_with(self, self._last[0] if self._last else self._default)


class Single(Last):
    __slots__ = ()
    NAME = "single"

    def on_next(self, value: Any, /) -> None:
        if self._last:
            self.fail(WrongCount("too many values", where=self.address, got="2 or more", expected=1))
            return
        super().on_next(value)


def complete_with(
    operator: Operator[Any, Any], value: Any, got: int = 0, expected: str = "1 or more values"
) -> None:
    """Emit the value and complete. If it is ABSENT, fail with `WrongCount`."""
    if value is ABSENT:
        what = f"not enough values for {operator.NAME}"
        operator.fail(WrongCount(what, where=operator.address, got=got, expected=expected))
        return
    operator.emit(value)
    operator.complete()

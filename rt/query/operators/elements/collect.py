"""Operators that emit one collection at the end. Until then it is in the object space, up to a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from rt.objects import PersistedDictionary, PersistedList, PersistedSet
from rt.objects.core.typed_json import key_of
from rt.query.core.errors import LimitExceeded
from rt.query.core.observable import Transform, applied
from rt.query.operators.elements.aggregate import LIMIT
from rt.query.operators.elements.filter import complete_with
from rt.query.operators.user_functions import FAILED, UserFunctionOperator, check_least, storable

Mapper = Callable[[Any], Any]
Comparer = Callable[[Any, Any], Any]


def to_dict(key_mapper: Mapper, element_mapper: Mapper | None = None, *, limit: int = LIMIT) -> Transform:
    """At the end, a dict of `element_mapper(value)` by hashable keys. A later value replaces an earlier one.

    More than `limit` keys: `LimitExceeded`. Saves the items, in the object space.
    """
    check_least("to_dict", "limit", limit, 0)
    return applied(ToDict, key_mapper, element_mapper, limit)


def to_set(*, limit: int = LIMIT) -> Transform:
    """At the end, the set of the hashable values. More than `limit`: `LimitExceeded`.

    Saves the set, in the object space.
    """
    check_least("to_set", "limit", limit, 0)
    return applied(ToSet, limit)


def min_by(key_mapper: Mapper, comparer: Comparer | None = None, *, limit: int = LIMIT) -> Transform:
    """At the end, the list of the values with the least key, which is empty without values.

    `comparer(one, other)` is negative if one key is less. More than `limit` such values: `LimitExceeded`.
    Saves the key, and the values in the object space.
    """
    check_least("min_by", "limit", limit, 0)
    return applied(MinBy, key_mapper, comparer or _compare, limit)


def max_by(key_mapper: Mapper, comparer: Comparer | None = None, *, limit: int = LIMIT) -> Transform:
    """As `min_by`, with the greatest key. Saves the same, in the object space."""
    check_least("max_by", "limit", limit, 0)
    return applied(MaxBy, key_mapper, comparer or _compare, limit)


class Collection(UserFunctionOperator[Any, Any]):
    """Fails if it would hold more than its limit."""

    __slots__ = ("_limit",)

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit

    def has_room(self, held: int) -> bool:
        """Whether one more value can be added to `held` values. If not, this operator fails."""
        if held < self._limit:
            return True
        what = f"{self.NAME} has too many values"
        hint = "Pass a higher limit, or use windows."
        self.fail(LimitExceeded(what, where=self.address, expected=self._limit, hint=hint))
        return False


class ToDict(Collection):
    __slots__ = ("_element_mapper", "_items", "_key_mapper")
    NAME = "to_dict"

    def __init__(self, key_mapper: Mapper, element_mapper: Mapper | None, limit: int) -> None:
        super().__init__(limit)
        self._key_mapper: Final = key_mapper
        self._element_mapper: Final = element_mapper
        self._items: PersistedDictionary[Any, Any]

    def on_open(self) -> None:
        self._items = self.objects.dictionary("items")

    def on_next(self, value: Any, /) -> None:
        key = key_of(self.call(self._key_mapper, value))
        if key is FAILED:
            return
        element = value if self._element_mapper is None else self.call(self._element_mapper, value)
        is_known = FAILED if element is FAILED else self.call(self._items.__contains__, key)
        if is_known is not FAILED and (is_known or self.has_room(len(self._items))):
            self.call(self._items.__setitem__, key, element)

    def on_completed(self) -> None:
        complete_with(self, dict(self._items.items()))


class ToSet(Collection):
    __slots__ = ("_values",)
    NAME = "to_set"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._values: PersistedSet[Any]

    def on_open(self) -> None:
        self._values = self.objects.set("values")

    def on_next(self, value: Any, /) -> None:
        value = key_of(value)
        is_known = self.call(self._values.__contains__, value)
        if is_known is not FAILED and not is_known and self.has_room(len(self._values)):
            self.call(self._values.add, value)

    def on_completed(self) -> None:
        complete_with(self, set(self._values))


class MinBy(Collection):
    """`_key` holds the key of the values in the list, or nothing."""

    __slots__ = ("_best", "_comparer", "_key", "_key_mapper")
    NAME = "min_by"
    SAVED = "_key"
    SIGN: ClassVar[int] = -1
    """The sign of the comparer's result if a key is better than the best key so far."""

    def __init__(self, key_mapper: Mapper, comparer: Comparer, limit: int) -> None:
        super().__init__(limit)
        self._key_mapper: Final = key_mapper
        self._comparer: Final = comparer
        self._key: list[Any] = []
        self._best: PersistedList[Any]

    def on_open(self) -> None:
        self._best = self.objects.list("best")

    def on_next(self, value: Any, /) -> None:
        key = self.call(self._key_mapper, value)
        if key is FAILED:
            return
        order = self.call(self._comparer, key, self._key[0]) if self._key else self.SIGN
        if order is FAILED or order * self.SIGN < 0:
            return
        storable(value)
        if order * self.SIGN > 0:
            self._key = [storable(key)]
            self.changed()
            self._best.clear()
        if self.has_room(len(self._best)):
            self._best.append(value)

    def on_completed(self) -> None:
        complete_with(self, list(self._best))


class MaxBy(MinBy):
    __slots__ = ()
    NAME = "max_by"
    SIGN = 1


def _compare(one: Any, other: Any) -> int:
    return 1 if one > other else -1 if one < other else 0

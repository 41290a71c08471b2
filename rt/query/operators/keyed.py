"""Operators with state for each key: groups, and aggregates by key. The state is in the object space.

For a click of one of a million users, a checkpoint saves the rows of that user only. `ttl` bounds the number
of keys: a key without values for that long is forgotten (see `KeyExpiry`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from rt.objects import PersistedDictionary
from rt.objects.core.typed_json import key_of
from rt.query.core.errors import LimitExceeded
from rt.query.core.key_expiry import KeyExpiry
from rt.query.core.observable import Transform, applied
from rt.query.core.scheduler import Duration
from rt.query.operators.elements.aggregate import LIMIT
from rt.query.operators.elements.filter import complete_with
from rt.query.operators.user_functions import ABSENT, FAILED, UserFunctionOperator, check_least, period_ns
from rt.query.operators.windows import SubjectOwner

Mapper = Callable[[Any], Any]


def group_by(
    key_mapper: Mapper, element_mapper: Mapper | None = None, *, ttl: Duration | None = None
) -> Transform:
    """For every key a group, emitted at its first value. It sends `element_mapper(value)`.

    A group has its `key`, and must be subscribed to immediately, as `flat_map` does. Groups end with the
    source. With `ttl`, a group also ends after that time without values. The next value with its key starts a
    new group. Saves the keys, in the object space.
    """
    _check_ttl("group_by", ttl)
    return applied(GroupBy, key_mapper, element_mapper, ttl)


def scan_by(
    key_mapper: Mapper,
    accumulator: Callable[[Any, Any], Any],
    seed: Any = ABSENT,
    *,
    ttl: Duration | None = None,
) -> Transform:
    """For every value a tuple of its hashable key and `accumulator(result, value)`.

    The result is that of the key so far. The first is `seed`, or the first value. With `ttl`, a key without
    values for that time starts again. Saves the results, in the object space.
    """
    _check_ttl("scan_by", ttl)
    return applied(ScanBy, key_mapper, accumulator, seed, ttl)


def reduce_by(
    key_mapper: Mapper,
    accumulator: Callable[[Any, Any], Any],
    seed: Any = ABSENT,
    *,
    limit: int = LIMIT,
) -> Transform:
    """At the end, a dict of the last results of `scan_by`, which is empty without values.

    More than `limit` keys: `LimitExceeded`. Saves the results, in the object space.
    """
    check_least("reduce_by", "limit", limit, 0)
    return applied(ReduceBy, key_mapper, accumulator, seed, limit)


def count_by(key_mapper: Mapper, *, limit: int = LIMIT) -> Transform:
    """At the end, a dict of the number of values with each hashable key.

    More than `limit` keys: `LimitExceeded`. Saves the numbers, in the object space.
    """
    check_least("count_by", "limit", limit, 0)
    return applied(ReduceBy, key_mapper, _add_one, 0, limit)


class GroupBy(SubjectOwner):
    """Groups are named by numbers, in the order of their first values."""

    __slots__ = ("_element_mapper", "_expiry", "_key_mapper", "_made", "_names", "_ttl")
    NAME = "group_by"
    VERSION = 2

    def __init__(self, key_mapper: Mapper, element_mapper: Mapper | None, ttl: Duration | None) -> None:
        super().__init__()
        self._key_mapper: Final = key_mapper
        self._element_mapper: Final = element_mapper
        self._ttl: Final = ttl
        self._expiry: KeyExpiry | None = None
        self._made = 0
        self._names: PersistedDictionary[Any, str]

    def on_open(self) -> None:
        self._names = self.objects.dictionary("keys")
        self._expiry = None if self._ttl is None else KeyExpiry(self, self._ttl)

    def on_next(self, value: Any, /) -> None:
        key = key_of(self.call(self._key_mapper, value))
        if key is FAILED or (name := self.call(self._names.get, key)) is FAILED:
            return
        if name is None and self._is_unsubscribed:
            return
        element = value if self._element_mapper is None else self.call(self._element_mapper, value)
        if element is FAILED:
            return
        if name is None:
            name = self._names[key] = str(self._made)
            self._made += 1
            self.changed()
            self.open_inner(name, key)
        if self.is_disposed:
            return
        if self._expiry is not None:
            self._expiry.touch(key)
        self._subjects[name].on_next(element)

    def on_timer(self, key: str, /) -> None:
        """End the groups that have expired."""
        for expired in self._expiry.expire() if self._expiry else ():
            if self.is_disposed:
                return
            self._subjects.pop(self._names.pop(expired)).on_completed()
        self._end_if_idle()

    def save_state(self) -> list[Any]:
        return [self._is_unsubscribed, self._made]

    def load_state(self, state: Any, version: int, /) -> None:
        self._is_unsubscribed, self._made = state
        for key, name in sorted(self._names.items(), key=lambda each: int(each[1])):
            self.reopen_inner(name, key)


class Results(UserFunctionOperator[Any, Any]):
    """Base of aggregates by key."""

    __slots__ = ("_accumulator", "_key_mapper", "_results", "_seed")

    def __init__(self, key_mapper: Mapper, accumulator: Callable[[Any, Any], Any], seed: Any) -> None:
        self._key_mapper: Final = key_mapper
        self._accumulator: Final = accumulator
        self._seed: Final = seed
        self._results: PersistedDictionary[Any, Any]

    def on_open(self) -> None:
        self._results = self.objects.dictionary("results")

    def fold(self, value: Any) -> Any:
        """Add the value to the result of its key. Returns the key, or FAILED."""
        found = self.call(self._folded, value)
        if found is FAILED:
            return FAILED
        key, self._results[found[0]] = found
        return key

    def _folded(self, value: Any) -> tuple[Any, Any]:
        key = key_of(self._key_mapper(value))
        result = self._results.get(key, self._seed)
        if result is ABSENT:
            return key, value
        return key, self._accumulator(deepcopy(result) if result is self._seed else result, value)


class ScanBy(Results):
    __slots__ = ("_expiry", "_ttl")
    NAME = "scan_by"

    def __init__(
        self,
        key_mapper: Mapper,
        accumulator: Callable[[Any, Any], Any],
        seed: Any,
        ttl: Duration | None,
    ) -> None:
        super().__init__(key_mapper, accumulator, seed)
        self._ttl: Final = ttl
        self._expiry: KeyExpiry | None = None

    def on_open(self) -> None:
        super().on_open()
        self._expiry = None if self._ttl is None else KeyExpiry(self, self._ttl)

    def on_next(self, value: Any, /) -> None:
        key = self.fold(value)
        if key is FAILED:
            return
        if self._expiry is not None:
            self._expiry.touch(key)
        self.emit((key, self._results[key]))

    def on_timer(self, key: str, /) -> None:
        for expired in self._expiry.expire() if self._expiry else ():
            del self._results[expired]


class ReduceBy(Results):
    __slots__ = ("_limit",)
    NAME = "reduce_by"

    def __init__(
        self, key_mapper: Mapper, accumulator: Callable[[Any, Any], Any], seed: Any, limit: int
    ) -> None:
        super().__init__(key_mapper, accumulator, seed)
        self._limit: Final = limit

    def on_next(self, value: Any, /) -> None:
        if self.fold(value) is not FAILED and len(self._results) > self._limit:
            what = "too many keys"
            hint = "Pass a higher limit, or use windows."
            self.fail(LimitExceeded(what, where=self.address, expected=self._limit, hint=hint))

    def on_completed(self) -> None:
        complete_with(self, dict(self._results.items()))


def _add_one(total: int, _: Any) -> int:
    return total + 1


def _check_ttl(name: str, ttl: Duration | None) -> None:
    if ttl is not None:
        period_ns(name, ttl)

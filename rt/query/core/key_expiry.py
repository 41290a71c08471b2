"""Finds the expired keys of an operator. A key expires if no value touches it for the time to live.

A key belongs to the period in which it was last touched. A period is 1/16 of the time to live. All keys of a
period expire together, when the time to live has passed since the end of the period. So a key expires between
`ttl` and `ttl` plus one period after it was last touched. One timer serves all keys. A key costs at most one
row per period, no matter how often it is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rt.query.core.scheduler import Duration, duration_ns

if TYPE_CHECKING:
    from rt.objects import PersistedDictionary
    from rt.query.core.operator import Operator

PERIODS: Final = 16

EXPIRE: Final = "@expire"
"""Key of the timer."""


class KeyExpiry:
    """Make it in `on_open`. `on_timer` of the operator must call `expire` when the timer `EXPIRE` fires.

    `ttl`: seconds, or a timedelta. Keys are hashable, and JSON restores them unchanged.
    """

    __slots__ = ("_by_period", "_next_number", "_operator", "_period_ns", "_touched", "_ttl_ns")

    def __init__(self, operator: Operator[Any, Any], ttl: Duration) -> None:
        self._operator: Final = operator
        self._ttl_ns: Final = duration_ns(ttl)
        self._period_ns: Final = max(1, self._ttl_ns // PERIODS)
        self._touched: Final[PersistedDictionary[Any, list[int]]] = operator.objects.dictionary("@expiry")
        """By key: the start of the period in which it was last touched, and a number that gives the order."""
        self._by_period: dict[int, dict[Any, None]] = {}
        self._next_number = 0
        for key, (period, number) in sorted(self._touched.items(), key=lambda each: each[1]):
            self._by_period.setdefault(period, {})[key] = None
            self._next_number = number + 1

    def __contains__(self, key: object) -> bool:
        return key in self._touched

    def __len__(self) -> int:
        return len(self._touched)

    def touch(self, key: Any) -> None:
        """A value with this key arrived."""
        now_ns = self._operator.now_ns
        period = now_ns - now_ns % self._period_ns
        before = self._touched.get(key)
        if before is not None:
            if before[0] == period:
                return
            self._remove(key, before[0])
        self._touched[key] = [period, self._next_number]
        self._next_number += 1
        self._by_period.setdefault(period, {})[key] = None
        if not self._operator.has_timer(EXPIRE):
            self._operator.set_timer(self._end_ns(period), EXPIRE)

    def forget(self, key: Any) -> None:
        """Does nothing if the key is not known."""
        before = self._touched.pop(key, None)
        if before is not None:
            self._remove(key, before[0])

    def expire(self) -> list[Any]:
        """Forget and return the expired keys.

        Keys are ordered by the period in which they were last touched, then by their first touch in it.
        """
        now_ns, expired = self._operator.now_ns, list[Any]()
        for period in sorted(self._by_period):
            if self._end_ns(period) > now_ns:
                self._operator.set_timer(self._end_ns(period), EXPIRE)
                break
            expired += self._by_period.pop(period)
        for key in expired:
            del self._touched[key]
        return expired

    def _end_ns(self, period: int) -> int:
        return period + self._period_ns + self._ttl_ns

    def _remove(self, key: Any, period: int) -> None:
        keys = self._by_period[period]
        del keys[key]
        if not keys:
            del self._by_period[period]

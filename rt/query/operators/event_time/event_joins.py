"""Joins of two sources by key and event time.

Values are processed in the order of their times, when the watermark has passed them. So the output does not
depend on the order of arrival, except for late values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

from rt.errors import InvalidOption
from rt.objects import PersistedDictionary
from rt.objects.core.typed_json import key_of
from rt.query.core.observable import Applied, Observable, Transform
from rt.query.core.scheduler import Duration, duration_ns
from rt.query.operators.event_time.time_order import TimeOrdered
from rt.query.operators.user_functions import FAILED, sources_of

LEFT: Final = 0
RIGHT: Final = 1
KeyMapper = Callable[[Any], Any]


def interval_join(
    other: Observable[Any],
    *,
    left_key: KeyMapper,
    right_key: KeyMapper,
    before: Duration = 0,
    after: Duration = 0,
    keep: Literal["matched", "left", "right", "all"] = "matched",
    late: str | None = None,
) -> Transform:
    """A tuple of a value and one of `other` with the same key, for all pairs that are close in time.

    The time of the value of `other` is at most `before` earlier and at most `after` later. Pairs come in the
    order of the later time, when the watermark has passed it. `keep`: which values without a partner are
    emitted too, when none can come any more, with None as partner. Late values as in `in_time_order`. Saves
    the values that can still have a partner, in the object space.
    """
    sources_of("interval_join", (other,))
    if keep not in {"matched", "left", "right", "all"}:
        raise InvalidOption(f"interval_join: keep must be 'matched', 'left', 'right' or 'all', got {keep!r}")
    spans = duration_ns(after), duration_ns(before)
    alone = keep in {"left", "all"}, keep in {"right", "all"}
    return lambda source: Applied(
        lambda: IntervalJoin((left_key, right_key), spans, alone, late), (source, other)
    )


def temporal_join(
    table: Observable[Any],
    *,
    left_key: KeyMapper,
    table_key: KeyMapper,
    is_deleted: Callable[[Any], bool] | None = None,
    ttl: Duration | None = None,
    keep: Literal["matched", "left"] = "matched",
    late: str | None = None,
) -> Transform:
    """A tuple of each value and the value of `table` with its key that was valid at the time of the value.

    That is the last one with the same or an earlier time. A value of `table` for which `is_deleted` is true
    deletes its key. With `ttl` it is valid for that long. `keep="left"`: a value without one is emitted with
    None. The tuple comes when the watermark has passed the time of the value. Ends with the source. Late
    values as in `in_time_order`. Saves the waiting values and the table, in the object space.
    """
    sources_of("temporal_join", (table,))
    if keep not in {"matched", "left"}:
        raise InvalidOption(f"temporal_join: keep must be 'matched' or 'left', got {keep!r}")
    ttl_ns = None if ttl is None else duration_ns(ttl)
    return lambda source: Applied(
        lambda: TemporalJoin(left_key, table_key, is_deleted, ttl_ns, keep == "left", late), (source, table)
    )


_Kept = tuple[int, int, Any, Any, bool]
"""The side, the time, the key, the value, and whether it had a partner."""


class IntervalJoin(TimeOrdered):
    """A value of a side is kept until the watermark has passed its time plus the span of that side.

    `_kept` has the processed values by their arrival numbers. `_by_time` has their times and numbers by side.
    `_by_key` has them by side and key. Both are in the order of processing, which is the order of time.
    """

    __slots__ = ("_alone", "_by_key", "_by_time", "_kept", "_key_mappers", "_spans_ns")
    NAME = "interval_join"

    def __init__(
        self,
        key_mappers: tuple[KeyMapper, KeyMapper],
        spans_ns: tuple[int, int],
        alone: tuple[bool, bool],
        late: str | None,
    ) -> None:
        super().__init__(late)
        self._key_mappers: Final = key_mappers
        self._spans_ns: Final = spans_ns
        self._alone: Final = alone
        self._kept: PersistedDictionary[int, _Kept]
        self._by_time: tuple[deque[tuple[int, int]], deque[tuple[int, int]]] = deque(), deque()
        self._by_key: dict[tuple[int, Any], list[tuple[int, int]]] = {}

    def on_open(self) -> None:
        super().on_open()
        self._kept = self.objects.dictionary("kept", keys=int)

    def load_state(self, state: Any, version: int, /) -> None:
        super().load_state(state, version)
        kept = sorted((time_ns, number, side, key) for number, (side, time_ns, key, *_) in self._kept.items())
        for time_ns, number, side, key in kept:
            self._keep(side, key, time_ns, number)

    def process(self, index: int, time_ns: int, number: int, value: Any) -> None:
        key = key_of(self.call(self._key_mappers[index], value))
        if key is FAILED:
            return
        other = RIGHT if index == LEFT else LEFT
        place = (other, key)
        known = self.call(self._by_key.get, place)
        if known is FAILED:
            return
        partners = (known or [])[bisect_left(known or [], (time_ns - self._spans_ns[other], -1)) :]
        self._kept[number] = index, time_ns, key, value, bool(partners)
        self._keep(index, key, time_ns, number)
        for _, partner in partners:
            side, partner_ns, _, partner_value, had_partner = self._kept[partner]
            if not had_partner:
                self._kept[partner] = side, partner_ns, key, partner_value, True
        for _, partner in partners:
            if not self.is_disposed:
                found = self._kept[partner][3]
                self.emit_at(time_ns, (value, found) if index == LEFT else (found, value))

    def next_expiry_ns(self) -> int | None:
        heads = zip(self._by_time, self._spans_ns, strict=True)
        return min((each[0][0] + span_ns + 1 for each, span_ns in heads if each), default=None)

    def expire(self) -> None:
        expiry_ns = self.next_expiry_ns()
        for each, span_ns in zip(self._by_time, self._spans_ns, strict=True):
            if each and each[0][0] + span_ns + 1 == expiry_ns:
                self._remove(*each.popleft())
                return

    def _remove(self, time_ns: int, number: int) -> None:
        side, _, key, value, had_partner = self._kept.pop(number)
        known = self._by_key[side, key]
        del known[bisect_left(known, (time_ns, number))]
        if not known:
            del self._by_key[side, key]
        if self._alone[side] and not had_partner:
            self.emit_at(time_ns + self._spans_ns[side], (value, None) if side == LEFT else (None, value))

    def _keep(self, side: int, key: Any, time_ns: int, number: int) -> None:
        self._by_time[side].append((time_ns, number))
        self._by_key.setdefault((side, key), []).append((time_ns, number))


class TemporalJoin(TimeOrdered):
    """`_table` has the time and value of each key, as of the last value that was processed.

    `_by_time` has times and keys of the table in the order of processing, if rows expire.
    """

    __slots__ = ("_by_time", "_is_deleted", "_keeps_left", "_left_key", "_table", "_table_key", "_ttl_ns")
    NAME = "temporal_join"

    def __init__(
        self,
        left_key: KeyMapper,
        table_key: KeyMapper,
        is_deleted: Callable[[Any], bool] | None,
        ttl_ns: int | None,
        keeps_left: bool,
        late: str | None,
    ) -> None:
        super().__init__(late)
        self._left_key: Final = left_key
        self._table_key: Final = table_key
        self._is_deleted: Final = is_deleted
        self._ttl_ns: Final = ttl_ns
        self._keeps_left: Final = keeps_left
        self._table: PersistedDictionary[Any, tuple[int, Any]]
        self._by_time: deque[tuple[int, Any]] = deque()

    def on_open(self) -> None:
        super().on_open()
        self._table = self.objects.dictionary("table")

    def load_state(self, state: Any, version: int, /) -> None:
        super().load_state(state, version)
        if self._ttl_ns is not None:
            rows = ((time_ns, key) for key, (time_ns, _) in self._table.items())
            self._by_time.extend(sorted(rows, key=lambda each: each[0]))

    def rank(self, index: int) -> int:
        """Values of the table come first."""
        return 1 - index

    def process(self, index: int, time_ns: int, number: int, value: Any) -> None:
        key = key_of(self.call(self._table_key if index == RIGHT else self._left_key, value))
        if key is FAILED or (row := self.call(self._table.get, key)) is FAILED:
            return
        if index == LEFT:
            if row is not None or self._keeps_left:
                self.emit_at(time_ns, (value, None if row is None else row[1]))
            return
        is_deleted = self._is_deleted is not None and self.call(self._is_deleted, value)
        if is_deleted is FAILED:
            return
        if is_deleted:
            self._table.pop(key, None)
            return
        self._table[key] = time_ns, value
        if self._ttl_ns is not None:
            self._by_time.append((time_ns, key))

    def next_expiry_ns(self) -> int | None:
        if self._ttl_ns is None:
            return None
        while self._by_time:
            time_ns, key = self._by_time[0]
            row = self._table.get(key)
            if row is not None and row[0] == time_ns:
                return time_ns + self._ttl_ns + 1
            self._by_time.popleft()
        return None

    def expire(self) -> None:
        _, key = self._by_time.popleft()
        del self._table[key]

    def on_due(self, watermark_ns: int) -> None:
        super().on_due(watermark_ns)
        self._end_with_left()

    def on_inner_completed(self, key: str, /) -> None:
        super().on_inner_completed(key)
        self._end_with_left()

    def _end_with_left(self) -> None:
        """Complete if the left source has ended and none of its values still waits for the table."""
        if self.has_input_ended(LEFT) and all(rank != self.rank(LEFT) for _, rank, _ in self._heap):
            self.complete()

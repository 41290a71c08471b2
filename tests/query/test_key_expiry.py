"""Expiry of keys with a ttl: its time, its order, its cost in a checkpoint, and crashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.errors import InvalidOption
from rt.query import KeyExpiry, Operator, Source, applied
from rt.query import operators as ops
from rt.query.core.key_expiry import PERIODS
from rt.testing.queries import MarbleEvent, check_laws, rows_written, run

IN = Source("in")
TTL_S = 16.0


class Expiring(Operator[Any, Any]):
    """Emits the keys that expire. A negative value makes it forget a key."""

    __slots__ = ("_expiry",)
    NAME = "expiring"

    def on_open(self) -> None:
        self._expiry = KeyExpiry(self, TTL_S)

    def on_next(self, value: int, /) -> None:
        if value < 0:
            self._expiry.forget(-value)
        else:
            self._expiry.touch(value)

    def on_timer(self, key: str, /) -> None:
        for expired in self._expiry.expire():
            self.emit(expired)

    def on_completed(self) -> None:
        assert len(self._expiry) == 0


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(-5, 5)), max_size=40))
@settings(max_examples=40, deadline=None)
def test_keys_expire_one_ttl_after_the_period_of_their_last_value(steps: list[tuple[int, int]]) -> None:
    at, events = 0, []
    period_of: dict[int, int] = {}  # By key, in the order of the first value in the period.
    expected: list[tuple[float, int]] = []

    def expire(now_s: float) -> None:
        for key, period in list(period_of.items()):
            end_s = period + 1 + TTL_S
            if end_s <= now_s:
                expected.append((end_s, key))
                del period_of[key]

    for tenths, value in steps:
        at += tenths
        events.append(MarbleEvent(at / 10, "next", value))
        expire(at / 10)
        if value < 0:
            period_of.pop(-value, None)
        elif period_of.get(value) != at // 10:
            period_of.pop(value, None)
            period_of[value] = at // 10
    expire(10_000)
    output = check_laws(IN.pipe(applied(Expiring)), {"in": events})
    assert [(each.at_s, each.value) for each in output] == expected


@pytest.mark.parametrize(
    "query",
    [
        IN.pipe(ops.distinct(ttl=TTL_S)),
        IN.pipe(ops.group_by(lambda x: x, ttl=TTL_S), ops.merge_all()),
        IN.pipe(ops.scan_by(lambda x: x, lambda total, x: total + x, ttl=TTL_S)),
    ],
    ids=["distinct", "group_by", "scan_by"],
)
def test_expired_keys_are_forgotten_and_accepted_again_as_new(query: Any) -> None:
    many = [MarbleEvent(at / 10, "next", at) for at in range(300)]
    end = MarbleEvent(100, "completed")
    assert [each.at_s for each in check_laws(query, {"in": [*many[:40], end]})][-1] == 100
    again = run(query, {"in": [*many, *(MarbleEvent(60 + each.at_s, "next", each.value) for each in many)]})
    assert len(again) == 600


def test_checkpoint_writes_at_most_one_row_per_touched_key_and_period() -> None:
    query = IN.pipe(ops.distinct(ttl=1000 * PERIODS))
    for count in (50, 500):
        keys = [MarbleEvent(at / 1000, "next", at) for at in range(count)]
        repeated = [MarbleEvent(2 + at / 100, "next", 7) for at in range(100)]
        assert rows_written(query, {"in": [*keys, *repeated]}, last=100) == 0
        later = [MarbleEvent(1500 + at / 100, "next", 7) for at in range(100)]
        assert rows_written(query, {"in": [*keys, MarbleEvent(900, "next", 7), *later]}, last=100) <= 2


def test_change_of_one_group_among_many_writes_one_row() -> None:
    def counted(group: Any) -> Any:
        return group.pipe(ops.scan(lambda total, _: total + 1, 0))

    for query in (
        IN.pipe(ops.group_by(lambda x: x), ops.flat_map(counted)),
        IN.pipe(ops.group_by(lambda x: x, ttl=9000), ops.flat_map(counted)),
    ):
        keys = [MarbleEvent(at / 1000, "next", at) for at in range(1000)]
        assert rows_written(query, {"in": [*keys, MarbleEvent(5, "next", 77)]}, last=1) == 1


def test_ttl_of_zero_raises_invalid_option() -> None:
    for make in (ops.distinct, ops.group_by, ops.scan_by):
        arguments = [] if make is ops.distinct else [str] if make is ops.group_by else [str, max]
        with pytest.raises(InvalidOption, match=make.__name__):
            make(*arguments, ttl=0)  # type: ignore[operator]

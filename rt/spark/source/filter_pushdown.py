"""Decides which messages the source need not read because of a query's filters. Pure.

Filters are given by class name, column and value, as in Spark's data source API. Invariant: a message that
the filters accept is never skipped. If a filter cannot be decided here exactly, it is returned to Spark, and
Spark applies it to every row.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from rt.log.format.constants import NUMBER_MAX
from rt.log.read.projection import TIMESTAMP_HIGH_NS, TIMESTAMP_LOW_NS, Projection
from rt.spark.source.columns import COLUMNS, timestamp_ns

_Filter = TypeVar("_Filter")


class PushedFilters(Struct, frozen=True):
    """Positions from `start` up to, not including, `end`, and a selection within them."""

    start: int = 0
    end: int = NUMBER_MAX
    interest: Projection = field(default_factory=Projection)


def push_filters(filters: Iterable[_Filter], pushed: PushedFilters) -> tuple[PushedFilters, list[_Filter]]:
    """Narrow `pushed` by `filters`, all of which must hold. Also returns the filters that Spark has to
    apply.
    """
    left = []
    for each in filters:
        pushed, is_done = _push(each, pushed)
        if not is_done:
            left.append(each)
    return pushed, left


def _push(one: Any, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    """Narrow `pushed` by one filter, if it is supported. Also returns whether Spark need not apply it."""
    kind = type(one).__name__
    attribute: Sequence[str] = getattr(one, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in COLUMNS:
        return pushed, False
    if kind == "IsNotNull":
        return pushed, attribute[0] != "headers"  # No other column has nulls.
    low, high = _interval(kind, getattr(one, "value", None))
    match attribute[0]:
        case "position":
            return _push_position(kind, low, high, pushed)
        case "timestamp":
            return _push_times(_nanoseconds(low, 0), _nanoseconds(high, 999), pushed), False
        case "timestamp_ns":
            return _push_times(_whole(low), _whole(high), pushed), False
        case "session" if (names := _names(kind, one)) is not None:
            return _with(pushed, sessions=_both(pushed.interest.sessions, names)), False
        case "topic" if (names := _names(kind, one)) is not None:
            return _with(pushed, topics=_both(pushed.interest.topics, names)), False
    return pushed, False


def _interval(kind: str, value: Any) -> tuple[Any, Any]:
    """The least and the greatest accepted value, if the filter bounds them."""
    match kind:
        case "EqualTo" | "EqualNullSafe":
            return value, value
        case "GreaterThan" | "GreaterThanOrEqual":
            return value, None
        case "LessThan" | "LessThanOrEqual":
            return None, value
        case "In" if isinstance(value, Sequence) and value and None not in value:
            return min(value), max(value)
    return None, None


def _push_position(kind: str, low: Any, high: Any, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    low, high = _whole(low), _whole(high)
    if low is None and high is None:
        return pushed, False
    start = pushed.start if low is None else low + (kind == "GreaterThan")
    end = pushed.end if high is None else high + (kind != "LessThan")
    return replace(pushed, start=max(pushed.start, start), end=min(pushed.end, end)), kind != "In"


def _push_times(low_ns: int | None, high_ns: int | None, pushed: PushedFilters) -> PushedFilters:
    """The bounds are included even if the filter excludes them: Spark removes those rows."""
    interest = pushed.interest
    low_ns = TIMESTAMP_LOW_NS if low_ns is None else max(low_ns, TIMESTAMP_LOW_NS)
    high_ns = TIMESTAMP_HIGH_NS if high_ns is None else min(high_ns, TIMESTAMP_HIGH_NS)
    return _with(
        pushed,
        timestamp_low_ns=max(interest.timestamp_low_ns, low_ns),
        timestamp_high_ns=min(interest.timestamp_high_ns, high_ns),
    )


def _with(pushed: PushedFilters, **changes: Any) -> PushedFilters:
    return replace(pushed, interest=replace(pushed.interest, **changes))


def _names(kind: str, one: Any) -> frozenset[str] | None:
    value = getattr(one, "value", None)
    if kind in {"EqualTo", "EqualNullSafe"} and isinstance(value, str):
        return frozenset([value])
    if kind == "In" and isinstance(value, Sequence) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    return None


def _both(known: Container[str] | None, names: frozenset[str]) -> frozenset[str]:
    return names if known is None else frozenset(name for name in names if name in known)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nanoseconds(value: Any, beyond_ns: int) -> int | None:
    """The nanoseconds of a timestamp. None if `value` is not a timestamp, or has no time zone.

    `beyond_ns`: a message may be up to this much later than the microseconds of its row.
    """
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return timestamp_ns(value) + beyond_ns

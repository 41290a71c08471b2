"""Filter pushdown: filters reduce what is read and never exclude matching rows."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

import rt
from rt.log.format.constants import NUMBER_MAX
from rt.log.read.projection import Projection
from rt.spark.source.columns import check_columns
from rt.spark.source.filter_pushdown import PushedFilters, push_filters

POSITION, TIMESTAMP = ("position",), ("timestamp",)
NOON = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
NOON_NS = 1_769_860_800_000_005_000


@pytest.mark.parametrize(
    ("filters", "start", "end"),
    [
        ([EqualTo(POSITION, 5)], 5, 6),
        ([EqualNullSafe(POSITION, 5)], 5, 6),
        ([GreaterThan(POSITION, 5)], 6, NUMBER_MAX),
        ([GreaterThanOrEqual(POSITION, 5)], 5, NUMBER_MAX),
        ([LessThan(POSITION, 5)], 0, 5),
        ([LessThanOrEqual(POSITION, 5)], 0, 6),
        ([GreaterThan(POSITION, 5), LessThan(POSITION, 9), GreaterThan(POSITION, 3)], 6, 9),
    ],
)
def test_position_filters_are_fully_pushed_down(filters: list[Filter], start: int, end: int) -> None:
    assert push_filters([IsNotNull(POSITION), *filters], PushedFilters()) == (PushedFilters(start, end), [])


def test_position_list_filter_bounds_range_and_is_left_to_spark() -> None:
    filters = [In(POSITION, (9, 3, 5))]
    assert push_filters(filters, PushedFilters()) == (PushedFilters(3, 10), filters)


@pytest.mark.parametrize(
    ("one", "low", "high"),
    [
        (EqualTo(TIMESTAMP, NOON), NOON_NS, NOON_NS + 999),
        (GreaterThan(TIMESTAMP, NOON), NOON_NS, 2**63 - 1),
        (LessThanOrEqual(TIMESTAMP, NOON.astimezone(timezone(timedelta(hours=9)))), -(2**63), NOON_NS + 999),
        (GreaterThanOrEqual(("timestamp_ns",), 7), 7, 2**63 - 1),
        (In(TIMESTAMP, (NOON, NOON + timedelta(seconds=1))), NOON_NS, NOON_NS + 1_000_000_999),
    ],
)
def test_timestamp_filters_narrow_reading_and_are_left_to_spark(one: Filter, low: int, high: int) -> None:
    pushed = PushedFilters(interest=Projection(timestamp_low_ns=low, timestamp_high_ns=high))
    assert push_filters([one], PushedFilters()) == (pushed, [one])


def test_session_and_topic_filters_narrow_reading_together_with_topics_option() -> None:
    filters = [In(("session",), ("a", "b")), EqualTo(("session",), "a"), In(("topic",), ("trade", "quote"))]
    pushed, left = push_filters(
        filters, PushedFilters(interest=Projection(topics=frozenset({"quote", "news"})))
    )
    assert left == filters
    assert (pushed.interest.sessions, pushed.interest.topics) == ({"a"}, {"quote"})


@pytest.mark.parametrize(
    "one",
    [
        Not(EqualTo(POSITION, 5)),
        EqualTo(POSITION, None),
        EqualTo(("number",), 5),
        EqualTo(("other",), 5),
        EqualTo(("a", "position"), 5),
        GreaterThan(TIMESTAMP, datetime(2026, 1, 31)),  # noqa: DTZ001
        StringStartsWith(("topic",), "t"),
        In(("topic",), ("a", None)),
        In(POSITION, (1, None)),
        IsNotNull(("headers",)),
    ],
)
def test_unsupported_filter_is_left_to_spark(one: Filter) -> None:
    pushed, left = push_filters([one], PushedFilters())
    assert left == [one]
    assert pushed == PushedFilters()


def test_schema_with_unknown_mistyped_or_duplicate_columns_is_rejected() -> None:
    assert check_columns([("value", "binary"), ("timestamp_ns", "bigint")]) == ("value", "timestamp_ns")
    for fields, expected in [
        ([("key", "binary")], "unknown column 'key'. The columns are position bigint"),
        ([("value", "string")], "the wrong type for column value: got string, expected binary. Cast it"),
        ([("value", "binary")] * 2, "a duplicate column"),
        ([], "the schema is empty"),
    ]:
        with pytest.raises(rt.InvalidOption) as error:
            check_columns(fields)
        assert expected in str(error.value)

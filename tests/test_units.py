"""Tests that sizes, times and durations are parsed, rejected if invalid, and formatted to round-trip."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.units import NS_PER_MINUTE, SIZE_END, format_size, format_time, parse_rfc3339, parse_since, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1234", 1234),
        (" 7 ", 7),
        ("500M", 500 * 10**6),
        ("90Gi", 90 * 2**30),
        ("90GiB", 90 * 2**30),
        ("1.5Ki", 1536),
        ("0.5k", 500),
        ("3B", 3),
        ("2T", 2 * 10**12),
        ("1Pi", 2**50),
        ("1.9", 1),
        (str(SIZE_END - 1), SIZE_END - 1),
    ],
)
def test_parse_size_reads_plain_numbers_and_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "-1", "1e9", "1 Gi", "90gi", "1.", ".5", "1,5", "²", "0x10", "1_000", "9" * 30, "1GiBB"],
)
def test_parse_size_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="invalid size"):
        parse_size(text)


@pytest.mark.parametrize("text", [str(SIZE_END), "4096Pi", "99999999999999999999"])
def test_parse_size_rejects_too_large_size(text: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        parse_size(text)


@given(st.integers(0, SIZE_END - 1) | st.integers(0, 2000).map(lambda n: n << 30))
def test_formatted_size_parses_back_to_same_value(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_format_size_uses_largest_unit_with_exact_value() -> None:
    assert [format_size(n) for n in (0, 1000, 1024, 90 << 30)] == ["0", "1000", "1Ki", "90Gi"]


@given(st.text(max_size=12))
def test_parse_size_returns_valid_size_or_raises_value_error_for_any_text(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_size(text) < SIZE_END


# Times

T0 = 1_767_225_600 * 10**9


@given(st.integers(-(2**62), 2**62))
def test_formatted_time_parses_back_to_same_value(ns: int) -> None:
    assert parse_rfc3339(format_time(ns)) == ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2026-01-01T00:00:00Z", T0),
        ("2026-01-01t00:00:00z", T0),
        ("2026-01-01T00:01:00.5Z", T0 + NS_PER_MINUTE + 500_000_000),
        ("2025-12-31T23:30:00-00:30", T0),
        ("2026-01-01T01:00:00.000000001+01:00", T0 + 1),
        ("1969-12-31T23:59:59.9Z", -100_000_000),
    ],
)
def test_parse_rfc3339_reads_valid_times(text: str, ns: int) -> None:
    assert parse_rfc3339(text) == ns


@pytest.mark.parametrize(
    "text",
    [
        *("", "2026", "2026-01-01", "2026-13-01T00:00:00Z", "2026-02-30T00:00:00Z", "2026-01-01T24:00:00Z"),
        *("2026-01-01T00:00:60Z", "2026-01-01T00:00:00", "2026-01-01T00:00:00.Z"),
        *("2026-01-01T00:00:00.1234567890Z", "2026-01-01T00:00:00 01:00", "2026-01-01T00:00:00+24:00"),
        *("²026-01-01T00:00:00Z", " 2026-01-01T00:00:00Z"),
    ],
)
def test_parse_rfc3339_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rfc3339(text)


@pytest.mark.parametrize(("digits", "text"), [(9, "00.123456789Z"), (3, "00.123Z"), (0, "00Z")])
def test_format_time_writes_requested_number_of_decimals(digits: int, text: str) -> None:
    assert format_time(T0 + 123_456_789, digits=digits) == f"2026-01-01T00:00:{text}"


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("15m", 10**18 - 15 * 60 * 10**9),
        ("1.5s", 10**18 - 1_500_000_000),
        ("0ms", 10**18),
        ("2w", 10**18 - 14 * 86_400 * 10**9),
        ("1970-01-02", 86_400 * 10**9),
        ("1970-01-02T00:00:00+01:00", 82_800 * 10**9),
        ("17", 17),
    ],
)
def test_parse_since_reads_time_or_duration_before_now(text: str, time_ns: int) -> None:
    assert parse_since(text, 10**18) == time_ns


@pytest.mark.parametrize(
    "text", ["", "m", "-5m", "5M", "1970-02-30", "5y", "1m30s", "2300-01-01", "99999999w"]
)
def test_parse_since_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_since(text, 10**18)

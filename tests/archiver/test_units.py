"""Sizes: what people write is read, and what is written is read back."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.units import SIZE_END, format_size, parse_size


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
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "-1", "1e9", "1 Gi", "90gi", "1.", ".5", "1,5", "²", "0x10", "1_000", "9" * 30, "1GiBB"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid size"):
        parse_size(text)


@pytest.mark.parametrize("text", [str(SIZE_END), "4096Pi", "99999999999999999999"])
def test_a_size_beyond_all_disks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        parse_size(text)


@given(st.integers(0, SIZE_END - 1) | st.integers(0, 2000).map(lambda n: n << 30))
def test_what_is_written_is_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_a_size_is_written_in_the_largest_unit_that_fits() -> None:
    assert [format_size(n) for n in (0, 1000, 1024, 90 << 30)] == ["0", "1000", "1Ki", "90Gi"]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_size(text) < SIZE_END

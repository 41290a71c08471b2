"""Rows that come again in another order are published in the first one; other rows are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.spark.row_order import digest, order_of

rows = st.lists(
    st.tuples(st.binary(max_size=3), st.text(max_size=2), st.none() | st.integers(0, 3)), max_size=12
)


def digests(of: list[tuple[bytes, str, int | None]]) -> bytes:
    return b"".join(digest(value, topic.encode(), stamp) for value, topic, stamp in of)


@given(rows, st.data())
def test_the_same_rows_are_put_into_the_order_they_had_first(
    first: list[tuple[bytes, str, int | None]], data: st.DataObject
) -> None:
    again = data.draw(st.permutations(first))
    order = order_of(digests(first), digests(again), where="here")
    assert (again if order is None else [again[at] for at in order]) == first


@given(rows, rows)
def test_other_rows_are_refused(
    first: list[tuple[bytes, str, int | None]], again: list[tuple[bytes, str, int | None]]
) -> None:
    if sorted(map(repr, first)) == sorted(map(repr, again)):
        return
    with pytest.raises(rt.WriteConflict, match="other rows than the first time"):
        order_of(digests(first), digests(again), where="here")


def test_what_belongs_to_a_topic_does_not_belong_to_a_value() -> None:
    assert digest(b"ab", b"", 1) != digest(b"b", b"a", 1) != digest(b"", b"ab", 1)
    assert digest(b"", b"", None) != digest(b"", b"", 0)

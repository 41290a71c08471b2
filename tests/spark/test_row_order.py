"""Rows repeated in another order are published in the first order; different rows are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.spark.sink.row_order import digests_of, order_of

rows = st.lists(
    st.tuples(st.binary(max_size=3), st.text(max_size=2), st.none() | st.integers(0, 3)), max_size=12
)


def digests(of: list[tuple[bytes, str, int | None]]) -> bytes:
    values, topics, stamps = zip(*of, strict=True) if of else ((), (), ())
    return digests_of(values, [topic.encode() for topic in topics], stamps)


@given(rows, st.data())
def test_repeated_rows_are_restored_to_their_first_order(
    first: list[tuple[bytes, str, int | None]], data: st.DataObject
) -> None:
    again = data.draw(st.permutations(first))
    order = order_of(digests(first), digests(again), where="here")
    assert (again if order is None else [again[at] for at in order]) == first


@given(rows, rows)
def test_repeated_rows_with_different_content_raise_write_conflict(
    first: list[tuple[bytes, str, int | None]], again: list[tuple[bytes, str, int | None]]
) -> None:
    if sorted(map(repr, first)) == sorted(map(repr, again)):
        return
    with pytest.raises(rt.WriteConflict, match="other rows than the first time"):
        order_of(digests(first), digests(again), where="here")


def test_row_digest_distinguishes_topic_from_value() -> None:
    alike = digests_of([b"ab", b"b", b"", b"", b""], [b"", b"a", b"ab", b"", b""], [1, 1, 1, None, 0])
    assert len({alike[at : at + 16] for at in range(0, len(alike), 16)}) == 5

"""Makes every attempt of a partition publish the same rows in the same order. Pure.

A task may run again after a failure, in parallel with a slow attempt, or after a restart of the driver. Each
attempt must have the same rows, but after a shuffle Spark may deliver them in another order. So the first
attempt records its order, one digest per row, before it publishes anything, and later attempts publish in
that order. Invariant: if the rows differ, `rt.WriteConflict` is raised and nothing is published.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rt.errors import WriteConflict

DIGEST_BYTES = 16
Digests: TypeAlias = bytes | bytearray
"""Concatenated digests, in the order of the rows."""

_HEAD = struct.Struct("<?qI")
_HEAD_WITH_HEADERS = struct.Struct("<BqII")
"""Its first byte is 2 or 3, so that no row without headers has the same bytes."""
_DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])


def digests_of(
    values: Sequence[bytes],
    topics: Sequence[bytes],
    timestamps_ns: Sequence[int | None],
    headers: Sequence[bytes | None] = (),
) -> bytes:
    """A digest for each row. A timestamp is None if the rows have no timestamps. Packed headers are None if
    the row has no headers.

    `headers` may be empty if no row has headers.
    """
    if headers:
        rows = zip(values, topics, timestamps_ns, headers, strict=True)
        return b"".join([blake2b(_content(*row), digest_size=DIGEST_BYTES).digest() for row in rows])
    pack = _HEAD.pack
    return b"".join(
        [
            blake2b(
                pack(stamp is not None, stamp or 0, len(topic)) + topic + value, digest_size=DIGEST_BYTES
            ).digest()
            for value, topic, stamp in zip(values, topics, timestamps_ns, strict=True)
        ]
    )


def _content(value: bytes, topic: bytes, stamp: int | None, headers: bytes | None) -> bytes:
    if headers is None:
        return _HEAD.pack(stamp is not None, stamp or 0, len(topic)) + topic + value
    head = _HEAD_WITH_HEADERS.pack(2 + (stamp is not None), stamp or 0, len(topic), len(headers))
    return head + headers + topic + value


def order_of(expected: Digests, got: Digests, *, where: str) -> NDArray[np.int64] | None:
    """For each row of the order `expected`, its index in `got`; None if the order is the same.

    Equal rows are matched in order. `rt.WriteConflict` unless both have the same rows.
    """
    if expected == got:
        return None
    first, now = np.frombuffer(expected, _DIGEST), np.frombuffer(got, _DIGEST)
    if len(first) != len(now):
        raise _conflict(where, f"{len(now)} rows", f"{len(first)}")
    by_first, by_now = _sorted(first), _sorted(now)
    if not np.array_equal(first[by_first], now[by_now]):
        others = (Counter(now.tolist()) - Counter(first.tolist())).total()
        raise _conflict(where, f"{others} other rows of {len(now)}", "the same rows")
    order = np.empty(len(now), np.int64)
    order[by_first] = by_now
    return order


def _sorted(digests: NDArray[np.void]) -> NDArray[np.int64]:
    return np.lexsort((digests["low"], digests["high"]))


def _conflict(where: str, got: str, expected: str) -> WriteConflict:
    return WriteConflict(
        "the write was repeated with other rows than the first time",
        where=where,
        got=got,
        expected=expected,
        hint="A partition must have the same rows whenever it is computed: without rand(), uuid() or the "
        "current time, in the same number of partitions. To give up the unfinished write, use another name.",
    )

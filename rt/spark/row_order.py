"""Which rows a partition has, and in which order they are published.

Pure. A task may run twice: again after it failed, beside another one that is slow, or after the driver was
started anew. What must be the same each time is which rows its partition has. Their order need not be: behind
a shuffle Spark hands them over as they arrive. So the first attempt notes its order, a digest for each row,
before it publishes anything, and whoever comes after it publishes the same rows in that order. Law: other
rows are `rt.WriteConflict`, and nothing is published.
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
"""One digest behind the other, in the order of the rows."""

_HEAD = struct.Struct("<?qI")
_DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])


def digests_of(
    values: Sequence[bytes], topics: Sequence[bytes], timestamps_ns: Sequence[int | None]
) -> bytes:
    """What tells each row from every other one. A timestamp is None where the rows have none."""
    pack = _HEAD.pack
    return b"".join(
        [
            blake2b(
                pack(stamp is not None, stamp or 0, len(topic)) + topic + value, digest_size=DIGEST_BYTES
            ).digest()
            for value, topic, stamp in zip(values, topics, timestamps_ns, strict=True)
        ]
    )


def order_of(wanted: Digests, got: Digests, *, where: str) -> NDArray[np.int64] | None:
    """For each row of the order `wanted` which of the rows `got` it is; None if they are in that order.

    Rows that are alike are taken in turn. `rt.WriteConflict` unless both are the same rows.
    """
    if wanted == got:
        return None
    first, now = np.frombuffer(wanted, _DIGEST), np.frombuffer(got, _DIGEST)
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


def _conflict(where: str, got: str, wanted: str) -> WriteConflict:
    return WriteConflict(
        "the write is made again with other rows than the first time",
        where=where,
        got=got,
        wanted=wanted,
        hint="A partition must have the same rows whenever it is computed: without rand(), uuid() or the "
        "current time, cut into as many partitions as before. To give up what was begun, go on under "
        "another name.",
    )

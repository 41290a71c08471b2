"""Headers of messages: pairs of a key and a value, which follow the values of a batch.

    counts         uint32[3]            of sets, of pairs in all sets, of keys
    set offsets    int32[sets + 1]      from 0; set s has the pairs offsets[s] to offsets[s + 1], exclusive
    key offsets    int32[keys + 1]      from 0; key k is in the keys' UTF-8 below
    value offsets  int32[pairs + 1]     from 0; the value of pair p is in the bytes below
    set index      uint16[messages]     the set of each message; left out when there is one set
    key index      uint16[pairs]        the key of each pair; left out unless there are several keys
    keys           UTF-8
    values         to the end

A set is the headers of one message; messages with equal headers share it. All parts follow each other without
padding.

Invariant: the headers of a batch are limited as if each message had its own copy, and each set counts at
least once. So a few stored bytes cannot fill a reader's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rt.errors import InvalidHeader

Headers: TypeAlias = tuple[tuple[str, bytes], ...]
"""The headers of a message, in order. A key may repeat."""

HeadersInput: TypeAlias = Mapping[str, bytes] | Sequence[tuple[str, bytes]]
"""The headers of a message as a caller passes them."""

HEADERS_MAX: Final = 128
"""Headers of one message."""
HEADERS_BYTES_MAX: Final = 64 * 1024
"""Bytes of the keys and values of one message."""
SETS_MAX: Final = 65_535
"""Sets in one batch, the empty one too, and pairs in them: a uint16 counts them."""
PAIR_COST_BYTES: Final = 16
"""A pair's share of the columns: at most 10 bytes stored; 16 when each message has its own copy."""
COPIES_BYTES_MAX: Final = 4 * 2**20
"""Bytes of the headers of a batch if each message has its own copy, with `PAIR_COST_BYTES` for each pair."""
SECTION_BYTES_MAX: Final = 8 * 2**20
"""Bytes of the headers of a batch as stored: nodes hold them in memory completely."""
SECTION_COST_BYTES: Final = 64


def cost_of(headers: Headers) -> int:
    """An upper bound of the bytes of the headers in a batch. For `COPIES_BYTES_MAX` they count as exactly
    this size.
    """
    return sum(PAIR_COST_BYTES + len(key.encode()) + len(value) for key, value in headers)


def encode_headers(sets: Sequence[Headers], index: npt.NDArray[np.uint16] | None) -> bytes:
    """The encoded headers, which follow the values in a batch. Without `index` all messages have the only
    set.
    """
    keys: dict[bytes, int] = {}
    key_index: list[int] = []
    values: list[bytes] = []
    ends = [0]
    for headers in sets:
        for key, value in headers:
            key_index.append(keys.setdefault(key.encode(), len(keys)))
            values.append(value)
        ends.append(len(values))
    counts = (len(sets), len(values), len(keys))
    sizes = accumulate(map(len, keys), initial=0), accumulate(map(len, values), initial=0)
    return b"".join(
        [
            np.array([*counts, *ends, *sizes[0], *sizes[1]], "<u4").tobytes(),
            b"" if index is None else index.astype("<u2").tobytes(),
            np.array(key_index, "<u2").tobytes() if len(keys) > 1 else b"",
            *keys,
            *values,
        ]
    )


def checked_headers(headers: HeadersInput) -> Headers:
    """A copy of a message's headers. Raises `TypeError` or `rt.InvalidHeader`."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found = tuple([_checked_pair(*pair) for pair in pairs])
    if len(found) > HEADERS_MAX:
        raise InvalidHeader("too many headers", got=len(found), expected=f"at most {HEADERS_MAX}")
    size = cost_of(found) - PAIR_COST_BYTES * len(found)
    if size > HEADERS_BYTES_MAX:
        raise InvalidHeader(
            "the headers are too large",
            got=f"{size} bytes of keys and values",
            expected=f"at most {HEADERS_BYTES_MAX}",
            hint="Put large content into the message's value.",
        )
    return found


def headers_of_each(headers: HeadersInput | Sequence[HeadersInput], count: int) -> list[Headers]:
    """The headers of `count` messages: one set for all (a mapping, or pairs), or a set for each.

    Raises `TypeError` or `rt.InvalidHeader`.
    """
    if isinstance(headers, Mapping) or _is_pair(headers[0]):
        return [checked_headers(headers)] * count  # type: ignore[arg-type]
    if len(headers) != count:
        raise InvalidHeader(
            "headers do not fit the messages", got=f"{len(headers)} sets", expected=f"{count}, or one for all"
        )
    return [checked_headers(each) for each in headers]  # type: ignore[arg-type]


def _is_pair(found: object) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], str)


def _checked_pair(key: object, value: object) -> tuple[str, bytes]:
    if not isinstance(key, str):
        raise TypeError(f"a header's key must be str, not {type(key).__name__}")
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"the value of header {key!r} must be bytes, not {type(value).__name__}: encode it")
    try:
        if not key.encode():
            raise InvalidHeader("a header has an empty key", expected="a name")
    except UnicodeEncodeError as error:
        raise InvalidHeader(
            "a header's key is not valid Unicode", got=ascii(key)[:200], expected="text that UTF-8 can encode"
        ) from error
    return key, bytes(value)

"""The column `headers` on its way out of Spark: checked, and packed into one binary value for each row.

A packed header is the lengths of its key and its value (4 bytes each, little-endian), then the key and the
value. Rows without headers are null. Equal bytes are equal headers, so the digests of rows cover them.

Invariant: headers that a log cannot hold are refused with an error that names their row, before any row of
the partition is published. No work is done per row.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rt.errors import InvalidHeader
from rt.log.format.headers import HEADERS_BYTES_MAX, HEADERS_MAX, Headers

HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_LENGTHS: Final = struct.Struct("<II")
_FEW_BYTES_MAX: Final = 1024
"""Headers of up to this packed size are cached after unpacking: most rows have the same few headers."""
_NULL_HINT: Final = (
    "Filter them: filter(headers, h -> h.key IS NOT NULL AND h.value IS NOT NULL). A value may be empty, "
    "and a row without headers may have null instead of an array."
)

Int64s = npt.NDArray[np.int64]


def pack_headers(column: pa.Array, first_row: int) -> pa.Array:
    """The packed headers of each row. `first_row` is the index of the first row in its partition.

    Raises `rt.InvalidHeader`.
    """
    column = column.cast(HEADERS)
    counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    ends = _ends(counts)
    pairs = column.flatten()
    keys, values = pairs.flatten()
    rows = _Rows(ends, first_row)
    _check_nulls(pairs, keys, values, rows)
    key_lengths, value_lengths = (_lengths(each) for each in (keys, values))
    _check_keys(keys, key_lengths, rows)
    _check_limits(counts, _ends(key_lengths + value_lengths), rows)
    lengths = np.stack([key_lengths, value_lengths], axis=1).astype("<u4")
    places = np.arange(len(pairs) + 1, dtype=np.int32) * np.int32(_LENGTHS.size)
    heads = pa.Array.from_buffers(
        pa.binary(), len(pairs), [None, pa.py_buffer(places), pa.py_buffer(lengths)]
    )
    packed = pc.binary_join_element_wise(heads, keys.cast(pa.binary()), values, pa.scalar(b"", pa.binary()))
    packed_ends = _ends(key_lengths + value_lengths + _LENGTHS.size)[ends].astype(np.int32)
    validity = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    content = packed.buffers()[2] or pa.py_buffer(b"")
    return pa.Array.from_buffers(pa.binary(), len(column), [validity, pa.py_buffer(packed_ends), content])


def unpack_headers(packed: bytes | None) -> Headers:
    """The headers that were packed."""
    if packed is None:
        return ()
    return _few_headers(packed) if len(packed) <= _FEW_BYTES_MAX else _unpacked(packed)


@lru_cache(maxsize=1024)
def _few_headers(packed: bytes) -> Headers:
    return _unpacked(packed)


def _unpacked(packed: bytes) -> Headers:
    found, at = [], 0
    while at < len(packed):
        key_bytes, value_bytes = _LENGTHS.unpack_from(packed, at)
        value_at = at + _LENGTHS.size + key_bytes
        at = value_at + value_bytes
        found.append((packed[value_at - key_bytes : value_at].decode(), packed[value_at:at]))
    return tuple(found)


class _Rows:
    """Raises errors that name a row of a partition. `ends`: where the headers of each row end."""

    def __init__(self, ends: Int64s, first_row: int) -> None:
        self.ends = ends
        self._first = first_row

    def of_pair(self, pair: int) -> int:
        return int(np.searchsorted(self.ends, pair, "right")) - 1

    def refuse(
        self, what: str, row: int, *, expected: str, got: str | None = None, hint: str | None = None
    ) -> NoReturn:
        where = f"column headers, row {self._first + row}"
        raise InvalidHeader(what, where=where, got=got, expected=expected, hint=hint)


def _check_nulls(pairs: pa.Array, keys: pa.Array, values: pa.Array, rows: _Rows) -> None:
    for what, each in (("a header", pairs), ("a header's key", keys), ("the value of header", values)):
        if each.null_count:
            at = int(np.flatnonzero(each.is_null().to_numpy(zero_copy_only=False))[0])
            name = f" {_text(keys[at])!r}" if each is values else ""
            rows.refuse(f"{what}{name} is null", rows.of_pair(at), expected="no null", hint=_NULL_HINT)


def _check_keys(keys: pa.Array, lengths: Int64s, rows: _Rows) -> None:
    if not lengths.all():
        row = rows.of_pair(int(lengths.argmin()))
        rows.refuse("a header has an empty key", row, expected="a name")
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        for at, key in enumerate(keys.cast(pa.binary()).to_pylist()):
            try:
                key.decode()
            except UnicodeDecodeError:
                rows.refuse(f"a header's key {key!r} is not UTF-8", rows.of_pair(at), expected="text")
        raise


def _check_limits(counts: Int64s, size_ends: Int64s, rows: _Rows) -> None:
    if len(counts) and counts.max() > HEADERS_MAX:
        row = int(counts.argmax())
        rows.refuse("too many headers", row, got=str(counts[row]), expected=f"at most {HEADERS_MAX}")
    sizes = np.diff(size_ends[rows.ends])
    if len(sizes) and sizes.max() > HEADERS_BYTES_MAX:
        row = int(sizes.argmax())
        rows.refuse(
            "the headers are too large",
            row,
            got=f"{sizes[row]} bytes of keys and values",
            expected=f"at most {HEADERS_BYTES_MAX}",
            hint="Put large content into the message's value.",
        )


def _text(key: pa.Scalar) -> str:
    """The key as text, even if it is not valid UTF-8."""
    content: bytes = key.as_buffer().to_pybytes()
    return content.decode(errors="backslashreplace")


def _lengths(texts: pa.Array) -> Int64s:
    found: Int64s = pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _ends(lengths: Int64s) -> Int64s:
    """Offsets from 0 of parts with these lengths."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends
